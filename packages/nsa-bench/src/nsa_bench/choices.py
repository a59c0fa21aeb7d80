"""`nsa-bench choices`: record the blocks that the layers of a trained model choose on held-out sequences, and summarise them.

The figures of a layer are means over KV heads (the last two figures: over query heads) and over queries with more than n candidates, which had
to choose. A union is taken over aligned runs of neighbouring queries. A distance is counted in blocks, from a query's own block to a free
block. The first tile of a row is its first `FIRST_TILE` compressed keys; kernels subtract the maximum of its scores from all of the row's scores.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from attrs import frozen
from rich.table import Table
from torch import Tensor

from nsa_bench.errors import BenchError, OptionError
from nsa_bench.inputs import free_overlap
from nsa_bench.recorded import Recording, recording_to_json
from nsa_bench.results import Output
from nsa_core import (
    BlockGeometry,
    NativeSparseAttention,
    load_plugins,
)
from nsa_core.reference.rows import num_visible_blocks
from nsa_train.checkpoint import load_model, open_checkpoint
from nsa_train.data.stream import open_validation
from nsa_train.host.routing import DTYPES
from nsa_train.model.choosing import Choice, NotedChoice, registry_of
from nsa_train.model.decoder import Decoder
from nsa_train.parallel.world import local_device
from nsa_train.settings.config import RunConfig

RUNS = (4, 8, 16)
"""Lengths of the runs of neighbouring queries whose different blocks are counted."""
FIRST_TILE = 64
"""Compressed keys of a row's first tile."""
MOST_NATS = 13.0
"""A row is counted if its largest score is more than this many nats above the maximum of its first tile."""
SCORES = 2**26
"""Maximum scores that are computed at a time, for a part of the rows."""


@frozen(kw_only=True)
class LayerFigures:
    """The figures of one layer's choice for one sequence."""

    layer: int
    rows: int
    """Queries that had to choose."""
    overlap: float | None
    """Share of a query's free blocks that the next query chooses too."""
    unions: dict[int, float]
    """Number of neighbouring queries -> number of different blocks that they choose, forced ones included."""
    distances: dict[str, float]
    """Blocks from a query's own, "4-7" for example -> share of the free blocks."""
    exceeded: float
    """Share of the rows of query heads with a score more than `MOST_NATS` above the maximum of their first tile."""
    largest_excess: float
    """The largest such difference in nats."""


def run_choices(path: Path, *, sequences: int, recorded_tokens: int, output: Output) -> list[LayerFigures]:
    """Record the choices of a run's model on held-out sequences, print the table, write the files, and return the figures.

    Raises:
        OptionError: if a number is below its minimum, or the model chooses nothing.
        BenchError: if no held-out sequence is long enough that a query has to choose.
    """
    if sequences < 1 or recorded_tokens < 0:
        raise OptionError(f"--sequences={sequences}, --recorded-tokens={recorded_tokens} (at least 1 and 0); use 4 and 8192")
    checkpoint = open_checkpoint(path)
    config, device = checkpoint.config, local_device(checkpoint.config.train.device, 0)
    model = load_model(checkpoint).to(device)
    layers = choosing_layers(model)
    if not layers:
        raise OptionError(f"RUN={str(path)!r} is a model whose layers choose no blocks (dense, or without the branch slc); name an NSA run")
    output.check_files()
    found: list[LayerFigures] = []
    recording: Recording | None = None
    rows = held_out(config, sequences, layers)
    for ids in rows:
        choices = noted_choices(model, ids.to(device), config.train.precision)
        found += [figures_of(index, choice) for index, choice in choices.items()]
        if recording is None and recorded_tokens:
            recording = recording_of([*choices.values()], recorded_tokens)
    means = [mean_figures([one for one in found if one.layer == index]) for index in layers]
    output.show(choices_table(means, config))
    content = {
        "run": path.name,
        "step": checkpoint.step,
        "environment": output.environment,
        "sequences": [len(ids) for ids in rows],
        "first_tile": FIRST_TILE,
        "nats": MOST_NATS,
        "layers": [attrs.asdict(one) for one in means],
    }
    output.write(content | ({} if recording is None else {"recorded": recording_to_json(recording)}), [_row(one) for one in means])
    return means


def choosing_layers(model: Decoder) -> dict[int, NativeSparseAttention]:
    """Return the layers that choose blocks, by their number in the decoder."""
    attentions = enumerate(block.attention for block in model.blocks)
    return {index: layer for index, layer in attentions if isinstance(layer, NativeSparseAttention) and "slc" in layer.config.branches}


def held_out(config: RunConfig, count: int, layers: dict[int, NativeSparseAttention]) -> list[Tensor]:
    """Return the first `count` held-out sequences, int64 `(S,)`, that are so long that some query of every layer has to choose.

    Raises:
        BenchError: if there is no such sequence.
    """
    needed = max(layer.config.geometry.num_selected_blocks * layer.config.geometry.selection_block_size for layer in layers.values()) + max(
        RUNS
    )
    found: list[Tensor] = []
    for batch in open_validation(config):
        bounds = batch.cu_seqlens.tolist()
        found += [
            batch.input_ids[0, first:stop]
            for first, stop in zip(bounds[:-1], bounds[1:], strict=True)
            # the padding of a row has no label
            if stop - first >= needed and batch.loss_mask[0, first:stop].any()
        ]
    if not found:
        raise BenchError(
            f"no held-out sequence has {needed} tokens (a union counts {max(RUNS)} queries that had to choose); train with longer train.seq_len"
        )
    return found[:count]


def noted_choices(model: Decoder, ids: Tensor, precision: str) -> dict[int, Choice]:
    """Return the choice of each layer for the sequence `ids` `(S,)`, by its number in the decoder."""
    layers, installed = choosing_layers(model), load_plugins().registry()
    notes = {index: NotedChoice(installed) for index in layers}
    before = {index: layer.registry for index, layer in layers.items()}
    try:
        for index, layer in layers.items():
            layer.registry = registry_of(notes[index])
        with torch.inference_mode(), torch.autocast(ids.device.type, DTYPES[precision], enabled=precision != "fp32"):
            model(ids.unsqueeze(0))
    finally:
        for index, layer in layers.items():
            layer.registry = before[index]
    return {index: note.last for index, note in notes.items() if note.last is not None}


def figures_of(layer: int, choice: Choice) -> LayerFigures:
    """Return the figures of one layer's choice for one sequence."""
    geometry, indices = choice.geometry, choice.block_indices
    positions = torch.arange(len(indices), device=indices.device)
    own = positions // geometry.selection_block_size
    had_to = own + 1 > geometry.num_selected_blocks
    excess = first_tile_excess(choice)[had_to]
    return LayerFigures(
        layer=layer,
        rows=int(had_to.sum()),
        overlap=free_overlap(indices, positions, geometry),
        unions={run: mean_union(indices[had_to], run) for run in RUNS},
        distances=free_distances(indices[had_to], own[had_to], geometry),
        exceeded=float((excess > MOST_NATS).double().mean()),
        largest_excess=float(excess.max()),
    )


def mean_union(block_indices: Tensor, run: int) -> float:
    """Return the mean number of different blocks in full, aligned runs of `run` rows of block_indices `(S, G, n)`."""
    whole = block_indices[: len(block_indices) // run * run].unflatten(0, (-1, run))
    # (runs, G, run * n), sorted: a block counts if it differs from the previous one
    ordered = whole.transpose(1, 2).flatten(2).sort(-1).values
    is_new = torch.cat([torch.ones_like(ordered[..., :1], dtype=torch.bool), ordered[..., 1:] != ordered[..., :-1]], -1)
    return float((is_new & (ordered >= 0)).sum(-1).double().mean())


def free_distances(block_indices: Tensor, own: Tensor, geometry: BlockGeometry) -> dict[str, float]:
    """Return the shares of free blocks of block_indices `(S, G, n)` by their distance from `own` `(S,)`, in powers of two."""
    own = own.view(-1, 1, 1)
    is_free = (block_indices >= geometry.num_initial_blocks) & (block_indices <= own - geometry.num_local_blocks)
    distances = (own - block_indices)[is_free]
    most = int(distances.max()) if len(distances) else 0
    shares = {}
    for low in (2**power for power in range(most.bit_length())):
        inside = (distances >= low) & (distances < 2 * low)
        shares[f"{low}-{2 * low - 1}" if low > 1 else "1"] = float(inside.double().mean())
    return shares


def first_tile_excess(choice: Choice) -> Tensor:
    """Return float32 `(S, H)`, >= 0: a row's largest score over k_cmp minus its largest score over the first `FIRST_TILE` keys, in nats."""
    q, keys = choice.q.float(), choice.k_cmp.float()
    found = q.new_zeros(q.shape[:2])
    step, num_keys = max(1, SCORES // max(1, q.shape[1] * len(keys))), torch.arange(len(keys), device=q.device)
    for first in range(0, len(q), step):
        rows = q[first : first + step].unflatten(1, (keys.shape[1], -1))
        scores = torch.einsum("sghd,cgd->sghc", rows, keys) * choice.scale
        positions = torch.arange(first, first + len(rows), device=q.device)
        visible = num_keys < num_visible_blocks(positions, choice.geometry).unsqueeze(1)
        scores = scores.masked_fill(~visible[:, None, None], -torch.inf)
        excess = scores.amax(-1) - scores[..., :FIRST_TILE].amax(-1) if len(keys) else scores.new_zeros(scores.shape[:-1])
        # a row that sees no key has -inf minus -inf, which is NaN
        found[first : first + step] = excess.nan_to_num(nan=0.0).flatten(1)
    return found


def recording_of(choices: Sequence[Choice], tokens: int) -> Recording:
    """Return the choices of all layers for the first `tokens` tokens.

    Raises:
        BenchError: if layers differ in their geometry.
    """
    geometry = choices[0].geometry
    if any(choice.geometry != geometry for choice in choices):
        raise BenchError("the layers have different block sizes, and a recording has one for all; use --recorded-tokens 0")
    tracks = torch.cat([choice.block_indices[:tokens].transpose(0, 1) for choice in choices])
    return Recording(block_indices=tracks, geometry=geometry)


def mean_figures(found: Sequence[LayerFigures]) -> LayerFigures:
    """Return the means of a layer's figures over sequences; the largest excess is the largest of all."""
    rows = sum(one.rows for one in found)

    def mean(values: Sequence[float | None]) -> float:
        return sum(one.rows * (value or 0.0) for one, value in zip(found, values, strict=True)) / rows

    buckets = dict.fromkeys(bucket for one in found for bucket in one.distances)
    return LayerFigures(
        layer=found[0].layer,
        rows=rows,
        overlap=None if any(one.overlap is None for one in found) else mean([one.overlap for one in found]),
        unions={run: mean([one.unions[run] for one in found]) for run in RUNS},
        distances={bucket: mean([one.distances.get(bucket) for one in found]) for bucket in buckets},
        exceeded=mean([one.exceeded for one in found]),
        largest_excess=max(one.largest_excess for one in found),
    )


def choices_table(found: Sequence[LayerFigures], config: RunConfig) -> Table:
    """Return a line for each layer."""
    n = config.nsa.num_selected_blocks
    table = Table(title=f"choices of {n} blocks of {config.nsa.selection_block_size} tokens")
    titles = (
        "layer",
        "rows",
        "kept by the next",
        *(f"union of {run}" for run in RUNS),
        "median distance",
        f"{MOST_NATS:g} nats exceeded",
        "most nats",
    )
    for title in titles:
        table.add_column(title, justify="right")
    for one in found:
        unions = [f"{one.unions[run]:.1f}" for run in RUNS]
        kept = "" if one.overlap is None else f"{one.overlap:.0%}"
        table.add_row(
            str(one.layer), f"{one.rows:,}", kept, *unions, median_bucket(one.distances), f"{one.exceeded:.2%}", f"{one.largest_excess:.1f}"
        )
    return table


def median_bucket(distances: dict[str, float]) -> str:
    """Return the bucket that holds the median distance; empty without free blocks."""
    total = 0.0
    for bucket, share in distances.items():
        total += share
        if total >= 0.5:
            return bucket
    return ""


def _row(one: LayerFigures) -> dict[str, Any]:
    unions = {f"union_{run}": one.unions[run] for run in RUNS}
    kept = {"layer": one.layer, "rows": one.rows, "overlap": one.overlap, **unions}
    return {**kept, "median_distance": median_bucket(one.distances), "exceeded": one.exceeded, "largest_excess": one.largest_excess}
