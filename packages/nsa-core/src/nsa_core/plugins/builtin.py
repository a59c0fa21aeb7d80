"""The built-in backends, registered through the same hook as any plug-in's."""

from collections.abc import Sequence

from nsa_core.backends.base import BranchBackend
from nsa_core.plugins.hookspecs import hookimpl
from nsa_core.reference.sdpa import sdpa_backends


@hookimpl
def nsa_branch_backends() -> Sequence[BranchBackend]:
    """Return the SDPA reference of every operation."""
    return sdpa_backends()
