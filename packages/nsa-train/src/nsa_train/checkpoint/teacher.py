"""The teacher of `train.selection_teacher`: a frozen model whose attention is the target of the selection loss."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nsa_core.decoder import Decoder
from nsa_core.errors import NSAError
from nsa_core.module import NativeSparseAttention
from nsa_core.selection_loss import block_mass
from nsa_train.checkpoint.layout import require_model
from nsa_train.checkpoint.models import OpenedModel, open_model
from nsa_train.data.tokenizer import build_tokenizer, reads_alike
from nsa_train.errors import CheckpointError, ConfigError, DataError
from nsa_train.model.decoder import layers_of, vocab_size_of
from nsa_train.settings.config import Layer, RunConfig
from nsa_train.settings.data_table import IDS


class Teacher:
    """A model that computes, before each training pass of a student, the targets of its layers' selection losses.

    Layer i of the teacher teaches layer i of the student. The target is the mass of the teacher's attention over all keys, summed per selection
    block of the student and per group of the student's heads, at the sampled queries. A dense layer uses its own attention; an NSA layer uses
    attention over its selected branch's keys. The teacher computes on the student's device under the caller's autocast, records no gradient, and
    belongs to no module, so that optimizer, checkpoint and parameter counts exclude it. MFU excludes its FLOPs; its time is part of the step's.
    """

    def __init__(self, config: RunConfig, device: torch.device) -> None:
        """Open the model that `train.selection_teacher` of the student's `config` names.

        Raises:
            ConfigError: as `open_teacher`.
        """
        # a model may draw random weights before it reads them; the run's generators must not change
        with torch.random.fork_rng(devices=[]):
            self.decoder = open_teacher(config).decoder.requires_grad_(False).to(device)

    @torch.no_grad()
    def set_targets(self, student: Decoder, input_ids: Tensor, cu_seqlens: Tensor | None, max_seqlen: int | None) -> None:
        """Set the target masses of each NSA layer of `student` for its next pass over `input_ids` `(1, total)`, packed by `cu_seqlens`.

        Each layer keeps its masses, `(rows, G, N)` float32; scores exist for a few rows at a time.
        """
        blocks: Any = list(zip(self.decoder.blocks, student.blocks, strict=True))
        x = self.decoder.embedding(input_ids)
        for theirs, ours in blocks:
            layer = ours.attention
            if isinstance(layer, NativeSparseAttention) and layer.selection_loss is not None:
                rows = layer.selection_loss.rows(input_ids.numel(), input_ids.device)
                q, k = theirs.attention.queries_keys(theirs.attention_norm(x), cu_seqlens=cu_seqlens)
                layer.selection_loss.target = block_mass(
                    q,
                    k,
                    rows,
                    geometry=layer.config.geometry,
                    num_groups=layer.config.num_kv_heads,
                    cu_seqlens=cu_seqlens,
                    max_seqlen=max_seqlen,
                )
            x = theirs(x, cu_seqlens, max_seqlen)


def open_teacher(config: RunConfig, *, with_weights: bool = True, say: Callable[[str], None] = lambda line: None) -> OpenedModel:
    """Return the model that `train.selection_teacher` of `config` names; `with_weights` and `say` as for `open_model`.

    Raises:
        ConfigError: if there is none, it is damaged, or it cannot teach the model of `config`; all reasons at once.
    """
    path = config.train.selection_teacher or ""
    require_model("train.selection_teacher", Path(path))
    try:
        opened = open_model(Path(path), with_weights=with_weights, say=say)
        problems = list(_misfits(opened, config))
    except (CheckpointError, ConfigError, DataError, NSAError) as error:
        raise ConfigError(f"train.selection_teacher={path!r}: {error}") from None
    if problems:
        raise ConfigError.of([f"train.selection_teacher={path!r} {problem}" for problem in problems])
    return opened


def _misfits(opened: OpenedModel, config: RunConfig) -> Iterator[str]:
    """Yield the reasons why the opened model cannot teach the model of `config`."""
    model, students = config.model, layers_of(config)
    blocks: Any = opened.decoder.blocks
    if not any(_is_taught(layer) for layer in students):
        yield "has nothing to teach (no layer of this model chooses blocks); use model.attention='nsa', or leave it out"
    if len(blocks) != model.n_layers:
        yield f"has {len(blocks)} layers, the model has {model.n_layers} (layer i teaches layer i); use a teacher of {model.n_layers} layers"
        return
    for index, (block, layer) in enumerate(zip(blocks, students, strict=True)):
        if not _is_taught(layer):
            continue
        heads = block.attention.num_heads
        if heads % model.n_kv_heads:
            yield (
                f"has {heads} heads in layer {index}, which do not divide among model.n_kv_heads={model.n_kv_heads} groups "
                "(each group has its own mass); use a teacher whose heads do"
            )
            return
        if isinstance(block.attention, NativeSparseAttention) and "slc" not in block.attention.config.branches:
            yield f"has no selected keys in layer {index} (its branches are {block.attention.config.branches}); use a dense teacher"
            return
    rows, vocab_size = len(opened.decoder.embedding.weight), vocab_size_of(config)
    if rows != vocab_size:
        yield f"has a vocabulary of {rows} ids, the model has {vocab_size} (both read the same tokens); use a teacher of the same vocabulary"
    elif config.data.source not in IDS and not reads_alike(opened.tokenizer, build_tokenizer(config.data)):
        yield f"has another tokenizer than data.tokenizer={config.data.tokenizer!r} (its ids mean other text); use a teacher of the same vocabulary"


def _is_taught(layer: Layer) -> bool:
    return layer.attention == "nsa" and "slc" in layer.config.branches
