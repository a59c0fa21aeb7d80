"""Get the answers of a trained model: one prefill of each haystack, then decode steps over the same cache for every needle."""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nsa_bench.needle.plan import Cell, NeedlePlan
from nsa_train.checkpoint import load_model, open_checkpoint
from nsa_train.data.order import generator
from nsa_train.evaluation.modes import RandomChoice, limited_to
from nsa_train.evaluation.options import Mode
from nsa_train.host.routing import DTYPES
from nsa_train.model.choosing import PassNote, registry_of, watched
from nsa_train.model.decoder import Decoder
from nsa_train.parallel.world import local_device
from nsa_train.run_dir import RunDirectory
from nsa_train.settings.config import RunConfig

MODES = (Mode.TRAINED, Mode.CLOSED, Mode.SHUFFLED)
"""The modes of the grid of an NSA model. A dense model is an arm of its own."""


class Haystacks(NamedTuple):
    """Samples of one length."""

    ids: Tensor
    """int64 `(B, T)`: the tokens without the question and its answer."""
    needles: Tensor
    """int64 `(B, depths, 2 tokens)`: key and value of the pair at each depth."""
    positions: list[int]
    """Position at which the pair of each depth begins."""


def has_block(block_indices: Tensor, block: int) -> Tensor:
    """Return bool `(B,)`: whether some KV head chose `block` for the last row of `block_indices` `(B, S, G, n)`."""
    return (block_indices[:, -1] == block).flatten(1).any(1)


def draw_haystacks(plan: NeedlePlan, length: int, samples: range) -> Haystacks:
    """Return the haystacks of one length with the numbers `samples`.

    A haystack depends only on the grid's seed, the length and its number. Training rows use other random numbers.
    """
    task, needles = plan.haystack(length), np.asarray(plan.needle_slots(length))
    ids, pairs = [], []
    for number in samples:
        random = generator(plan.grid.seed, 0, f"needle grid {length} {number}")
        others = np.setdiff1d(np.arange(task.slots), needles)
        slots = np.concatenate([needles, random.permutation(others)[: plan.distractors(length)]])
        row = task.draw(random, slots).input_ids[: length - task.pair_ids]
        ids.append(row)
        pairs.append(row[needles[:, None] * task.pair_ids + np.arange(task.pair_ids)])
    stacked = [torch.from_numpy(np.stack(rows)).long() for rows in (ids, pairs)]
    return Haystacks(stacked[0], stacked[1], (needles * task.pair_ids).tolist())


class Questions:
    """Haystacks in caches. Each question starts from the same caches, whatever was asked before."""

    def __init__(self, model: Decoder, stacks: Haystacks, chunk: int, device: torch.device) -> None:
        """Read the haystacks, `chunk` tokens of each per pass."""
        self._model, self._stacks = model, Haystacks(stacks.ids.to(device), stacks.needles.to(device), stacks.positions)
        self._choosing = [layer for layer in model.sparse_layers if "slc" in layer.config.branches]
        batch, length = stacks.ids.shape
        self._caches: list[Any] = model.new_caches(batch, length + stacks.needles.shape[2])
        for at in range(0, length, chunk):
            model(self._stacks.ids[:, at : at + chunk], caches=self._caches)

    def ask(self, depth: int) -> tuple[Tensor, Tensor]:
        """Return two bool `(B,)`: whether every token of the answer is right, and whether the row that begins it chose the needle's block.

        The key is one step. After it, the most likely token is fed back until the answer has its length.
        """
        key, value = self._stacks.needles[:, depth].chunk(2, 1)
        with watched(self._choosing, PassNote) as notes:
            answer = [self._next(key)]
        found = torch.zeros(len(key), dtype=torch.bool, device=key.device)
        for layer, note in zip(self._choosing, notes, strict=True):
            assert note.block_indices is not None
            found |= has_block(note.block_indices, self._stacks.positions[depth] // layer.config.geometry.selection_block_size)
        while len(answer) < value.shape[1]:
            answer.append(self._next(answer[-1][:, None]))
        for cache in self._caches:
            cache.crop(key.shape[1] + len(answer) - 1)
        return (torch.stack(answer, 1) == value).all(1), found

    def _next(self, ids: Tensor) -> Tensor:
        """Return the likeliest token `(B,)` after a step of `ids` `(B, m)`."""
        logits: Tensor = self._model(ids, caches=self._caches)
        return logits[:, -1].argmax(-1)


class Evaluation:
    """The model of a run, and the grid on which it is evaluated."""

    def __init__(self, plan: NeedlePlan, config: RunConfig, run: RunDirectory) -> None:
        """Load the newest checkpoint of `run` to the device on which it was trained.

        Raises:
            nsa_train.errors.TrainError: if it cannot be read.
        """
        self._plan, self._precision = plan, config.train.precision
        self._device = local_device(config.train.device, 0)
        self._model = load_model(open_checkpoint(run.checkpoints)).to(self._device)

    def cells(self, length: int) -> list[Cell]:
        """Return the cells of `length`, for every mode that the model has. Deterministic on a CPU."""
        with torch.inference_mode(), torch.autocast(self._device.type, DTYPES[self._precision], enabled=self._precision != "fp32"):
            return self._cells(length)

    def _cells(self, length: int) -> list[Cell]:
        grid, layers, device = self._plan.grid, self._model.sparse_layers, self._device
        modes = MODES if layers else (Mode.TRAINED,)
        at_once = max(1, min(grid.samples, grid.batch_tokens // length))
        registries = {Mode.SHUFFLED: registry_of(RandomChoice(torch.Generator(device).manual_seed(grid.seed)))}
        right, found = (torch.zeros(len(modes), grid.depths, dtype=torch.int64, device=device) for _ in range(2))
        positions: list[int] = []
        for first in range(0, grid.samples, at_once):
            stacks = draw_haystacks(self._plan, length, range(first, min(first + at_once, grid.samples)))
            questions, positions = Questions(self._model, stacks, grid.chunk, device), stacks.positions
            for depth in range(grid.depths):
                for index, mode in enumerate(modes):
                    with limited_to(mode, layers, registries):
                        is_right, is_found = questions.ask(depth)
                    right[index, depth] += is_right.sum()
                    found[index, depth] += is_found.sum()
        return [
            Cell(mode.value, length, depth, positions[depth], grid.samples, rights[depth], founds[depth] if layers else None)
            for mode, rights, founds in zip(modes, right.tolist(), found.tolist(), strict=True)
            for depth in range(grid.depths)
        ]
