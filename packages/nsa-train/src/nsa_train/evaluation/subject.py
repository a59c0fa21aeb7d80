"""The model under evaluation, in one mode after another, and its held-out sequences."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nsa_core import NativeSparseAttention, load_plugins
from nsa_core.decoder import Decoder
from nsa_train.checkpoint.models import OpenedModel
from nsa_train.data.dataset import open_dataset
from nsa_train.data.order import generator
from nsa_train.data.packing import IGNORED, Batch, Row, collate
from nsa_train.data.stream import differences, open_validation
from nsa_train.errors import ConfigError, DataError
from nsa_train.evaluation.modes import EveryBlock, RandomChoice, limited_to
from nsa_train.evaluation.options import EvalOptions, Mode, unreadable
from nsa_train.explore.text import token_ids
from nsa_train.files import MOST_RECORDS, read_regular
from nsa_train.model.choosing import registry_of


class Alphabet(NamedTuple):
    """The ids of associative recall: three alphabets of `symbols` ids, of keys, of values and of noise."""

    symbols: int
    tokens: int
    """Ids of a key, and of a value."""
    pairs: int
    """Pairs of a sequence of mqar."""


class Subject:
    """A model with the options of its evaluation, and the task settings that follow from both."""

    def __init__(self, opened: OpenedModel, options: EvalOptions, device: torch.device) -> None:
        """Move the model to `device`."""
        self.opened, self.options, self.device = opened, options, device
        self.decoder: Decoder = opened.decoder.to(device)
        self._generator = torch.Generator(device)
        self._registries = {
            Mode.SHUFFLED: registry_of(RandomChoice(self._generator)),
            Mode.DENSE: registry_of(EveryBlock(load_plugins().registry())),
        }

    @property
    def choosing_layers(self) -> dict[int, NativeSparseAttention]:
        """Return the layers that choose blocks, by their number in the decoder."""
        attentions: Iterator[tuple[int, Any]] = ((index, block.attention) for index, block in enumerate(self.decoder.blocks))
        return {index: layer for index, layer in attentions if isinstance(layer, NativeSparseAttention) and "slc" in layer.config.branches}

    @property
    def modes(self) -> tuple[Mode, ...]:
        """Return the requested modes, or all that the model has."""
        return self.options.modes or (tuple(Mode) if self.choosing_layers else (Mode.TRAINED,))

    @property
    def lengths(self) -> tuple[int, ...]:
        """Return the requested lengths, or half of the model's positions and all of them."""
        most = self.opened.max_position
        return self.options.lengths or tuple(dict.fromkeys((max(2, most // 2), most)))

    def lengths_from(self, least: int) -> tuple[int, ...]:
        """Return the requested lengths, or those of `lengths` that have `least` tokens or more."""
        return self.options.lengths or tuple(length for length in self.lengths if length >= least)

    @property
    def plain_ids(self) -> NDArray[np.int64]:
        """Return the ids of text: all except the separator and the pad. A run of `data.source = "needle"` has no text: ids from 0 on."""
        config, tokenizer = self.opened.config, self.opened.tokenizer
        if config is not None and self.trained_on_pairs:
            return np.arange(max(3 * config.data.needle_symbols, tokenizer.vocab_size - 2))
        return np.setdiff1d(np.arange(tokenizer.vocab_size), [tokenizer.separator, tokenizer.pad])

    @property
    def alphabet(self) -> Alphabet:
        """Return the alphabet of the run if it was trained on recall; options replace its numbers."""
        config, options = self.opened.config, self.options
        if config is not None and self.trained_on_pairs:
            data = config.data
            own = Alphabet(data.needle_symbols, data.needle_tokens, data.needle_pairs)
        else:
            own = Alphabet(min(64, len(self.plain_ids) // 3), 1, 8)
        return own._replace(symbols=options.symbols or own.symbols, pairs=options.pairs or own.pairs)

    @property
    def reads_ids(self) -> bool:
        """Return True if pass keys are pairs of plain ids, not text."""
        return self.options.symbols is not None or self.trained_on_pairs

    @property
    def trained_on_pairs(self) -> bool:
        """Return True if the model is a run of `data.source = "needle"`, whose rows hold ids that are no text."""
        config = self.opened.config
        return config is not None and config.data.source == "needle"

    def random(self, name: str) -> np.random.Generator:
        """Return the random generator of a sequence called `name`; training rows use other generators."""
        return generator(self.options.seed, 0, f"eval {name}")

    @property
    def documents(self) -> list[Tensor]:
        """Return the held-out documents `(S,)` that have a label, on the model's device; padding has none."""
        return [
            batch.input_ids[0, first:stop].to(self.device)
            for batch in self.held_out
            for first, stop in pairwise(batch.cu_seqlens.tolist())
            if batch.loss_mask[0, first:stop].any()
        ]

    @contextmanager
    def in_mode(self, mode: Mode, name: str, *, layer: int | None = None) -> Iterator[None]:
        """Let the model, or one `layer`, compute in `mode` while the block runs; `name` seeds a shuffled choice."""
        layers = self.choosing_layers
        self._generator.manual_seed(int(self.random(f"choice {name}").integers(2**31)))
        with limited_to(mode, [*layers.values()] if layer is None else [layers[layer]], self._registries):
            yield

    def logits(self, ids: Tensor, caches: Sequence[Any] | None = None, *, last: int) -> Tensor:
        """Return the logits `(last, V)` after each of the last `last` of `ids` `(S,)`, which follow the tokens in `caches`."""
        x = self.decoder.embedding(ids.to(self.device).long()[None])
        return self.decoder.logits(self.decoder.hidden(x, caches=caches)[0, -last:])

    def batch_logits(self, batch: Batch) -> Tensor:
        """Return the logits `(total, V)` of a packed batch on the model's device."""
        x = self.decoder.embedding(batch.input_ids)
        return self.decoder.logits(self.decoder.hidden(x, batch.cu_seqlens, batch.max_seqlen)[0])

    @cached_property
    def held_out(self) -> list[Batch]:
        """Return the texts, one per batch, or the validation batches of the run.

        Raises:
            ConfigError: for a text that cannot be read, is too short for a loss, or is longer than the model's positions.
            DataError: if the run's data cannot be read, or are not those of the run any more: rows of training could be among the held-out ones.
        """
        if self.options.texts:
            return [self._batch_of(path) for path in self.options.texts]
        assert self.opened.config is not None
        dataset, before = open_dataset(self.opened.config), self.opened.fingerprint
        if before and (changed := differences(before, dataset.fingerprint)):
            raise DataError(
                f"data: {str(self.opened.path)!r} was trained on other data ({'; '.join(changed)}), so held-out rows may be rows of its training; "
                "give the files as they were, or a text with --text FILE"
            )
        return open_validation(self.opened.config, dataset=dataset)

    def _batch_of(self, path: Path) -> Batch:
        try:
            content = read_regular(path, MOST_RECORDS)
        except (OSError, ValueError) as error:
            raise ConfigError(unreadable(path, error)) from None
        ids = token_ids(content, self.opened.tokenizer, path).numpy().astype(np.int32) if content else np.zeros(0, np.int32)
        if len(ids) < 2:
            raise ConfigError(f"--text={str(path)!r} has {len(ids)} of the 2 tokens that a loss needs; name a longer text")
        if len(ids) > (most := self.opened.max_position):
            raise ConfigError(
                f"--text={str(path)!r} has {len(ids):,} tokens (the model has {most:,} positions); "
                "cut it into files of that size, and name each with --text"
            )
        return collate([Row(ids, np.append(ids[1:], np.int32(IGNORED)), [len(ids)], 1)])
