"""Load plug-ins one by one, and build the process's default registry."""

from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import Any

import pluggy
from attrs import define, field, frozen

from nsa_core.backends.base import BranchBackend
from nsa_core.backends.registry import BackendRegistry, check_is_backend
from nsa_core.errors import DuplicateBackendError
from nsa_core.plugins import builtin, hookspecs
from nsa_core.tracing import constant_when_traced

GROUP = "nsa"
BUILTIN = "nsa_core.plugins.builtin"


@frozen(kw_only=True)
class LoadedPlugin:
    """A plug-in that returned its backends."""

    name: str
    origin: str
    backends: tuple[BranchBackend, ...]


@frozen(kw_only=True)
class BrokenPlugin:
    """A plug-in that could not be used, and the error."""

    name: str
    origin: str
    error: str


@frozen(kw_only=True)
class Plugins:
    """The plug-ins that were found. `loaded` is in the order of registration, the built-in plug-in first."""

    loaded: tuple[LoadedPlugin, ...]
    broken: tuple[BrokenPlugin, ...]

    def registry(self) -> BackendRegistry:
        """Return a registry of every loaded backend.

        Raises:
            DuplicateBackendError: if two backends have the same name and operation; the message names both.
        """
        registry = BackendRegistry()
        for plugin in self.loaded:
            for backend in plugin.backends:
                try:
                    registry.register(backend)
                except DuplicateBackendError as error:
                    raise DuplicateBackendError(f"plug-in {plugin.name!r} ({plugin.origin}): {error}") from None
        return registry


def load_plugins(found: Iterable[EntryPoint] | None = None) -> Plugins:
    """Return the built-in plug-in and the plug-ins of entry-point group `nsa`. A plug-in that fails is listed as broken; no error is raised.

    `found` replaces the entry points of the installed packages.
    """
    loaded, broken = [_ask(builtin, "builtin", BUILTIN)], []
    for entry_point in sorted(entry_points(group=GROUP) if found is None else found, key=lambda entry: entry.name):
        if entry_point.value == BUILTIN:
            continue
        try:
            loaded.append(_ask(entry_point.load(), entry_point.name, _origin(entry_point)))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a third party may raise anything; it must not take the host down
            reason = f"{type(error).__name__}: {error}"
            broken.append(BrokenPlugin(name=entry_point.name, origin=_origin(entry_point), error=reason))
    return Plugins(loaded=tuple(loaded), broken=tuple(broken))


def _ask(plugin: ModuleType | Any, name: str, origin: str) -> LoadedPlugin:
    """Return one plug-in with its backends. Each plug-in has its own pluggy manager, so that no plug-in can disturb another."""
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    manager.register(plugin, name=name)
    manager.check_pending()
    if not manager.hook.nsa_branch_backends.get_hookimpls():
        raise TypeError(f"{plugin!r} implements no hook nsa_branch_backends; decorate it with nsa_core.plugins.hookimpl")
    offers = manager.hook.nsa_branch_backends()
    if not offers:
        raise TypeError(f"nsa_branch_backends of {plugin!r} returned None (the rule: a sequence of backends); return [] for none")
    backends = tuple(backend for offer in offers for backend in offer)
    for backend in backends:
        check_is_backend(backend)
    return LoadedPlugin(name=name, origin=origin, backends=backends)


def _origin(entry_point: EntryPoint) -> str:
    package = f" of {entry_point.dist.name} {entry_point.dist.version}" if entry_point.dist else ""
    return f"{entry_point.value}{package}"


@define
class _Process:
    """State of the process: the plug-ins that it found when it first needed a backend, and their registry."""

    plugins: Plugins | None = field(default=None)
    registry: BackendRegistry | None = field(default=None)


_process = _Process()


@constant_when_traced
def _build_once() -> bool:
    if _process.registry is None:
        _process.plugins = load_plugins()
        _process.registry = _process.plugins.registry()
    return True


def default_registry() -> BackendRegistry:
    """Return the process's registry, which is built from the entry points on first use.

    Raises:
        DuplicateBackendError: if two installed backends have the same name and operation.
    """
    _build_once()
    assert _process.registry is not None
    return _process.registry


def default_plugins() -> Plugins:
    """Return the plug-ins of the default registry, including broken ones."""
    _build_once()
    assert _process.plugins is not None
    return _process.plugins
