"""Estimate the peak memory of a run, and find a fix for a run that does not fit: the cheapest change that is enough."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from attrs import evolve, frozen

from nsa_train.host.machine import Machine
from nsa_train.model.decoder import intermediate_size_of, vocab_size_of
from nsa_train.settings.config import Layer, RunConfig
from nsa_train.settings.rules import MOST_ACCUMULATED

GIB = 2**30
STATE_BYTES = 16
"""Bytes per parameter: weight, gradient and Adam's two moments, float32."""
FROZEN_BYTES = 4
"""Bytes per parameter of train.selection_teacher: the weight, float32; autocast's copies of frozen weights last for one product."""
CAST_BYTES = 2
"""Bytes per parameter: autocast's 16-bit copy."""
LOGIT_BYTES = 12
"""Bytes per token and id: 16-bit logits, their float32 copy, its gradient, and room for the softmax."""
OVERHEAD_GIB = 0.8
"""A CUDA context, its libraries and the allocator's gaps; on a CPU, Python and torch."""
KEPT_SHARE = {"none": 1.0, "selective": 0.6, "full": 0.0}
"""Share of a block's activations that is kept, by train.activation_checkpointing; "full" keeps only its input."""
STATES, OF_ROWS, LIBRARIES = "weights, gradients and optimizer", ("activations", "logits"), "Python, torch and its libraries"
TEACHER = "the selection teacher"
"""The names of the parts, for messages; two of them grow with the rows."""
RECOMPUTED = tuple(KEPT_SHARE)
"""Values of train.activation_checkpointing, the fastest first."""
CHUNK = 4096
"""Tokens to which train.loss_chunk is lowered."""
MOST_PROCESSES = 2**12
"""Maximum number of processes that a fix suggests."""


@frozen(kw_only=True)
class MemoryEstimate:
    """The parts of the peak, in GiB, of one process."""

    states_gib: float
    activations_gib: float
    logits_gib: float
    teacher_gib: float = 0.0

    @property
    def total_gib(self) -> float:
        """Return the sum, with the overhead."""
        return self.states_gib + self.activations_gib + self.logits_gib + self.teacher_gib + OVERHEAD_GIB

    @property
    def largest(self) -> tuple[str, float]:
        """Return the name of the largest part, and its GiB."""
        sizes = (self.states_gib, self.activations_gib, self.logits_gib, self.teacher_gib, OVERHEAD_GIB)
        return max(zip((STATES, *OF_ROWS, TEACHER, LIBRARIES), sizes, strict=True), key=lambda part: part[1])

    def __str__(self) -> str:
        teacher = f", {TEACHER} {self.teacher_gib:,.1f}" if self.teacher_gib else ""
        return (
            f"{self.total_gib:,.1f} GiB ({STATES} {self.states_gib:,.1f}, "
            f"activations {self.activations_gib:,.1f}, logits {self.logits_gib:,.1f}{teacher})"
        )


def estimate_memory(config: RunConfig, parameters: int, processes: int, *, frozen: int = 0) -> MemoryEstimate:
    """Return the estimated peak of one of the `processes` of `config`, whose model has `parameters` weights and whose teacher has `frozen`."""
    train = config.train
    state = STATE_BYTES + (0 if train.precision == "fp32" else CAST_BYTES)
    shards = processes if train.strategy == "fsdp" else 1
    tokens = max(1, train.batch_size // processes) * train.seq_len
    logits = min(tokens, train.loss_chunk or tokens) * vocab_size_of(config) * LOGIT_BYTES
    return MemoryEstimate(
        states_gib=parameters * state / shards / GIB,
        activations_gib=tokens * _bytes_per_token(config) / GIB,
        logits_gib=logits / GIB,
        teacher_gib=frozen * FROZEN_BYTES / GIB,
    )


def _bytes_per_token(config: RunConfig) -> float:
    """Return the bytes that all layers keep of one token for the backward pass."""
    model, train, pattern = config.model, config.train, config.pattern()
    blocks = [_bytes_of_block(config, layer) for layer in pattern]
    kept = model.n_layers * (4 * model.dim + KEPT_SHARE[train.activation_checkpointing] * sum(blocks) / len(blocks))
    # recomputed activations exist for one block at a time
    return kept + (max(blocks) if train.activation_checkpointing != "none" else 0)


def _bytes_of_block(config: RunConfig, layer: Layer) -> int:
    model = config.model
    wide = 4 if config.train.precision == "fp32" else 2
    queries, outputs = model.n_heads * model.head_dim_qk, model.n_heads * model.head_dim_v
    keys_values = model.n_kv_heads * (model.head_dim_qk + model.head_dim_v)
    branches = len(layer.config.branches) if layer.attention == "nsa" else 1
    # sets of keys and values
    sets = 1 if config.nsa.kv == "shared" else branches
    # float32 inputs of the norms of q and k, and their casts
    norms = (4 + wide) * (queries + sets * model.n_kv_heads * model.head_dim_qk) if config.nsa.qk_norm else 0
    # two norms with their float32 inputs and casts, projections before and after RoPE, each branch's output, the MLP
    own = wide * (2 * queries + 2 * sets * keys_values + (branches + 1) * outputs + 4 * intermediate_size_of(config))
    return 2 * model.dim * (4 + 4 + wide) + own + norms


@frozen(kw_only=True)
class MemoryFixes:
    """Changes that would make a run fit."""

    config: RunConfig
    parameters: int
    frozen: int = 0
    """Parameters of train.selection_teacher, whole on every process."""
    world_sizes: Sequence[int]
    """Possible numbers of processes; with the fewest, each holds the most."""
    resuming: bool
    """True if the rows must not change, because the run has a position in them."""

    def offered(self, machine: Machine, *limits_gib: float) -> str:
        """Return the cheapest change with which a process needs no more than the first of `limits_gib` that a change can meet.

        If no change can, the result says what needs the most memory, and which other run or machine would fit.
        """
        changes = list(self._changes())
        for limit in limits_gib:
            for change in changes:
                if self._estimate(change).total_gib <= limit:
                    return f"use {_as_options(change)}"
        return self._beyond_settings(machine, changes[-1] if changes else {}, limits_gib[0])

    def _changes(self) -> Iterator[dict[str, Any]]:
        """Yield the changes that keep the rows of a step, the cheapest first and the most thorough last."""
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
        *first, last = self._other_runs(machine, change, limit_gib, name)
        return f"{found}; use {', '.join(first)}, or {last}" if first else f"{found}; use {last}"

    def _other_runs(self, machine: Machine, change: Mapping[str, Any], limit_gib: float, largest: str) -> Iterator[str]:
        """Yield the other runs, and the other machines, that would fit."""
        if largest == LIBRARIES:
            yield "a machine with more memory"
            return
        if largest in OF_ROWS and (seq_len := self._fitting_length(change, limit_gib)):
            yield f"--set train.seq_len={seq_len}"
        yield "a smaller teacher" if largest == TEACHER else "a smaller model"
        if machine.device_type != "cuda":
            yield "a machine with more memory"
            yield "train.strategy=fsdp on GPUs"
        elif processes := self._fitting_processes(change, limit_gib):
            yield f"train.strategy=fsdp on {processes} or more GPUs"
        else:
            yield "a GPU with more memory"

    def _fitting_length(self, change: Mapping[str, Any], limit_gib: float) -> int | None:
        """Return train.seq_len, halved until the run fits; None if that does not help, or if the rows must not change."""
        halved = itertools.takewhile(lambda length: length >= 2, (self.config.train.seq_len >> times for times in itertools.count(1)))
        fitting = (length for length in halved if self._estimate({**change, "seq_len": length}).total_gib <= limit_gib)
        return None if self.resuming else next(fitting, None)

    def _fitting_processes(self, change: Mapping[str, Any], limit_gib: float) -> int | None:
        """Return the number of processes with which the run fits under FSDP: the present one, doubled until it fits; None if that does not help."""
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
        return estimate_memory(config, self.parameters, processes or min(self.world_sizes), frozen=self.frozen)


def _as_options(change: Mapping[str, Any]) -> str:
    return " ".join(f"--set train.{key}={value}" for key, value in change.items())
