"""The minimum length from which `"auto"` may choose a provider, from the user's own table of measured lengths or the shipped one."""

from collections.abc import Callable
from pathlib import Path

from nsa_core import BranchRequest, Reason
from nsa_core.backends.thresholds import MinLength, table_of, user_file

SHIPPED = Path(__file__).parent / "thresholds.json"
UNMEASURED = Reason.policy("no length is measured from which it is faster than the kernels of this project; name it to take it")
Files = Callable[[], tuple[Path, ...]]


def threshold_files() -> tuple[Path, ...]:
    """Return the user's table and the shipped one. For each GPU, shape and direction, the first table with an entry decides."""
    return user_file(), SHIPPED


def reasons_by_length(request: BranchRequest, provider: str, files: tuple[Path, ...]) -> tuple[Reason, ...]:
    """Return why `provider`, a backend's name, should not serve a call of this length; empty from the measured minimum on."""
    if request.compute_capability is None:
        return (UNMEASURED,)
    problems = [problem for path in files if (problem := table_of(path).problem) is not None]
    if problems:
        return tuple(Reason.policy(problem) for problem in problems)
    measured = _measured(request, provider, files)
    if not measured:
        return (UNMEASURED,)
    return tuple(Reason.policy(message) for entry in measured if (message := _too_short(entry, request.num_keys)))


def beats_triton(request: BranchRequest, provider: str, files: tuple[Path, ...]) -> bool:
    """Return True if `provider` was measured to be faster than Triton's kernels at this length."""
    return any(entry.against == "triton" and not _too_short(entry, request.num_keys) for entry in _measured(request, provider, files))


def _measured(request: BranchRequest, provider: str, files: tuple[Path, ...]) -> tuple[MinLength, ...]:
    """Return the entries for calls like `request` from the first table that has any. Comparisons with other providers are left out."""
    for path in files:
        found = tuple(entry for entry in table_of(path).of(request, provider) if not entry.against.startswith("flash_attn"))
        if found:
            return found
    return ()


def _too_short(entry: MinLength, length: int) -> str:
    """Return why a call of `length` tokens is too short; "" if it is long enough."""
    if entry.min_length is None:
        return (
            f"measured up to {entry.max_length:,} tokens: there is no length from which it stays enough faster than {entry.against}; "
            "name it to take it"
        )
    if length < entry.min_length:
        return f"measured faster than {entry.against} from {entry.min_length:,} tokens on; this call has {length:,}; name it to take it"
    return ""
