"""Run a text through a model once, and record every layer's choice of blocks, its scores and its gates."""

from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from attrs import evolve
from torch import Tensor

from nsa_core.blocks import num_selection_blocks
from nsa_core.config import BlockGeometry
from nsa_core.decoder import Decoder
from nsa_core.module import NativeSparseAttention
from nsa_core.plugins.manager import load_plugins
from nsa_core.selection import pool_importance
from nsa_core.selection_loss import block_mass
from nsa_core.varlen import compressed_lengths
from nsa_train.errors import TrainError
from nsa_train.explore.records import LayerRecord
from nsa_train.model.choosing import NotedChoice, PassNote, registry_of, watch_inputs, watched

SCORES = 2**24
"""Maximum scores that are computed at a time."""


def block_scores(q: Tensor, k_cmp: Tensor, geometry: BlockGeometry, scale: float) -> Tensor:
    """Return float32 `(S, G, N)`: the importance of each selection block (Eq. 9), summed over the heads of a group (Eq. 10).

    Args:
        q: `(S, H, D_k)`, rotated, of one sequence from its first token.
        k_cmp: `(C, G, D_k)`, its compressed keys; rows after the last whole block are not read.
        geometry: block sizes.
        scale: factor of the products of q and k_cmp.
    """
    num_blocks, block = num_selection_blocks(len(q), geometry), torch.arange(len(k_cmp))
    step = max(1, SCORES // max(1, q.shape[1] * len(k_cmp)))
    found = []
    for first in range(0, len(q), step):
        rows = q[first : first + step].float().unflatten(1, (k_cmp.shape[1], -1))
        products = torch.einsum("sghd,kgd->sghk", rows, k_cmp.float()) * scale
        hidden = (block >= compressed_lengths(torch.arange(first, first + len(rows)) + 1, geometry).unsqueeze(1))[:, None, None]
        # a row that sees no key gets a uniform softmax, which the second mask sets to 0
        weights = products.masked_fill(hidden, torch.finfo(torch.float32).min).softmax(-1).masked_fill(hidden, 0.0).sum(2)
        found.append(pool_importance(weights, geometry, num_blocks))
    return torch.cat(found)


def collect_layers(decoder: Decoder, ids: Tensor, *, twin: Decoder | None = None) -> list[LayerRecord]:
    """Return the records of every layer of `decoder` for one sequence `ids` int64 `(S,)`, from one pass of each model.

    Args:
        decoder: the model, on the CPU, in evaluation mode.
        ids: int64 `(S,)`, at least one.
        twin: a dense decoder with as many layers; its layer i is compared with layer i.

    Raises:
        TrainError: if a layer's numbers are not finite.
    """
    attentions = [block.attention for block in decoder.blocks]
    installed = load_plugins().registry()
    sparse = {index: layer for index, layer in enumerate(attentions) if isinstance(layer, NativeSparseAttention)}
    choices = [NotedChoice(installed) for _ in sparse]
    with ExitStack() as stack, torch.inference_mode(), watched([*sparse.values()], PassNote) as notes:
        for layer, choice in zip(sparse.values(), choices, strict=True):
            # use a registry without fused backends, and restore the layer's own after the pass
            stack.callback(setattr, layer, "registry", layer.registry)
            layer.registry = registry_of(choice)
        decoder.hidden(decoder.embedding(ids[None]))
    passes = zip(sparse.items(), choices, notes, strict=True)
    records = {index: _record(index, layer, choice, note) for (index, layer), choice, note in passes}
    if twin is not None:
        blocks: Any = twin.blocks

        def add_mass(index: int, inputs: Tensor) -> None:
            record = records.get(index)
            if record is not None and record.scores is not None and record.geometry is not None:
                q, k = blocks[index].attention.queries_keys(inputs)
                mass = block_mass(q, k, torch.arange(len(ids)), geometry=record.geometry)
                records[index] = evolve(record, dense_mass=_finite(mass, index, "dense attention"))

        with torch.inference_mode():
            watch_inputs(twin, ids, add_mass)
    return [records.get(index, LayerRecord(index=index)) for index in range(len(attentions))]


def _record(index: int, layer: NativeSparseAttention, choice: NotedChoice, note: PassNote) -> LayerRecord:
    assert note.gates is not None
    last = choice.last
    scores = None if last is None else block_scores(last.q, last.k_cmp, last.geometry, last.scale)
    return LayerRecord(
        index=index,
        geometry=layer.config.geometry,
        branches=tuple(layer.config.branches),
        num_kv_heads=layer.config.num_kv_heads,
        gates=_finite(note.gates[0].float(), index, "gates"),
        block_indices=None if last is None else last.block_indices.numpy(),
        scores=None if scores is None else _finite(scores, index, "scores"),
    )


def _finite(values: Tensor, index: int, name: str) -> Any:
    if not bool(values.isfinite().all()):
        raise TrainError(f"{name} of layer {index} are not finite (a model that diverged computes nothing); explore an earlier checkpoint")
    return np.ascontiguousarray(values.numpy())
