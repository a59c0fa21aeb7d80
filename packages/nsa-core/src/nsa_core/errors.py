"""The errors that callers of nsa_core may want to catch."""


class NSAError(Exception):
    """Base of every error that this library raises on purpose.

    A message says what was found (with the value), why it is refused (the rule) and what to do (a value that works).
    """


class ConfigError(NSAError, ValueError):
    """A configuration value breaks a rule of the method."""


class InputError(NSAError, ValueError):
    """A tensor given to an operation has the wrong shape, dtype, device or values."""


class CacheOverflowError(NSAError, RuntimeError):
    """More tokens than a cache was built for, or a crop deeper than it can undo."""


class BackendUnavailableError(NSAError, RuntimeError):
    """A backend asked for by name cannot serve the request; the message lists every reason."""


class DuplicateBackendError(NSAError, ValueError):
    """Two backends claim one name for one operation."""
