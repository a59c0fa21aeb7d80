"""Block recall: the share of dense attention in the chosen blocks."""

from collections.abc import Container, Iterator
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

RECALL_MODES = (Mode.TRAINED, Mode.SHUFFLED)
"""The modes in which a query reads the blocks that were chosen for it."""


def block_recall(subject: Subject, twin: OpenedModel | None) -> Iterator[Figure]:
    """Yield the recall of each layer and KV head, by mode.

    Dense attention is the softmax over all keys before and at a query, averaged over the heads of a group. It is computed from the layer's own
    queries and the keys of its selected branch or, with a `twin`, from the same layer of the twin. The mean of a layer is over the queries that
    had to choose; if none has more candidates than n, it is over all queries.
    """
    dense = twin.decoder.to(subject.device) if twin else None
    geometries = {index: layer.config.geometry for index, layer in subject.choosing_layers.items()}
    needed = sorted(geometry.num_selected_blocks * geometry.selection_block_size + 1 for geometry in geometries.values())
    # those in which every layer has to choose; without any, those in which some layer has to; without any, all
    by_need = ([ids for ids in subject.documents if len(ids) >= least] for least in (needed[-1], needed[0]))
    sequences = next(filter(None, by_need), subject.documents)[: subject.options.samples]
    longest = max(map(len, sequences))
    choosing = {index for index, geometry in geometries.items() if has_to_choose(longest - 1, geometry)}
    for mode in (mode for mode in subject.modes if mode in RECALL_MODES):
        sums: dict[int, Tensor] = {}
        for number, ids in enumerate(sequences):
            with subject.in_mode(mode, f"block-recall {number}"):
                found = layer_recalls(subject, dense, ids, choosing)
            for index, recall in found.items():
                rows = torch.cat([recall.double().sum(0), recall.new_tensor([len(recall)]).double()])
                sums[index] = sums.get(index, torch.zeros_like(rows)) + rows
        for index, totals in sums.items():
            *shares, count = totals.tolist()
            for group, share in enumerate(shares):
                yield Figure(TaskName.BLOCK_RECALL, mode, "recall", share / count, int(count), layer=index, group=group)


def layer_recalls(subject: Subject, dense: Decoder | None, ids: Tensor, choosing: Container[int]) -> dict[int, Tensor]:
    """Return the recall `(m, G)` of m queries of the sequence `ids` `(S,)`, by the layer's number; `dense`: the twin's decoder.

    In the layers `choosing`, the m queries are those that had to choose, in the other layers all of them.
    """
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
        rows = rows_to_compare(len(ids), geometry, only_choosing=index in choosing).to(ids.device)
        q, k = compared.queries_keys(inputs[index])
        found[index] = recall_of(note.block_indices[0, rows], block_mass(q, k, rows, geometry=geometry))
    return found


def has_to_choose(position: Any, geometry: BlockGeometry) -> Any:
    """Return whether the query at `position`, an int or a tensor of ints, has more candidates than n blocks."""
    return position // geometry.selection_block_size >= geometry.num_selected_blocks


def rows_to_compare(num_tokens: int, geometry: BlockGeometry, *, only_choosing: bool) -> Tensor:
    """Return int64 `(m,)`: the queries of a sequence, or only those that had to choose."""
    position = torch.arange(num_tokens)
    return position[has_to_choose(position, geometry)] if only_choosing else position


def recall_of(block_indices: Tensor, mass: Tensor) -> Tensor:
    """Return `(m, G)`: the part of the mass `(m, G, N)` in the chosen blocks `(m, G, n)`; -1 is no block."""
    chosen = block_indices.long()
    return mass.gather(2, chosen.clamp(min=0)).masked_fill(chosen < 0, 0.0).sum(2)
