"""Model FLOPs of the attention that runs: what MFU is a share of.

Counted are products of matrices, two FLOPs per multiply-add, the backward pass as twice the forward. The attention counts
the pairs of query and key that it defines: with NSA the blocks, chosen tokens and window of each query, not all of its
past. What is recomputed (activation checkpointing, kernels that redo scores) does not count, nor does the choice of
blocks, which reuses the compressed branch's weights.
"""

from collections.abc import Iterable, Sequence

from attrs import frozen
from torch import nn

from nsa_core import BlockGeometry
from nsa_core.blocks import num_compressed_blocks
from nsa_train.config import RunConfig
from nsa_train.model.decoder import build_model, weightless

FORWARD_AND_BACKWARD = 3
"""Passes' worth of FLOPs of a training step."""


@frozen(kw_only=True)
class ModelFlops:
    """The FLOPs of one model, forward and backward, by what they grow with."""

    per_token: int
    """Of projections, MLPs and the output layer."""
    per_block: int
    """Of phi, for each compressed block of a sequence, all layers and KV heads."""
    per_pair: dict[str, int]
    """Of one query-key pair in all layers and heads: by branch, or "dense"."""
    geometry: BlockGeometry

    def of_sequence(self, length: int) -> int:
        """Return the FLOPs of a sequence of `length` tokens."""
        total = self.per_token * length
        if "dense" in self.per_pair:
            return total + self.per_pair["dense"] * causal_pairs(length)
        total += self.per_block * num_compressed_blocks(length, self.geometry)
        pairs = {"cmp": compressed_pairs, "slc": selected_pairs, "win": window_pairs}
        return total + sum(cost * pairs[branch](length, self.geometry) for branch, cost in self.per_pair.items())

    def of_step(self, lengths: Iterable[int]) -> int:
        """Return the FLOPs of sequences of `lengths` tokens."""
        return sum(self.of_sequence(length) for length in lengths)


def model_flops(config: RunConfig) -> ModelFlops:
    """Return the FLOPs of `config`'s model; no weights are allocated."""
    with weightless():
        model = build_model(config)
    attention, branches = config.model.attention, config.nsa.branches
    products = sum(
        module.weight.numel() for name, module in model.named_modules() if isinstance(module, nn.Linear) and "compress_" not in name
    )
    logits = model.embedding.weight.numel()
    pair = 2 * config.model.n_layers * config.model.n_heads
    scores, values = config.model.head_dim_qk, config.model.head_dim_v
    per_pair = dict.fromkeys(("dense",) if attention == "dense" else branches, FORWARD_AND_BACKWARD * pair * (scores + values))
    if attention == "nsa" and _only_chooses(branches):
        per_pair["cmp"] = pair * scores
    return ModelFlops(
        per_token=2 * FORWARD_AND_BACKWARD * (products + logits),
        per_block=0 if attention == "dense" else 2 * config.model.n_layers * _phi_products(config),
        per_pair=per_pair,
        geometry=config.nsa_config().geometry,
    )


def causal_pairs(length: int) -> int:
    """Return the query-key pairs of full causal attention over `length` tokens."""
    return length * (length + 1) // 2


def compressed_pairs(length: int, geometry: BlockGeometry) -> int:
    """Return the pairs of a query and a compressed block wholly in its past (Eq. 7)."""
    count = num_compressed_blocks(length, geometry)
    first = length - geometry.compression_block_size + 1
    return count * first - geometry.compression_stride * count * (count - 1) // 2 if count else 0


def selected_pairs(length: int, geometry: BlockGeometry) -> int:
    """Return the pairs of a query and a token of its min(n, own + 1) chosen blocks, its own up to itself (Eq. 12)."""
    size, most = geometry.selection_block_size, geometry.num_selected_blocks
    whole, rest = divmod(length, size)
    # earlier blocks that the queries of block b read: 0, 1, .., n - 1, n - 1, ..
    rising = min(whole, most)
    earlier = rising * (rising - 1) // 2 + (whole - rising) * (most - 1)
    last = rest * size * (min(most, whole + 1) - 1)
    return size * size * earlier + last + whole * causal_pairs(size) + causal_pairs(rest)


def window_pairs(length: int, geometry: BlockGeometry) -> int:
    """Return the pairs of a query and a token of its window, its own included."""
    window = min(geometry.window_size, length)
    return causal_pairs(window) + (length - window) * window


def _only_chooses(branches: Sequence[str]) -> bool:
    """Return whether compressed keys serve the choice of blocks alone, through which nothing flows back."""
    return "slc" in branches and "cmp" not in branches


def _phi_products(config: RunConfig) -> int:
    """Return the multiply-adds of phi for one block in one layer in all passes, keys and values, all KV heads."""
    size = config.nsa.compression_block_size
    keys = config.model.head_dim_qk if {"cmp", "slc"} & set(config.nsa.branches) else 0
    values = config.model.head_dim_v if "cmp" in config.nsa.branches else 0
    each = {"mlp": size + 1, "conv": size, "mean": 0}[config.nsa.compressor]
    # the MLP's rows are as wide as the head, the convolution has one filter per channel
    widths = (keys * keys, values * values) if config.nsa.compressor == "mlp" else (keys, values)
    passes = 1 if _only_chooses(config.nsa.branches) else FORWARD_AND_BACKWARD
    return passes * config.model.n_kv_heads * each * sum(widths)
