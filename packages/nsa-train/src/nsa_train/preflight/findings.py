"""The findings of preflight: one line per rule."""

from collections.abc import Iterator
from typing import Any

from attrs import field, mutable

from nsa_train.checkpoint.initial import InitialWeights
from nsa_train.errors import ConfigError


@mutable
class Preflight:
    """Findings with one line per rule; a warning is not a failure."""

    passed: list[str] = field(factory=list)
    warned: list[str] = field(factory=list)
    failed: list[str] = field(factory=list)
    needs: list[str] = field(factory=list)
    """The needs of the run: GPUs, memory, disk. They are useful if something is missing."""
    routes: dict[str, str] = field(factory=dict)
    """Operation -> the backend that serves it in training."""
    memory_gib: float = 0.0
    """The estimated peak memory of a process."""
    initial: InitialWeights | None = None
    """The verified weights of `train.init_from`, so that the run need not verify them again."""

    def lines(self) -> Iterator[str]:
        """Return each line of every finding with its mark `ok`, `needs`, `warn` or `FAIL` before it, failures last."""
        for mark, found in (("ok", self.passed), ("needs", self.needs), ("warn", self.warned), ("FAIL", self.failed)):
            for line in "\n".join(found).splitlines():
                yield f"{mark:5} {line}"

    def content(self) -> dict[str, Any]:
        """Return the findings as `preflight --json` prints them."""
        names = ("passed", "needs", "warned", "failed", "routes")
        return {**{name: getattr(self, name) for name in names}, "memory_estimate_gib": round(self.memory_gib, 3)}

    def require(self) -> None:
        """Check that the run may start.

        Raises:
            ConfigError: with every failed rule, if there is one.
        """
        if self.failed:
            raise ConfigError.of(self.failed)
