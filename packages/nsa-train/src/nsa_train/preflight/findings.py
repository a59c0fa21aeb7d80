"""The findings of preflight: one line per rule."""

from collections.abc import Iterator
from typing import Any

from attrs import field, mutable

from nsa_train.data.dataset import Dataset
from nsa_train.errors import ConfigError


@mutable
class Preflight:
    """One line per rule; a warning is no failure."""

    passed: list[str] = field(factory=list)
    warned: list[str] = field(factory=list)
    failed: list[str] = field(factory=list)
    needs: list[str] = field(factory=list)
    """The needs of the run: GPUs, memory, disk; of use where they are missing."""
    routes: dict[str, str] = field(factory=dict)
    """Operation -> the backend that serves it in training."""
    memory_gib: float = 0.0
    """The estimated peak memory of a process."""
    dataset: Dataset | None = None
    """The opened data, so that a run need not open them again; None where that failed."""

    def lines(self) -> Iterator[str]:
        """Give each line of every finding after its mark `ok`, `needs`, `warn` or `FAIL`, failures last."""
        for mark, found in (("ok", self.passed), ("needs", self.needs), ("warn", self.warned), ("FAIL", self.failed)):
            for line in "\n".join(found).splitlines():
                yield f"{mark:5} {line}"

    def content(self) -> dict[str, Any]:
        """Return the findings as `preflight --json` prints them."""
        return {
            "passed": self.passed,
            "needs": self.needs,
            "warned": self.warned,
            "failed": self.failed,
            "routes": self.routes,
            "memory_estimate_gib": round(self.memory_gib, 3),
        }

    def require(self) -> Dataset:
        """Return the opened data of a run that may start.

        Raises:
            ConfigError: with every failed rule, where there is one.
        """
        if self.failed or self.dataset is None:
            raise ConfigError.of(self.failed)
        return self.dataset
