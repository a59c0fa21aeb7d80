"""The decoder: embedding, blocks of RMSNorm -> attention and RMSNorm -> SwiGLU, a norm, and the output layer.

Training and inference use the same class. The caller passes the attention module of each layer, and the function for activation checkpointing.
Checkpoints and exports use the names of the decoder's parameters.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from nsa_core.dense_attention import DenseAttention
from nsa_core.module import NativeSparseAttention

ATTENTIONS: dict[str, type[NativeSparseAttention] | type[DenseAttention]] = {"nsa": NativeSparseAttention, "dense": DenseAttention}
"""Name -> attention class of a decoder's layers; each is built from an `NSAConfig`."""
EMBEDDING_STD = 0.02
"""Standard deviation of new embeddings. It is small, so that a tied output starts near uniform: the first loss is about ln(vocab_size)."""
Recompute = Callable[..., Tensor]
"""A function for activation checkpointing: takes a function and its inputs, returns the result, and recomputes it in the backward pass."""


def mlp_width(dim: int) -> int:
    """Return the usual hidden width of an MLP on `dim` channels: 8/3 of them, rounded up to a multiple of 64."""
    return -(-8 * dim // (3 * 64)) * 64


class DecoderSizes(NamedTuple):
    """The sizes of a decoder, apart from those of its attention."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    """Width of the MLP; `mlp_width` is the usual one."""
    norm_eps: float | None = None
    """Epsilon that RMSNorm adds to the mean square; None: 2^-23, the machine epsilon of float32 (float64: its own)."""
    tie_embeddings: bool = True
    """The output layer shares the embedding's weight; else it has `lm_head.weight`."""


class SwiGLU(nn.Module):
    """The MLP of a layer: down(silu(gate(x)) * up(x))."""

    def __init__(self, dim: int, width: int) -> None:
        """Build `dim` -> `width` -> `dim`."""
        super().__init__()
        self.gate = nn.Linear(dim, width, bias=False)
        self.up = nn.Linear(dim, width, bias=False)
        self.down = nn.Linear(width, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return `(..., dim)` of `x` `(..., dim)`."""
        result: Tensor = self.down(nn.functional.silu(self.gate(x)) * self.up(x))
        return result


class Block(nn.Module):
    """One pre-norm layer."""

    recompute: Recompute | None = None
    """Runs the layer with activation checkpointing, in training passes without a cache; None: no checkpointing."""

    def __init__(self, sizes: DecoderSizes, attention: Callable[[], nn.Module]) -> None:
        """Build a layer of `sizes` around the module that `attention` makes."""
        super().__init__()
        self.attention_norm = nn.RMSNorm(sizes.hidden_size, eps=sizes.norm_eps)
        self.attention = attention()
        self.mlp_norm = nn.RMSNorm(sizes.hidden_size, eps=sizes.norm_eps)
        self.mlp = SwiGLU(sizes.hidden_size, sizes.intermediate_size)

    def forward(
        self,
        x: Tensor,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        cache: Any = None,
        query_count: Tensor | None = None,
    ) -> Tensor:
        """Return `(B, S, hidden)` of `x` `(B, S, hidden)`."""
        if self.recompute is not None and self.training and cache is None:
            return self.recompute(self._layer, x, cu_seqlens, max_seqlen, None, query_count)
        return self._layer(x, cu_seqlens, max_seqlen, cache, query_count)

    def _layer(
        self,
        x: Tensor,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        cache: Any = None,
        query_count: Tensor | None = None,
    ) -> Tensor:
        attended = self.attention(
            self.attention_norm(x), cu_seqlens=cu_seqlens, max_seqlen=max_seqlen, cache=cache, query_count=query_count
        )
        x = x + attended
        result: Tensor = x + self.mlp(self.mlp_norm(x))
        return result


class Decoder(nn.Module):
    """The whole decoder: maps token ids to logits."""

    block: type[Block] = Block
    """The class of a layer."""

    def __init__(self, sizes: DecoderSizes, attentions: Iterable[Callable[[], nn.Module]], *inputs: Any) -> None:
        """Build one layer for each of `attentions`; `inputs` are passed to the next class in the MRO."""
        super().__init__(*inputs)
        self.embedding = nn.Embedding(sizes.vocab_size, sizes.hidden_size)
        self.blocks = nn.ModuleList(self.block(sizes, attention) for attention in attentions)
        self.norm = nn.RMSNorm(sizes.hidden_size, eps=sizes.norm_eps)
        nn.init.normal_(self.embedding.weight, std=EMBEDDING_STD)
        if not sizes.tie_embeddings:
            self.lm_head = nn.Linear(sizes.hidden_size, sizes.vocab_size, bias=False)
            nn.init.normal_(self.lm_head.weight, std=EMBEDDING_STD)
        self._is_tied = sizes.tie_embeddings

    def forward(
        self,
        input_ids: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        caches: Sequence[Any] | None = None,
        query_count: Tensor | None = None,
    ) -> Tensor:
        """Return logits `(B, S, vocab_size)` of `input_ids` `(B, S)`.

        Packed: B = 1, with `cu_seqlens` int32 `(N + 1,)` and the upper bound `max_seqlen`, a Python int. With `caches` from `new_caches`
        the tokens follow the cached tokens. `query_count` int32 `(B,)` is the number of valid tokens of each sequence; None: all S.
        """
        return self.logits(self.hidden(self.embedding(input_ids), cu_seqlens, max_seqlen, caches, query_count))

    def hidden(
        self,
        x: Tensor,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        caches: Sequence[Any] | None = None,
        query_count: Tensor | None = None,
    ) -> Tensor:
        """Return the hidden states `(B, S, hidden)` after the last norm, from embedded tokens `x` `(B, S, hidden)`; see `forward`."""
        for index, block in enumerate(self.blocks):
            x = block(x, cu_seqlens, max_seqlen, caches[index] if caches else None, query_count)
        result: Tensor = self.norm(x)
        return result

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits `(..., vocab_size)` of states `(..., hidden)`."""
        return nn.functional.linear(hidden, self.output_weight)

    @property
    def output_weight(self) -> Tensor:
        """Return the weight `(vocab_size, hidden)` of the output layer."""
        layer: Any = self.embedding if self._is_tied else self.lm_head
        return cast(Tensor, layer.weight)

    def new_caches(self, batch_size: int, max_seqlen: int | None = None, **options: Any) -> list[Any]:
        """Return an empty cache per layer, for sequences of at most `max_seqlen` tokens; `options` are keywords of the layers' `new_cache`."""
        return [cast(Any, block).attention.new_cache(batch_size, max_seqlen, **options) for block in self.blocks]

    @property
    def sparse_layers(self) -> list[NativeSparseAttention]:
        """Return the NSA layers, in order, without the dense ones."""
        attentions = [cast(Block, block).attention for block in self.blocks]
        return [attention for attention in attentions if isinstance(attention, NativeSparseAttention)]


class _Undrawn(TorchFunctionMode):
    """Skips the random initialisation of new weights."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


@contextmanager
def weightless() -> Iterator[None]:
    """Build models on the meta device without random initialisation; on that device it would load torch's compiler, which takes seconds."""
    with torch.device("meta"), _Undrawn():
        yield
