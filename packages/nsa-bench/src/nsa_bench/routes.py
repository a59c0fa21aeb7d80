"""A registry that notes which backend served what, so that a result names what ran and not what should have run."""

from typing import Any

from nsa_bench.errors import BenchError
from nsa_core import BackendRegistry, DuplicateBackendError, load_plugins


class RouteRecorder(BackendRegistry):
    """The backends of the installed packages; `served` tells who ran since `forget`."""

    @classmethod
    def of_installed(cls) -> "RouteRecorder":
        """Return a registry of every plug-in that loads.

        Raises:
            BenchError: when two plug-ins offer one backend.
        """
        try:
            return cls(tuple(load_plugins().registry().backends))
        except DuplicateBackendError as error:
            raise BenchError(str(error)) from error

    def __init__(self, backends: tuple[Any, ...] = ()) -> None:
        """Register `backends`, in order."""
        super().__init__(backends)
        self._served: dict[str, str] = {}

    def resolve_index(self, backend: str, optional: bool, device_index: int, *fields: Any) -> int:
        """Return what BackendRegistry does, and note it; fields[0] is the operation."""
        index: int = super().resolve_index(backend, optional, device_index, *fields)
        if index >= 0:
            self._served[fields[0]] = self.backends[index].name
        return index

    def forget(self) -> None:
        """Forget who ran."""
        self._served.clear()

    @property
    def served(self) -> str:
        """Return who ran: "triton" where one did it all, else "cmp sdpa, slc triton"."""
        names = set(self._served.values())
        return names.pop() if len(names) == 1 else ", ".join(f"{operation} {name}" for operation, name in self._served.items())
