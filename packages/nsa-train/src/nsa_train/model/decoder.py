"""The decoder of a run: nsa-core's decoder with a loss, recomputation and compilation."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from nsa_core import decoder
from nsa_core.decoder import ATTENTIONS, Block, DecoderSizes, mlp_width, weightless
from nsa_core.selection_loss import SelectionLoss
from nsa_train.data.packing import IGNORED
from nsa_train.data.tokenizer import lacks_file, num_ids_of
from nsa_train.errors import ConfigError
from nsa_train.model.loss import ChunkKernel, loss_and_gradient, summed_loss, summed_loss_in_chunks
from nsa_train.settings.config import Layer, RunConfig

GOLDEN = (math.sqrt(5) - 1) / 2
aten = torch.ops.aten
PRODUCTS = frozenset(
    {
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
    }
)
"""Matrix products and attention of torch: selective recomputation keeps their results."""


def _kept(_: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    # operations outside torch's own namespaces are attention kernels
    is_kept = operation in PRODUCTS or operation.namespace not in ("aten", "prims", "prim")
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


_checkpointed = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
"""A layer draws no random numbers, so the state of the generators is not kept."""
RECOMPUTATIONS: dict[str, Callable[..., Tensor] | None] = {
    "none": None,
    "full": _checkpointed,
    "selective": partial(_checkpointed, context_fn=partial(create_selective_checkpoint_contexts, _kept)),
}
"""Value of `train.activation_checkpointing` -> the function that runs a layer: "full" keeps its inputs for the backward pass, "selective" also
the results of matrix products and attention."""


class Decoder(decoder.Decoder):
    """A decoder that maps token ids to logits or, with labels, to their loss."""

    def __init__(self, layers: Sequence[Layer], sizes: DecoderSizes) -> None:
        """Build a decoder of `layers`, first to last."""
        super().__init__(sizes, (partial(ATTENTIONS[layer.attention], layer.config) for layer in layers))
        self.loss_chunk = 0
        """Tokens whose logits are in memory at a time, given labels; 0: all."""
        self.selection_weight = 0.0
        """Weight of the auxiliary loss of the choice, relative to the mean loss per token; only its gradient is added, not its value."""
        self._whole_loss: Callable[[Tensor, Tensor], Tensor] = summed_loss
        self._chunk_kernel: ChunkKernel = loss_and_gradient

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

        Packed: B = 1 with `cu_seqlens` int32 `(N + 1,)` and the host bound `max_seqlen`. With `caches` (`new_caches`) the tokens follow
        those in the caches; the first `query_count` `(B,)` tokens of each entry are valid.
        """
        hidden = self.hidden(self.embedding(input_ids), cu_seqlens, max_seqlen, caches, query_count)
        if labels is None:
            return self.logits(hidden)
        if self.loss_chunk:
            loss = summed_loss_in_chunks(hidden, self.output_weight, labels, self.loss_chunk, self._chunk_kernel)
        else:
            loss = self._whole_loss(self.logits(hidden), labels)
        return loss + self._selection_term(labels) if self.selection_weight and self.training else loss

    def _selection_term(self, labels: Tensor) -> Tensor:
        """Return 0, with the gradient of the layers' auxiliary losses times the number of labels, by which the caller divides."""
        found = [auxiliary.value for auxiliary in self.selection_losses if auxiliary.value is not None]
        term = self.selection_weight * (labels != IGNORED).sum() * sum(found, labels.new_zeros((), dtype=torch.float32))
        return term - term.detach()

    @property
    def selection_losses(self) -> list[SelectionLoss]:
        """Return the object that receives the auxiliary loss of each NSA layer."""
        return [layer.selection_loss for layer in self.sparse_layers if layer.selection_loss is not None]

    def sample_queries(self, pass_number: int) -> None:
        """Choose the queries of the selection loss for the next pass, number `pass_number` of the run; offsets by the golden ratio cover 0 to 1."""
        found = self.selection_losses
        if found:
            # filled on the device: a copy from the host would wait
            offset = torch.full((), pass_number * GOLDEN % 1, dtype=torch.float64, device=self.embedding.weight.device)
            for auxiliary in found:
                auxiliary.offset = offset

    def compile_parts(self, **options: Any) -> None:
        """Compile each block's forward pass and the loss; `options` are those of `torch.compile`."""
        for block in self.blocks:
            block.forward = torch.compile(block.forward, **options)
        self._whole_loss = torch.compile(summed_loss, **options)
        self._chunk_kernel = torch.compile(loss_and_gradient, **options)


def sizes_of(config: RunConfig) -> DecoderSizes:
    """Return the sizes of `config`'s decoder.

    Raises:
        ConfigError: if its vocabulary does not fit its tokenizer.
    """
    model = config.model
    return DecoderSizes(
        vocab_size=vocab_size_of(config),
        hidden_size=model.dim,
        intermediate_size=intermediate_size_of(config),
        norm_eps=model.norm_eps,
        tie_embeddings=model.tie_embeddings,
    )


def intermediate_size_of(config: RunConfig) -> int:
    """Return the width of the MLP: `model.intermediate_size`, or `mlp_width` of `model.dim` if that is 0."""
    return config.model.intermediate_size or mlp_width(config.model.dim)


def vocab_size_of(config: RunConfig) -> int:
    """Return the number of rows of the embedding: `model.vocab_size`, or the number of the tokenizer's ids if that is 0.

    Raises:
        ConfigError: if the tokenizer, or a row of `data.source = "needle"`, has more ids than there are rows.
    """
    data, needed = config.data, num_ids_of(config.data)
    asked = config.model.vocab_size or needed
    # opening the data reports a missing file
    if asked < needed and not lacks_file(data):
        raise ConfigError(
            f"model.vocab_size={asked} is below the {needed} ids of data.tokenizer={config.data.tokenizer!r} (each needs a row); "
            f"use {-(-needed // 64) * 64}, or 0 for as many as there are"
        )
    if data.source == "needle" and (drawn := 3 * data.needle_symbols) > asked:
        raise ConfigError(
            f"data.needle_symbols={data.needle_symbols} needs {drawn} ids, and the embedding has {asked} rows (each needs a row); "
            f"use {asked // 3} or less, or --set model.vocab_size={-(-drawn // 64) * 64}"
        )
    return asked


def build_model(config: RunConfig) -> Decoder:
    """Return the decoder of `config`, with freshly drawn weights."""
    model = Decoder(layers_of(config), sizes_of(config))
    model.loss_chunk = config.train.loss_chunk
    model.selection_weight = config.train.selection_loss
    if model.selection_weight:
        for layer in model.sparse_layers:
            layer.selection_loss = SelectionLoss()
    for block in model.blocks:
        cast(Block, block).recompute = RECOMPUTATIONS[config.train.activation_checkpointing]
    return model


def layers_of(config: RunConfig) -> list[Layer]:
    """Return the layers of `config`'s decoder, first to last."""
    pattern = config.pattern()
    return [*pattern] * (config.model.n_layers // len(pattern))


def undrawn_weights(config: RunConfig) -> dict[str, Tensor]:
    """Return name -> weight of `config`'s decoder on the meta device, with shape and dtype. Nothing is allocated.

    Raises:
        ConfigError: if its vocabulary does not fit its tokenizer.
    """
    pattern = config.pattern()
    with weightless():
        model = Decoder(pattern, sizes_of(config))
    layers = [block.state_dict() for block in model.blocks]
    repeated = {
        f"blocks.{index}.{name}": weight for index in range(config.model.n_layers) for name, weight in layers[index % len(pattern)].items()
    }
    return {name: weight for name, weight in model.state_dict().items() if not name.startswith("blocks.")} | repeated


class ParameterCounts(NamedTuple):
    """Numbers of weights of the two twins; a shared embedding counts once."""

    nsa: int
    """Weights of the NSA model, with the dense layers of `model.layers` if there are any."""
    dense: int


def count_parameters(config: RunConfig) -> ParameterCounts:
    """Return the number of parameters of `config`'s decoder with NSA and with dense attention; no weights are allocated."""
    found = []
    for attention in ParameterCounts._fields:
        pattern = config.pattern(attention)
        with weightless():
            model = Decoder(pattern, sizes_of(config))
        layers, whole = (sum(weight.numel() for weight in module.parameters()) for module in (model.blocks, model))
        found.append(whole + (config.model.n_layers // len(pattern) - 1) * layers)
    return ParameterCounts(*found)


def introduced(config: RunConfig) -> str:
    """Return a line about the decoder of `config`: its attention, and the numbers of parameters of both twins."""
    counts, attentions = count_parameters(config), [layer.attention for layer in layers_of(config)]
    dense = attentions.count("dense")
    mixed = f", {dense} of {len(attentions)} layers dense" if config.model.attention == "nsa" and dense else ""
    return f"model: {config.model.attention} attention{mixed}; {counts.nsa:,} parameters with nsa, {counts.dense:,} with dense"
