"""The built-in backends. They are registered through the hook that plug-ins use."""

from collections.abc import Sequence

from nsa_core.backends.base import BranchBackend
from nsa_core.plugins.hookspecs import hookimpl
from nsa_core.reference.sdpa import sdpa_backends


@hookimpl
def nsa_branch_backends() -> Sequence[BranchBackend]:
    """Return the SDPA reference backend of every operation except the fused one."""
    return sdpa_backends()
