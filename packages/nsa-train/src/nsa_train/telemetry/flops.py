"""Model FLOPs of the attention that runs, for MFU.

Only matrix products count, with two FLOPs per multiply-add, and the backward pass counts as twice the forward. For attention, only pairs of query
and key that it computes count: with NSA the compressed blocks, chosen tokens and window of each query, not its whole past. These do not
count: recomputation (activation checkpointing, kernels that compute scores again), the choice of blocks, because it reuses the compressed
branch's weights, the selection loss, and its teacher.
"""

from collections.abc import Iterable, Sequence

from attrs import frozen
from torch import nn

from nsa_core import BlockGeometry, NSAConfig
from nsa_core.blocks import causal_pairs, compressed_pairs, num_compressed_blocks, selected_pairs, window_pairs
from nsa_core.decoder import weightless
from nsa_train.model.decoder import build_model
from nsa_train.settings.config import Layer, RunConfig

FORWARD_AND_BACKWARD = 3
"""FLOPs of a training step as a multiple of a forward pass."""


@frozen(kw_only=True)
class AttentionFlops:
    """Attention FLOPs, forward and backward and without projections, of equal layers: per compressed block and per query-key pair."""

    per_block: int
    """FLOPs of phi for each compressed block of a sequence, over these layers and KV heads."""
    per_pair: dict[str, int]
    """FLOPs of one query-key pair over these layers and heads: by branch, or "dense"."""
    geometry: BlockGeometry

    def of_sequence(self, length: int) -> int:
        """Return the FLOPs of a sequence of `length` tokens."""
        if "dense" in self.per_pair:
            return self.per_pair["dense"] * causal_pairs(length)
        pairs = {"cmp": compressed_pairs, "slc": selected_pairs, "win": window_pairs}
        found = sum(cost * pairs[branch](length, self.geometry) for branch, cost in self.per_pair.items())
        return found + self.per_block * num_compressed_blocks(length, self.geometry)


@frozen(kw_only=True)
class ModelFlops:
    """The FLOPs of one model, forward and backward."""

    per_token: int
    """FLOPs of projections, MLPs and the output layer."""
    attentions: tuple[AttentionFlops, ...]
    """One entry for each layer of the pattern; all repetitions of the layer count."""

    def of_sequence(self, length: int) -> int:
        """Return the FLOPs of a sequence of `length` tokens."""
        return self.per_token * length + sum(attention.of_sequence(length) for attention in self.attentions)

    def of_step(self, lengths: Iterable[int]) -> int:
        """Return the FLOPs of sequences of `lengths` tokens."""
        return sum(self.of_sequence(length) for length in lengths)


def model_flops(config: RunConfig) -> ModelFlops:
    """Return the FLOPs of `config`'s model; no weights are allocated."""
    with weightless():
        model = build_model(config)
    products = sum(
        module.weight.numel()
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and "compress_" not in name and name != "lm_head"
    )
    pattern = config.pattern()
    repeats = config.model.n_layers // len(pattern)
    return ModelFlops(
        per_token=2 * FORWARD_AND_BACKWARD * (products + model.output_weight.numel()),
        attentions=tuple(_attention_flops(layer, repeats) for layer in pattern),
    )


def _attention_flops(layer: Layer, repeats: int) -> AttentionFlops:
    config, pair = layer.config, 2 * repeats * layer.config.num_heads
    scores, values = config.head_dim_qk, config.head_dim_v
    parts = ("dense",) if layer.attention == "dense" else config.branches
    per_pair = dict.fromkeys(parts, FORWARD_AND_BACKWARD * pair * (scores + values))
    if layer.attention == "nsa" and _only_chooses(config.branches):
        per_pair["cmp"] = pair * scores
    return AttentionFlops(
        per_block=0 if layer.attention == "dense" else 2 * repeats * _phi_products(config),
        per_pair=per_pair,
        geometry=config.geometry,
    )


def _only_chooses(branches: Sequence[str]) -> bool:
    """Return whether compressed keys serve only the choice of blocks, which has no gradient."""
    return "slc" in branches and "cmp" not in branches


def _phi_products(config: NSAConfig) -> int:
    """Return the multiply-adds of phi for one block in one layer in all passes, keys and values, all KV heads."""
    size = config.geometry.compression_block_size
    keys = config.head_dim_qk if {"cmp", "slc"} & set(config.branches) else 0
    values = config.head_dim_v if "cmp" in config.branches else 0
    each = {"mlp": size + 1, "conv": size, "mean": 0}[config.compressor]
    # the MLP's rows are as wide as the head, the convolution has one filter per channel
    widths = (keys * keys, values * values) if config.compressor == "mlp" else (keys, values)
    passes = 1 if _only_chooses(config.branches) else FORWARD_AND_BACKWARD
    return passes * config.num_kv_heads * each * sum(widths)
