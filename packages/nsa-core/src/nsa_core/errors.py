"""The errors that callers of nsa_core may want to catch."""


class NSAError(Exception):
    """Base of every error that this library raises on purpose.

    A message says what was found (with the value), why it is refused (the rule) and what to do (a value that works).
    """

    is_refusal = False
    """True if a configuration cannot be satisfied; a command line then exits with 2."""

    def in_one_line(self) -> str:
        """Return the message as one line; without this, each reason against a backend has its own line."""
        return "; ".join(line.strip() for line in str(self).splitlines()).replace(":; ", ": ")


class ConfigError(NSAError, ValueError):
    """A configuration value breaks a rule of the method."""

    is_refusal = True


class InputError(NSAError, ValueError):
    """A tensor given to an operation has the wrong shape, dtype, device or values."""


class CacheOverflowError(NSAError, RuntimeError):
    """A cache got more tokens than it has room for, or a crop asked for more tokens than the cache can remove."""


class BackendUnavailableError(NSAError, RuntimeError):
    """A backend selected by name cannot serve the request; the message lists every reason."""

    is_refusal = True


class DuplicateBackendError(NSAError, ValueError):
    """Two backends claim one name for one operation."""

    is_refusal = True


def type_of(value: object) -> str:
    """Return the name of a value's type with its article, for a message: "an int", "a str"; for None: "None"."""
    name = type(value).__name__
    if value is None:
        return "None"
    return f"an {name}" if name.startswith(("NSA", "nd", *"aeioAEIO")) else f"a {name}"
