"""What makes a run fit in memory, by the estimate: the cheapest change that is enough, or what stands in the way of all."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from attrs import evolve, frozen

from nsa_train.host.machine import Machine
from nsa_train.preflight.memory import KEPT_SHARE, LIBRARIES, OF_ROWS, MemoryEstimate, estimate_memory
from nsa_train.settings.config import RunConfig
from nsa_train.settings.rules import MOST_ACCUMULATED

RECOMPUTED = tuple(KEPT_SHARE)
"""Values of train.activation_checkpointing, the fastest first."""
CHUNK = 4096
"""Tokens to which train.loss_chunk is lowered."""
MOST_PROCESSES = 2**12
"""Up to which more of them are thought of."""


@frozen(kw_only=True)
class MemoryMends:
    """What may be changed of a run."""

    config: RunConfig
    parameters: int
    world_sizes: Sequence[int]
    """How many processes there may be; the fewest have the most to hold."""
    resuming: bool
    """Then the rows stay as they are: the run has a position in them."""

    def offered(self, machine: Machine, *limits_gib: float) -> str:
        """Return the cheapest change with which a process takes no more than the first of `limits_gib` that one can meet.

        Where none can, it is said what takes the most, and what else would be another run, or another machine.
        """
        changes = list(self._changes())
        for limit in limits_gib:
            for change in changes:
                if self._estimate(change).total_gib <= limit:
                    return f"use {_as_options(change)}"
        return self._beyond_settings(machine, changes[-1] if changes else {}, limits_gib[0])

    def _changes(self) -> Iterator[dict[str, Any]]:
        """Give the changes that leave the rows of a step as they are, the cheapest first and the most thorough last."""
        train = self.config.train
        recomputed = RECOMPUTED[RECOMPUTED.index(train.activation_checkpointing) :]
        chunks = [train.loss_chunk] if 0 < train.loss_chunk <= CHUNK else [train.loss_chunk, CHUNK]
        for name, rows, chunk in itertools.product(recomputed, self._rows(), chunks):
            wanted = {
                "batch_size": rows,
                "accumulate": train.batch_size * train.accumulate // rows,
                "activation_checkpointing": name,
                "loss_chunk": chunk,
            }
            if change := {key: value for key, value in wanted.items() if value != getattr(train, key)}:
                yield change

    def _rows(self) -> list[int]:
        """Return the numbers of rows that a micro-batch may have, the present one first, with as many in a step."""
        train = self.config.train
        if self.resuming:
            return [train.batch_size]
        total, shares = train.batch_size * train.accumulate, math.lcm(*self.world_sizes, train.nproc_per_node or 1)
        fewer = range(train.batch_size - 1, 0, -1)
        return [train.batch_size, *(rows for rows in fewer if total % rows == rows % shares == 0 and total // rows <= MOST_ACCUMULATED)]

    def _beyond_settings(self, machine: Machine, change: Mapping[str, Any], limit_gib: float) -> str:
        least = self._estimate(change)
        name, taken = least.largest
        found = f"{name} alone take {taken:,.1f} GiB"
        if name in OF_ROWS and change:
            found = f"with {_as_options(change)} it is still about {least.total_gib:,.1f} GiB: {found}"
        return f"{found}; use {_either(self._other_runs(machine, change, limit_gib, name))}"

    def _other_runs(self, machine: Machine, change: Mapping[str, Any], limit_gib: float, largest: str) -> Iterator[str]:
        """Give what would fit and is not this run on this machine."""
        if largest == LIBRARIES:
            yield "a machine with more memory"
            return
        if largest in OF_ROWS and (seq_len := self._fitting_length(change, limit_gib)):
            yield f"--set train.seq_len={seq_len}"
        yield "a smaller model"
        if machine.device_type != "cuda":
            yield "a machine with more memory"
            yield "train.strategy=fsdp on GPUs"
        elif processes := self._fitting_processes(change, limit_gib):
            yield f"train.strategy=fsdp on {processes} or more GPUs"
        else:
            yield "a GPU with more memory"

    def _fitting_length(self, change: Mapping[str, Any], limit_gib: float) -> int | None:
        """Return train.seq_len halved until the run fits; None where that does not help, or the rows must stay."""
        halved = itertools.takewhile(lambda length: length >= 2, (self.config.train.seq_len >> times for times in itertools.count(1)))
        fitting = (length for length in halved if self._estimate({**change, "seq_len": length}).total_gib <= limit_gib)
        return None if self.resuming else next(fitting, None)

    def _fitting_processes(self, change: Mapping[str, Any], limit_gib: float) -> int | None:
        """Return how many processes can share the run by FSDP: those of now, doubled until it fits; None where that does not help."""
        train, processes = self.config.train, max(2, min(self.world_sizes))
        while processes <= MOST_PROCESSES:
            rows = train.batch_size if self.resuming else processes
            shared = {**change, "strategy": "fsdp", "nproc_per_node": 0, "batch_size": rows, "accumulate": 1}
            if rows % processes == 0 and self._estimate(shared, processes).total_gib <= limit_gib:
                return processes
            processes *= 2
        return None

    def _estimate(self, change: Mapping[str, Any], processes: int | None = None) -> MemoryEstimate:
        config = evolve(self.config, train=evolve(self.config.train, **change))
        return estimate_memory(config, self.parameters, processes or min(self.world_sizes))


def _as_options(change: Mapping[str, Any]) -> str:
    return " ".join(f"--set train.{key}={value}" for key, value in change.items())


def _either(ways: Iterator[str]) -> str:
    *first, last = ways
    return f"{', '.join(first)}, or {last}" if first else last
