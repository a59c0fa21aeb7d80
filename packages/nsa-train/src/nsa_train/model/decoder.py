"""The decoder: embedding, blocks of RMSNorm -> attention and RMSNorm -> SwiGLU, and an output tied to the embedding."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from nsa_core import NativeSparseAttention, NSAConfig
from nsa_train.data.tokenizer import num_ids_of
from nsa_train.errors import ConfigError
from nsa_train.model.dense_attention import DenseAttention
from nsa_train.model.loss import ChunkKernel, loss_and_gradient, summed_loss, summed_loss_in_chunks
from nsa_train.model.recompute import recomputed
from nsa_train.settings.config import Layer, RunConfig

ATTENTIONS: dict[str, type[NativeSparseAttention] | type[DenseAttention]] = {"nsa": NativeSparseAttention, "dense": DenseAttention}
"""By the names that `model.attention` and `model.layers` allow."""
EMBEDDING_STD = 0.02
"""Small, so that the tied output starts near uniform: the first loss is about ln(vocab_size)."""


def mlp_width(dim: int) -> int:
    """Return the hidden width of an MLP on `dim` channels: 8/3 of them, rounded up to a multiple of 64."""
    return -(-8 * dim // (3 * 64)) * 64


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)), `mlp_width(dim)` wide."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        width = mlp_width(dim)
        self.gate = nn.Linear(dim, width, bias=False)
        self.up = nn.Linear(dim, width, bias=False)
        self.down = nn.Linear(width, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return `(..., dim)` of `x` `(..., dim)`."""
        result: Tensor = self.down(nn.functional.silu(self.gate(x)) * self.up(x))
        return result


class Block(nn.Module):
    """One pre-norm layer."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        config: NSAConfig = layer.config
        self.recompute = "none"
        """The part that the backward pass computes again: `train.activation_checkpointing`."""
        self.attention_norm = nn.RMSNorm(config.hidden_size)
        self.attention = ATTENTIONS[layer.attention](config)
        self.mlp_norm = nn.RMSNorm(config.hidden_size)
        self.mlp = SwiGLU(config.hidden_size)

    def forward(
        self,
        x: Tensor,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        cache: Any = None,
        query_count: Tensor | None = None,
    ) -> Tensor:
        """Return `(B, S, hidden)` of `x` `(B, S, hidden)`."""
        if self.recompute != "none" and self.training and cache is None:
            return recomputed(self._layer, self.recompute, x, cu_seqlens, max_seqlen)
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
    """Token ids to logits or, with labels, to their loss."""

    def __init__(self, layers: Sequence[Layer], *, vocab_size: int) -> None:
        super().__init__()
        dim = layers[0].config.hidden_size
        self.embedding = nn.Embedding(vocab_size, dim)
        self.blocks = nn.ModuleList(map(Block, layers))
        self.norm = nn.RMSNorm(dim)
        self.loss_chunk = 0
        """Tokens whose logits exist at a time when labels are given; 0: all."""
        self._whole_loss: Callable[[Tensor, Tensor], Tensor] = summed_loss
        self._chunk_kernel: ChunkKernel = loss_and_gradient
        nn.init.normal_(self.embedding.weight, std=EMBEDDING_STD)

    def forward(
        self,
        input_ids: Tensor,
        *,
        labels: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        caches: Sequence[Any] | None = None,
        query_count: Tensor | None = None,
    ) -> Tensor:
        """Return logits `(B, S, vocab_size)` of `input_ids` `(B, S)` or, given `labels` `(B, S)`, the summed loss in nats.

        Packed: B = 1 with `cu_seqlens` int32 `(N + 1,)` and the host bound `max_seqlen`. With `caches` (`new_caches`)
        the tokens follow those held, of which `query_count` `(B,)` are valid.
        """
        x = self.embedding(input_ids)
        for index, block in enumerate(self.blocks):
            x = block(x, cu_seqlens, max_seqlen, caches[index] if caches else None, query_count)
        hidden, weight = self.norm(x), self.embedding.weight
        if labels is None:
            return nn.functional.linear(hidden, weight)
        if self.loss_chunk:
            return summed_loss_in_chunks(hidden, weight, labels, self.loss_chunk, self._chunk_kernel)
        return self._whole_loss(nn.functional.linear(hidden, weight), labels)

    def compile_parts(self, **options: Any) -> None:
        """Compile each block's forward pass and the loss; `options` are those of `torch.compile`."""
        for block in self.blocks:
            block.forward = torch.compile(block.forward, **options)
        self._whole_loss = torch.compile(summed_loss, **options)
        self._chunk_kernel = torch.compile(loss_and_gradient, **options)

    def new_caches(self, batch_size: int, max_seqlen: int) -> list[Any]:
        """Return an empty cache per layer, for sequences of at most `max_seqlen` tokens."""
        return [cast(Block, block).attention.new_cache(batch_size, max_seqlen) for block in self.blocks]

    @property
    def sparse_layers(self) -> list[NativeSparseAttention]:
        """Return the NSA layers, first to last, without those that are dense."""
        attentions = [cast(Block, block).attention for block in self.blocks]
        return [attention for attention in attentions if isinstance(attention, NativeSparseAttention)]


def vocab_size_of(config: RunConfig) -> int:
    """Return the rows of the embedding: `model.vocab_size`, or the tokenizer's ids where that is 0.

    Raises:
        ConfigError: when the tokenizer has more ids than `model.vocab_size` rows.
    """
    needed = num_ids_of(config.data)
    asked = config.model.vocab_size or needed
    if asked < needed:
        raise ConfigError(
            f"model.vocab_size={asked} is below the {needed} ids of data.tokenizer={config.data.tokenizer!r} (each needs a row); "
            f"use {-(-needed // 64) * 64}, or 0 for as many as there are"
        )
    return asked


def build_model(config: RunConfig) -> Decoder:
    """Return the decoder of `config`, with freshly drawn weights."""
    model = Decoder(layers_of(config), vocab_size=vocab_size_of(config))
    model.loss_chunk = config.train.loss_chunk
    for block in model.blocks:
        cast(Block, block).recompute = config.train.activation_checkpointing
    return model


def layers_of(config: RunConfig) -> list[Layer]:
    """Return the layers of `config`'s decoder, first to last."""
    pattern = config.pattern()
    return [*pattern] * (config.model.n_layers // len(pattern))


class _Undrawn(TorchFunctionMode):
    """Draw no numbers for new weights."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


@contextmanager
def weightless() -> Iterator[None]:
    """Let models be made on the meta device. Nothing is drawn there, for which torch would load its compiler, some seconds long."""
    with torch.device("meta"), _Undrawn():
        yield


def undrawn_weights(config: RunConfig) -> dict[str, Tensor]:
    """Return name -> weight of `config`'s decoder, on the meta device: their shapes and dtypes. Nothing is allocated.

    Raises:
        ConfigError: when its vocabulary does not fit its tokenizer.
    """
    pattern = config.pattern()
    with weightless():
        model = Decoder(pattern, vocab_size=vocab_size_of(config))
    layers = [block.state_dict() for block in model.blocks]
    repeated = {
        f"blocks.{index}.{name}": weight for index in range(config.model.n_layers) for name, weight in layers[index % len(pattern)].items()
    }
    return {name: weight for name, weight in model.state_dict().items() if not name.startswith("blocks.")} | repeated


class ParameterCounts(NamedTuple):
    """Weights of the two twins, the shared embedding counted once."""

    nsa: int
    """With the dense layers of `model.layers`, if there are any."""
    dense: int


def count_parameters(config: RunConfig) -> ParameterCounts:
    """Return the parameters of `config`'s decoder with either attention; no weights are allocated."""
    return ParameterCounts(*(_count(config, attention) for attention in ParameterCounts._fields))


def introduced(config: RunConfig) -> str:
    """Return a line about the decoder of `config`: its attention, and the parameters of both twins."""
    counts, attentions = count_parameters(config), [layer.attention for layer in layers_of(config)]
    dense = attentions.count("dense")
    mixed = f", {dense} of {len(attentions)} layers dense" if config.model.attention == "nsa" and dense else ""
    return f"model: {config.model.attention} attention{mixed}; {counts.nsa:,} parameters with nsa, {counts.dense:,} with dense"


def _count(config: RunConfig, attention: str) -> int:
    pattern = config.pattern(attention)
    with weightless():
        model = Decoder(pattern, vocab_size=vocab_size_of(config))
    layers, whole = (sum(weight.numel() for weight in module.parameters()) for module in (model.blocks, model))
    return whole + (config.model.n_layers // len(pattern) - 1) * layers
