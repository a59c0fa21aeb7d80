"""The hook of plug-ins. A plug-in is a module with the function `nsa_branch_backends`, named by an entry point of group `nsa`:

    # pyproject.toml
    [project.entry-points.nsa]
    mine = "my_package.plugin"

    # my_package/plugin.py
    from nsa_core.plugins import hookimpl

    @hookimpl
    def nsa_branch_backends():
        return [MyBackend()]

Keep the imports of the module light: it is loaded on every machine, also if its kernels cannot run there.
"""

from collections.abc import Sequence

import pluggy

from nsa_core.backends.base import BranchBackend

PROJECT = "nsa"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def nsa_branch_backends() -> Sequence[BranchBackend]:  # type: ignore[empty-body]
    """Return the backends that this plug-in offers, one object per operation; names are unique per operation."""
