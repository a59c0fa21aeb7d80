"""Block recall: the share of dense attention in the chosen blocks."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from nsa_core import BlockGeometry
from nsa_core.decoder import Decoder
from nsa_core.selection_loss import block_mass
from nsa_train.checkpoint.models import OpenedModel
from nsa_train.evaluation.options import Figure, Mode, TaskName
from nsa_train.evaluation.subject import Subject
from nsa_train.model.choosing import PassNote, watch_inputs, watched


def block_recall(subject: Subject, twin: OpenedModel | None) -> Iterator[Figure]:
    """Yield the recall of each layer and KV head, by mode.

    Dense attention is the softmax over all keys before and at a query, averaged over the heads of a group. It is computed from the layer's own
    queries and the keys of its selected branch or, with a `twin`, from the same layer of the twin. The mean is over queries that had to choose;
    if no query has more candidates than n, it is over all queries.
    """
    dense = twin.decoder.to(subject.device) if twin else None
    geometries = [layer.config.geometry for layer in subject.choosing_layers.values()]
    needed = max(geometry.num_selected_blocks * geometry.selection_block_size for geometry in geometries) + 1
    # those in which every layer has to choose, or all if there are none
    sequences = [ids for ids in subject.documents if len(ids) >= needed] or subject.documents
    for mode in (mode for mode in subject.modes if mode is not Mode.CLOSED):
        sums: dict[int, Tensor] = {}
        for number, ids in enumerate(sequences[: subject.options.samples]):
            with subject.in_mode(mode, f"block-recall {number}"):
                found = layer_recalls(subject, dense, ids)
            for index, recall in found.items():
                rows = torch.cat([recall.double().sum(0), recall.new_tensor([len(recall)]).double()])
                sums[index] = sums.get(index, torch.zeros_like(rows)) + rows
        for index, totals in sums.items():
            *shares, count = totals.tolist()
            for group, share in enumerate(shares):
                yield Figure(TaskName.BLOCK_RECALL, mode, "recall", share / count, int(count), layer=index, group=group)


def layer_recalls(subject: Subject, dense: Decoder | None, ids: Tensor) -> dict[int, Tensor]:
    """Return the recall `(m, G)` of m queries of the sequence `ids` `(S,)`, by the layer's number; `dense`: the twin's decoder."""
    layers = subject.choosing_layers
    inputs: dict[int, Tensor] = {}
    with watched([*layers.values()], PassNote) as notes:
        watch_inputs(subject.decoder, ids, inputs.__setitem__)
    if dense is not None:
        watch_inputs(dense, ids, inputs.__setitem__)
    found = {}
    for (index, layer), note in zip(layers.items(), notes, strict=True):
        compared: Any = layer if dense is None else dense.blocks[index].attention
        geometry = layer.config.geometry
        assert note.block_indices is not None
        rows = rows_to_compare(len(ids), geometry).to(ids.device)
        q, k = compared.queries_keys(inputs[index])
        found[index] = recall_of(note.block_indices[0, rows], block_mass(q, k, rows, geometry=geometry))
    return found


def rows_to_compare(num_tokens: int, geometry: BlockGeometry) -> Tensor:
    """Return int64 `(m,)`: the queries of a sequence that have more candidates than n blocks, or all queries if none has."""
    position = torch.arange(num_tokens)
    had_to = position // geometry.selection_block_size >= geometry.num_selected_blocks
    return position[had_to] if had_to.any() else position


def recall_of(block_indices: Tensor, mass: Tensor) -> Tensor:
    """Return `(m, G)`: the part of the mass `(m, G, N)` in the chosen blocks `(m, G, n)`; -1 is no block."""
    chosen = block_indices.long()
    return mass.gather(2, chosen.clamp(min=0)).masked_fill(chosen < 0, 0.0).sum(2)
