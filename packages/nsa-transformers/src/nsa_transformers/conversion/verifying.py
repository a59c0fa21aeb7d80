"""Compare a converted model with its source, layer by layer. The weights of both are read from their files."""

from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nsa_core.decoder import Block, weightless
from nsa_core.errors import InputError
from nsa_transformers.configuration import Layer
from nsa_transformers.conversion.options import dense_branch, gate_logits
from nsa_transformers.conversion.planning import EMBEDDING, HEAD, Conversion
from nsa_transformers.conversion.sources import Source
from nsa_transformers.conversion.streaming import row_pieces, streamed, whole
from nsa_transformers.conversion.tensor_files import Stored
from nsa_transformers.conversion.tensor_files import stored_tensors as stored_in
from nsa_transformers.weights import weight_files

TOKENS = 256
"""Number of random rows that go through each layer, and of tokens that go through each model, rounded up to whole sequences."""
TOLERANCE = 1e-4
"""Largest difference of a layer's outputs, as a share of the largest output."""
TINY = torch.finfo(torch.float32).tiny


class Difference(NamedTuple):
    """Differences between a converted model and its source, in float32."""

    layers: float
    """Largest difference of a layer's outputs when only its dense branch is open, as a share of the largest output."""
    logits: float
    """Largest difference of the logits, as a share of the largest logit."""
    source_loss: float
    """Mean loss of the source, in nats per token, on uniformly drawn ids."""
    converted_loss: float
    num_tokens: int
    """Tokens of a sequence: 256, or fewer if the dense branches cover fewer."""


def covered_tokens(layer: Layer, window: int | None) -> float:
    """Return the longest sequence on which `layer`, with only its dense branch open, equals the source's layer with the sliding `window`."""
    if layer.attention == "dense":
        return inf
    geometry = layer.config.geometry
    if dense_branch(layer.config) == "slc":
        return geometry.num_selected_blocks * geometry.selection_block_size
    return inf if window == geometry.window_size else geometry.window_size


def comparable_tokens(conversion: Conversion) -> int:
    """Return the length of the sequences to compare: TOKENS, or fewer if the dense branch of a layer covers fewer tokens.

    With `gates="open"`, the window of a layer that was full attention must cover them too.
    """
    longest: float = TOKENS
    for layer, window in zip(conversion.config.decoder_layers(), conversion.source.windows, strict=True):
        longest = min(longest, covered_tokens(layer, window))
        if conversion.options.gates == "open" and layer.attention == "nsa" and window is None and "win" in layer.config.branches:
            longest = min(longest, layer.config.geometry.window_size)
    return int(longest)


@torch.no_grad()
def compare(conversion: Conversion, folder: Path, say: Callable[[str], None] = lambda line: None) -> Difference:
    """Return how the weights in `folder` differ from their source. Only a part of one layer of each model is in memory.

    Two batches go through each layer together. The first holds uniformly drawn ids: each model has its own states for them. The second holds
    random rows, which are drawn again for every layer and are the same for both models; for them only the dense branch is open.

    Raises:
        InputError: if the outputs of a layer, or with `gates="selected"` the logits, differ by more than 1e-4 of the largest; if outputs or
            logits are not finite.
    """
    source, layers = conversion.source, conversion.config.decoder_layers()
    num_tokens = comparable_tokens(conversion)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(source.config.vocab_size, (-(-TOKENS // num_tokens), num_tokens), generator=generator)
    tensors = stored_in(weight_files(folder))
    theirs, ours = (_embedded(stored, ids) for stored in (source.tensors[EMBEDDING], tensors["embedding.weight"]))
    largest = 0.0
    for layer_index, layer in enumerate(layers):
        rows, attended = torch.randn(theirs.shape, generator=generator), list[Tensor]()
        expected = _source_layer(source, layer_index, num_tokens, attended)(torch.cat([theirs, rows]))
        found = _converted_layer(conversion, layer, _below(f"blocks.{layer_index}.", tensors), len(ids), attended)(torch.cat([ours, rows]))
        theirs, ours = expected[: len(ids)], found[: len(ids)]
        # compare outputs without the residual, which would hide the layer's contribution, and attention by itself, which the MLP would hide
        added = (expected[len(ids) :] - rows, found[len(ids) :] - rows)
        for pair in (added, [x[len(ids) :] for x in attended]):
            largest = max(largest, _checked_difference(layer_index, *pair))
        say(f"verified layer {layer_index + 1} of {len(layers)}")
    norms = (source.tensors["model.norm.weight"], tensors["norm.weight"])
    theirs, ours = (
        nn.functional.rms_norm(x, x.shape[-1:], whole(norm), source.config.rms_norm_eps)
        for x, norm in zip((theirs, ours), norms, strict=True)
    )
    is_tied = source.config.tie_word_embeddings
    heads = (source.tensors[EMBEDDING if is_tied else HEAD], tensors["embedding.weight" if is_tied else "lm_head.weight"])
    difference = Difference(largest, *_compared_logits((theirs, ours), heads, ids), num_tokens)
    if conversion.options.gates == "selected" and not difference.logits <= TOLERANCE:
        raise InputError(
            f"logits differ from the source's by {difference.logits:.1e} of the largest (the rule of --gates selected: at most "
            f"{TOLERANCE:.0e}); report it with the source's config.json, or use --gates open"
        )
    return difference


def _below(prefix: str, tensors: dict[str, Stored]) -> dict[str, Stored]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _embedded(table: Stored, ids: Tensor) -> Tensor:
    rows = [table.rows(index, 1) for index in ids.flatten().tolist()]
    return torch.cat(rows).float().view(*ids.shape, -1)


def _noted(attended: list[Tensor]) -> Callable[..., None]:
    """Return a forward hook that appends the output `(B, num_tokens, hidden)` of an attention module to `attended`."""

    def note(module: nn.Module, inputs: Any, out: Any) -> None:
        attended.append(out[0] if isinstance(out, tuple) else out)

    return note


def _source_layer(source: Source, layer_index: int, num_tokens: int, attended: list[Tensor]) -> Callable[[Tensor], Tensor]:
    """Return Transformers' own layer `layer_index`, with the causal mask of its window, as a function that maps states `(B, num_tokens, hidden)`."""
    source.config._attn_implementation = "eager"
    with weightless():
        module: Any = source.part("DecoderLayer")(source.config, layer_index)
    layer: Any = streamed(module, _below(f"model.layers.{layer_index}.", source.tensors))
    layer.self_attn.register_forward_hook(_noted(attended))
    positions = torch.arange(num_tokens)
    distance = positions[:, None] - positions
    is_visible = (distance >= 0) & (distance < (source.windows[layer_index] or num_tokens))
    mask = torch.zeros(num_tokens, num_tokens).masked_fill(~is_visible, -inf)[None, None]

    def run(x: Tensor) -> Tensor:
        tables = source.part("RotaryEmbedding")(source.config)(x, positions[None])
        out = layer(x, attention_mask=mask, position_ids=positions[None], position_embeddings=tables)
        states: Tensor = out[0] if isinstance(out, tuple) else out
        return states

    return run


def _converted_layer(conversion: Conversion, layer: Layer, tensors: dict[str, Stored], num_own: int, attended: list[Tensor]) -> nn.Module:
    """Return a layer of the converted model. In batch entries from `num_own` on, only its dense branch is open."""
    with weightless():
        module = Block(conversion.config.sizes(), layer.build)
    block: Any = streamed(module, tensors)
    block.attention.register_forward_hook(_noted(attended))
    if layer.attention == "nsa":
        logits = gate_logits(layer.config, "selected")

        def open_dense(gate: nn.Module, inputs: Any, found: Tensor) -> Tensor:
            return torch.cat([found[:num_own], logits.expand_as(found[num_own:])])

        block.attention.gate.register_forward_hook(open_dense)
    return block  # type: ignore[no-any-return]


def _checked_difference(layer_index: int, expected: Tensor, found: Tensor) -> float:
    """Return the largest difference of outputs of layer `layer_index`, as a share of the largest output; 0 if all outputs are 0."""
    if not bool(expected.isfinite().all() & found.isfinite().all()):
        raise InputError(f"layer {layer_index} gives NaN or Inf (its weights are not finite, or overflow float32); use another checkpoint")
    difference = float((expected - found).abs().max() / expected.abs().max().clamp(min=TINY))
    if not difference <= TOLERANCE:
        raise InputError(
            f"layer {layer_index} differs from Transformers' by {difference:.1e} of the largest output (the rule: at most {TOLERANCE:.0e}); "
            "report it with the source's config.json"
        )
    return difference


def _compared_logits(states: tuple[Tensor, Tensor], heads: tuple[Stored, Stored], ids: Tensor) -> tuple[float, float, float]:
    """Return the largest difference of logits, as a share of the largest logit, and both mean losses.

    Only some columns of the logits are computed at a time.
    """
    difference, largest = 0.0, 0.0
    sums = [torch.full(ids.shape, -inf) for _ in states]
    hits = [torch.zeros(ids[:, 1:].shape) for _ in states]
    first = 0
    for weights in zip(*map(row_pieces, heads), strict=True):
        pair = [nn.functional.linear(x, weight) for x, weight in zip(states, weights, strict=True)]
        difference = max(difference, float((pair[0] - pair[1]).abs().max()))
        largest = max(largest, float(pair[0].abs().max()))
        for side, logits in enumerate(pair):
            sums[side] = torch.logaddexp(sums[side], logits.logsumexp(-1))
            hits[side] += _logits_of(logits[:, :-1], ids[:, 1:] - first)
        first += len(weights[0])
    if not all(bool(total.isfinite().all()) for total in sums):
        raise InputError("the logits are not finite (the source's embedding, norm or output layer is not); use another checkpoint")
    losses = _losses(sums, hits)
    return difference / max(largest, TINY), losses[0], losses[1]


def _logits_of(logits: Tensor, columns: Tensor) -> Tensor:
    """Return the logit `(...)` in each of `columns`; 0 for a column that `logits` does not have."""
    is_here = (columns >= 0) & (columns < logits.shape[-1])
    found = logits.gather(-1, columns.clamp(0, logits.shape[-1] - 1).unsqueeze(-1)).squeeze(-1)
    return torch.where(is_here, found, 0)


def _losses(sums: Sequence[Tensor], hits: Sequence[Tensor]) -> list[float]:
    return [float((total[:, :-1] - hit).mean()) for total, hit in zip(sums, hits, strict=True)]
