"""The decoder: embedding, blocks of RMSNorm -> attention and RMSNorm -> SwiGLU, and an output tied to the embedding."""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nsa_core import NativeSparseAttention, NSAConfig
from nsa_train.config import RunConfig
from nsa_train.data.packing import IGNORED
from nsa_train.data.tokenizer import TOKENIZERS
from nsa_train.model.dense_attention import DenseAttention

ATTENTIONS: dict[str, type[NativeSparseAttention] | type[DenseAttention]] = {"nsa": NativeSparseAttention, "dense": DenseAttention}
"""By the names that `model.attention` allows."""
EMBEDDING_STD = 0.02
"""Small, so that the tied output starts near uniform: the first loss is about ln(vocab_size)."""


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)), 8/3 `dim` wide, rounded up to a multiple of 64."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        width = -(-8 * dim // (3 * 64)) * 64
        self.gate = nn.Linear(dim, width, bias=False)
        self.up = nn.Linear(dim, width, bias=False)
        self.down = nn.Linear(width, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return `(..., dim)` of `x` `(..., dim)`."""
        result: Tensor = self.down(nn.functional.silu(self.gate(x)) * self.up(x))
        return result


class Block(nn.Module):
    """One pre-norm layer; `attention` is "nsa" or "dense"."""

    def __init__(self, config: NSAConfig, attention: str) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden_size)
        self.attention = ATTENTIONS[attention](config)
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
        attended = self.attention(
            self.attention_norm(x), cu_seqlens=cu_seqlens, max_seqlen=max_seqlen, cache=cache, query_count=query_count
        )
        x = x + attended
        result: Tensor = x + self.mlp(self.mlp_norm(x))
        return result


class Decoder(nn.Module):
    """Token ids to logits."""

    def __init__(self, config: NSAConfig, *, num_layers: int, vocab_size: int, attention: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config, attention) for _ in range(num_layers))
        self.norm = nn.RMSNorm(config.hidden_size)
        self.recompute = False
        """True: each block is recomputed in the backward pass (activation checkpointing)."""
        nn.init.normal_(self.embedding.weight, std=EMBEDDING_STD)

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

        Packed: B = 1 with `cu_seqlens` int32 `(N + 1,)` and the host bound `max_seqlen`. With `caches` (`new_caches`)
        the tokens follow those held, of which `query_count` `(B,)` are valid.
        """
        x = self.embedding(input_ids)
        for index, block in enumerate(self.blocks):
            if self.recompute and self.training:
                x = checkpoint(block, x, cu_seqlens, max_seqlen, use_reentrant=False)
            else:
                x = block(x, cu_seqlens, max_seqlen, caches[index] if caches else None, query_count)
        return nn.functional.linear(self.norm(x), self.embedding.weight)

    def new_caches(self, batch_size: int, max_seqlen: int) -> list[Any]:
        """Return an empty cache per layer, for sequences of at most `max_seqlen` tokens."""
        return [cast(Block, block).attention.new_cache(batch_size, max_seqlen) for block in self.blocks]

    @property
    def sparse_layers(self) -> list[NativeSparseAttention]:
        """Return the NSA layers, first to last; none in the dense twin."""
        attentions = [cast(Block, block).attention for block in self.blocks]
        return [attention for attention in attentions if isinstance(attention, NativeSparseAttention)]


def summed_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy in nats of `logits` `(B, S, V)` summed over the `labels` `(B, S)` that exist, float32."""
    flat = logits.flatten(0, -2).float()
    return nn.functional.cross_entropy(flat, labels.flatten(), ignore_index=IGNORED, reduction="sum")


def build_model(config: RunConfig, attention: str | None = None) -> Decoder:
    """Return the decoder of `config`, with freshly drawn weights; `attention`: of a twin instead of `model.attention`."""
    model = Decoder(
        config.nsa_config(),
        num_layers=config.model.n_layers,
        vocab_size=TOKENIZERS[config.data.tokenizer].vocab_size,
        attention=attention or config.model.attention,
    )
    model.recompute = config.train.activation_checkpointing == "full"
    return model


class ParameterCounts(NamedTuple):
    """Weights of the two twins, the shared embedding counted once."""

    nsa: int
    dense: int


def count_parameters(config: RunConfig) -> ParameterCounts:
    """Return the parameters of `config`'s decoder with either attention; no weights are allocated."""
    with torch.device("meta"):
        models = (build_model(config, attention) for attention in ParameterCounts._fields)
        return ParameterCounts(*(sum(weight.numel() for weight in model.parameters()) for model in models))
