"""Transformers' cache interface for the caches of nsa-core: one cache per layer, which is created with the first tokens."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from nsa_core.checks import is_plain, is_size
from nsa_core.errors import CacheOverflowError, InputError
from nsa_core.kv_cache import DEFAULT_MAX_ROLLBACK
from nsa_core.kv_cache.step_graphs import KNOWN, StepGraphs

GRAPH_MODULES = (*KNOWN, "nsa_transformers")
"""Packages whose modules a captured step of a model may hold."""


class NSACacheLayer(CacheLayerMixin):
    """The cache of one layer. The attention module writes the stores itself, so `update` raises an error."""

    is_croppable = True
    supports_early_init = False

    def __init__(self, max_cache_len: int | None, *, static: bool, **options: Any) -> None:
        """Start without tensors; `options` are those of `NSAModelCache`."""
        super().__init__()
        self.max_cache_len, self.is_compileable = max_cache_len, static
        self.options: dict[str, Any] = {"static": static, "count_reads": False, **options}
        self.store: Any = None
        """An `nsa_core.NSACache` or `DenseCache`; None before the first tokens."""
        self.length: Any = 0
        """Number of columns of the batch so far, padding included: an int, or in a static cache a tensor that the layers on one device share."""

    def start(self, attention: Any, x: Tensor) -> None:
        """Allocate the stores of the module `attention` for the sequences of x `(B, S, hidden_size)`, if there are none yet."""
        if self.store is None:
            weight = attention.q_proj.weight
            is_packed = not is_plain(weight)
            # weights that accelerate has offloaded are on the meta device
            given = {"device": x.device if is_packed or weight.is_meta else None, "dtype": x.dtype if is_packed else None}
            self.store = attention.new_cache(len(x), self.max_cache_len, **given, **self.options)
            if self.is_compileable:
                # a tensor made in inference mode takes no write outside of it
                with torch.inference_mode(False):
                    self.length = torch.zeros((), dtype=torch.int64, device=self.store.lengths.device)
            self.is_initialized = True

    @property
    def batch_size(self) -> int:
        """Return the number of sequences."""
        if self.store is None:
            raise AttributeError("batch_size")
        return int(self.store.batch_size)

    def advance(self, num_tokens: int) -> None:
        """Add the `num_tokens` columns of a step to the length; in a static cache, layers on the same device share it."""
        if self.is_compileable:
            self.length.add_(num_tokens)
        else:
            self.length += num_tokens

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Raise an error: `start` creates the tensors."""
        raise InputError("an NSA cache is not made of keys and values (each branch has its own); pass it to the model as past_key_values")

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Raise an error: the attention module writes its own stores."""
        raise InputError("an NSA cache takes no keys and values (its layer writes each branch); pass it to the model as past_key_values")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of columns of a mask over the past and `query_length` new tokens, and its offset 0."""
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> Any:
        """Return the number of columns of the batch so far, padding included."""
        return self.length if self.store is not None else 0

    def get_max_length(self) -> int:
        """Return the maximum number of columns, -1 for no bound."""
        return -1 if self.max_cache_len is None else self.max_cache_len

    def reset(self) -> None:
        """Empty every sequence."""
        if self.store is not None:
            self.store.reset()
            self.length = self.length.zero_() if self.is_compileable else 0

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens of every sequence from the stores. `NSAModelCache.crop` updates the length, which layers share.

        Raises:
            InputError: for a positive number, which older versions of transformers understood as the length to keep.
            CacheOverflowError: for more tokens than `max_rollback`, or than the cache holds.
        """
        count = int(tokens_to_remove)
        if count > 0:
            raise InputError(f"crop({count}) is not negative (-n forgets the last n tokens); use crop(-n)")
        if count and self.store is not None:
            self.store.crop(-count)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace the sequences by those at `beam_idx` `(B',)`."""
        if self.store is not None:
            self.store.reorder(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence `repeats` times."""
        if self.store is not None:
            device = self.store.lengths.device
            self.store.reorder(torch.arange(self.batch_size, device=device).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only the sequences at `indices`; a boolean vector `(B,)` keeps the sequences where it is True."""
        if self.store is not None:
            self.store.reorder(indices.nonzero().flatten() if indices.dtype == torch.bool else indices)

    def activate_past_recording(self) -> None:
        """Do nothing: the cache always keeps the tokens that a crop of `max_rollback` tokens needs."""

    def offload(self) -> None:
        """Raise an error: these stores stay on their layer's device."""
        raise InputError("an NSA cache is not offloaded (a step reads all of its stores); use cache_implementation='dynamic'")

    prefetch = offload


def described_layers(config: Any) -> str:
    """Return a description of the layers of an `NSAModelConfig`; models with equal descriptions can share a cache."""
    return repr(config.decoder_layers())


class Deferred(NamedTuple):
    """Embedded tokens that no layer has seen yet."""

    x: Tensor
    """(B, S, hidden_size)"""
    mask: Tensor | None
    """(B, S): True for valid tokens; None: all."""

    def rows(self, indices: Tensor) -> "Deferred":
        """Return the sequences at `indices`; a boolean vector `(B,)` keeps the sequences where it is True."""
        return Deferred(self.x[indices], None if self.mask is None else self.mask[indices])


class NSAModelCache(Cache):
    """The cache of all layers of an NSA model; pass it as `past_key_values`. `copy.deepcopy` copies it for reuse."""

    def __init__(
        self,
        config: Any,
        max_cache_len: int | None = None,
        *,
        static: bool = False,
        max_rollback: int = DEFAULT_MAX_ROLLBACK,
        keep_raw: bool = False,
        step_graphs: bool | None = None,
    ) -> None:
        """Start empty, for the layers of `config` (an `NSAModelConfig`).

        `static`: allocate `max_cache_len` tokens at once, so that a step may be compiled or captured; else the stores grow.
        `max_rollback`: number of tokens that `crop` may remove; with `keep_raw` it may remove any number. `step_graphs`: False captures no
        steps; for True and None see `graphs`.

        Raises:
            InputError: for a static cache without `max_cache_len`, or a `max_cache_len` below 1.
        """
        if max_cache_len is not None and not is_size(max_cache_len, 1):
            raise InputError(f"max_cache_len={max_cache_len!r} is no number of tokens (the rule: an integer >= 1, or None); use 4096")
        if static and max_cache_len is None:
            raise InputError("max_cache_len=None with static=True (a static cache is allocated once, whole); use max_cache_len=4096")
        self.options: dict[str, Any] = {"static": static, "max_rollback": max_rollback, "keep_raw": keep_raw, "step_graphs": step_graphs}
        super().__init__(layers=[NSACacheLayer(max_cache_len, **self.options) for _ in range(config.num_hidden_layers)])
        self.described = described_layers(config)
        """The description (`described_layers`) of the layers for which the cache was built."""
        self.deferred: Deferred | None = None
        """Tokens that the layers process before the next step; None if there are none."""
        self.graphs: StepGraphs | None = None
        """The captured steps of a static cache on one GPU, with all layers and the last norm; else None. The first step of a form (batch size,
        up to 16 new tokens) runs eagerly, the second is captured and replayed, later ones are replayed. If a capture fails, there is a
        warning, or with `step_graphs=True` an error."""
        self._advancing: list[NSACacheLayer] = []
        """The layers on which a step calls `advance`: all layers, or in a static cache one per device, because the others share its length."""

    @property
    def is_static(self) -> bool:
        """Return True if the stores never grow."""
        return bool(self.layers[0].is_compileable)

    def start(self, attentions: list[Any], x: Tensor) -> None:
        """Prepare for the tokens x `(B, S, hidden_size)`.

        Raises:
            InputError: if the cache holds another number of sequences.
            CacheOverflowError: if the tokens do not fit. For a single token in a static cache on a GPU this is not checked.
        """
        batch_size, num_tokens = x.shape[:2]
        if not self._advancing:
            self._start_layers(attentions, x)
        if self.layers[0].batch_size != batch_size:
            repeats = max(1, batch_size // max(1, self.layers[0].batch_size))
            raise InputError(
                f"past_key_values holds {self.layers[0].batch_size} sequences, the batch has {batch_size}; "
                + (
                    f"a static cache keeps its batch: build one for {batch_size}"
                    if self.is_static
                    else f"use past_key_values.batch_repeat_interleave({repeats})"
                )
            )
        # the length of a static cache is on its device, and a step on a GPU does not wait for it
        is_free = not self.is_static or self.layers[0].length.device.type == "cpu"
        if not torch.compiler.is_compiling() and (num_tokens > 1 or is_free):
            self.require_room(int(self.get_seq_length()) + num_tokens)

    def _start_layers(self, attentions: list[Any], x: Tensor) -> None:
        for layer, attention in zip(self.layers, attentions, strict=True):
            layer.start(attention, x)
        self._advancing = list(self.layers)
        if self.is_static:
            by_device = {layer.length.device: layer for layer in reversed(self.layers)}
            for layer in self.layers:
                layer.length = by_device[layer.length.device].length
            self._advancing = list(by_device.values())
            if [device.type for device in by_device] == ["cuda"] and self.options["step_graphs"] is not False:
                self.graphs = StepGraphs(may_fail=not self.options["step_graphs"], known=GRAPH_MODULES)

    def defer(self, x: Tensor, mask: Tensor | None) -> None:
        """Keep the first tokens, embedded as `x` `(B, S, hidden_size)`, and their mask until a step follows."""
        self.deferred = Deferred(x, mask)

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        """Return the number of columns of the batch so far, padding included."""
        return super().get_seq_length(layer_idx) if self.deferred is None else self.deferred.x.shape[1]

    @property
    def batch_size(self) -> int:
        """Return the number of sequences, -1 before the first tokens."""
        return int(super().batch_size) if self.deferred is None else self.deferred.x.shape[0]

    def reset(self) -> None:
        """Empty every sequence."""
        self.deferred = None
        super().reset()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens of every sequence. It raises the errors of `NSACacheLayer.crop`; nothing changes then."""
        if self.deferred is None or tokens_to_remove >= 0:
            for layer in self.layers:
                # layers of different kinds may refuse a crop that others allow
                if layer.store is not None and tokens_to_remove < 0:
                    layer.store.check_crop(-int(tokens_to_remove))
            super().crop(tokens_to_remove)
            self.advance(int(tokens_to_remove))
            return
        x, mask = self.deferred
        shortest = x.shape[1] if mask is None else int((mask != 0).sum(1).min())
        if -tokens_to_remove > shortest:
            raise CacheOverflowError(f"a sequence cannot go back by {-tokens_to_remove} tokens (it has {shortest}); crop fewer")
        self.deferred = Deferred(x[:, :tokens_to_remove], None if mask is None else mask[:, :tokens_to_remove])

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace the sequences by those at `beam_idx` `(B',)`."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence `repeats` times."""
        if self.batch_size > 0:
            self.batch_select_indices(torch.arange(self.batch_size).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only the sequences at `indices`; a boolean vector `(B,)` keeps the sequences where it is True."""
        if self.deferred is not None:
            self.deferred = self.deferred.rows(indices.to(self.deferred.x.device))
        super().batch_select_indices(indices)

    def require_room(self, num_tokens: int) -> None:
        """Raise CacheOverflowError if sequences of `num_tokens` tokens do not fit."""
        most = self.get_max_length()
        if 0 <= most < num_tokens:
            raise CacheOverflowError(
                f"{num_tokens} tokens do not fit past_key_values (it was built with max_cache_len={most}); use max_cache_len={num_tokens} or more"
            )

    @property
    def is_initialized(self) -> bool:
        """Return True if the cache holds tokens, or stores for them."""
        return self.deferred is not None or all(layer.is_initialized for layer in self.layers)

    def require_rollback(self, num_tokens: int) -> None:
        """Raise CacheOverflowError if `crop` could not remove `num_tokens` tokens."""
        most = self.options["max_rollback"]
        if not self.options["keep_raw"] and num_tokens > most:
            raise CacheOverflowError(
                f"{num_tokens} draft tokens cannot be taken back from past_key_values (it was built with max_rollback={most}); "
                f"use max_rollback={num_tokens} or more, or keep_raw=True"
            )

    def advance(self, num_tokens: int) -> None:
        """Add the `num_tokens` columns of a step to the length."""
        for layer in self._advancing:
            layer.advance(num_tokens)

    def check(self) -> None:
        """Raise CacheOverflowError if a step of a static cache dropped tokens that did not fit; waits for the device."""
        for layer in self.layers:
            if layer.store is not None:
                layer.store.check()
