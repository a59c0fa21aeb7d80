"""How much memory a run takes at its peak, about: weights, gradients, optimizer, activations, logits."""

from attrs import frozen

from nsa_train.model.decoder import mlp_width, vocab_size_of
from nsa_train.settings.config import Layer, RunConfig

GIB = 2**30
STATE_BYTES = 16
"""Per parameter: weight, gradient and Adam's two moments, float32."""
CAST_BYTES = 2
"""Per parameter: autocast's 16-bit copy."""
LOGIT_BYTES = 12
"""Per token and id: 16-bit logits, their float32 copy, its gradient, and room for the softmax."""
OVERHEAD_GIB = 0.8
"""Of a CUDA context, its libraries and the allocator's gaps; of Python and torch on a CPU."""
KEPT_SHARE = {"none": 1.0, "selective": 0.6, "full": 0.0}
"""Of a block's activations, by train.activation_checkpointing; "full" keeps its input alone."""
STATES, OF_ROWS, LIBRARIES = "weights, gradients and optimizer", ("activations", "logits"), "Python, torch and its libraries"
"""The names of the parts, for messages; two of them grow with the rows."""


@frozen(kw_only=True)
class MemoryEstimate:
    """The parts of the peak, in GiB, of one process."""

    states_gib: float
    activations_gib: float
    logits_gib: float

    @property
    def total_gib(self) -> float:
        """Return the sum, with the overhead."""
        return self.states_gib + self.activations_gib + self.logits_gib + OVERHEAD_GIB

    @property
    def largest(self) -> tuple[str, float]:
        """Return the name of the largest part, and its GiB."""
        sizes = (self.states_gib, self.activations_gib, self.logits_gib, OVERHEAD_GIB)
        return max(zip((STATES, *OF_ROWS, LIBRARIES), sizes, strict=True), key=lambda part: part[1])

    def __str__(self) -> str:
        return (
            f"{self.total_gib:,.1f} GiB ({STATES} {self.states_gib:,.1f}, "
            f"activations {self.activations_gib:,.1f}, logits {self.logits_gib:,.1f})"
        )


def estimate_memory(config: RunConfig, parameters: int, processes: int) -> MemoryEstimate:
    """Return the estimated peak of one of the `processes` of `config`, whose model has so many `parameters`."""
    train = config.train
    state = STATE_BYTES + (0 if train.precision == "fp32" else CAST_BYTES)
    shards = processes if train.strategy == "fsdp" else 1
    tokens = max(1, train.batch_size // processes) * train.seq_len
    logits = min(tokens, train.loss_chunk or tokens) * vocab_size_of(config) * LOGIT_BYTES
    return MemoryEstimate(
        states_gib=parameters * state / shards / GIB,
        activations_gib=tokens * _bytes_per_token(config) / GIB,
        logits_gib=logits / GIB,
    )


def _bytes_per_token(config: RunConfig) -> float:
    """Return what all layers keep of one token for the backward pass."""
    model, train, pattern = config.model, config.train, config.pattern()
    blocks = [_bytes_of_block(config, layer) for layer in pattern]
    kept = model.n_layers * (4 * model.dim + KEPT_SHARE[train.activation_checkpointing] * sum(blocks) / len(blocks))
    # what is recomputed exists for one block at a time
    return kept + (max(blocks) if train.activation_checkpointing != "none" else 0)


def _bytes_of_block(config: RunConfig, layer: Layer) -> int:
    model = config.model
    wide = 4 if config.train.precision == "fp32" else 2
    queries, outputs = model.n_heads * model.head_dim_qk, model.n_heads * model.head_dim_v
    keys_values = model.n_kv_heads * (model.head_dim_qk + model.head_dim_v)
    branches = len(layer.config.branches) if layer.attention == "nsa" else 1
    # sets of keys and values
    sets = 1 if config.nsa.kv == "shared" else branches
    # float32 inputs of the norms of q and k, and their casts
    norms = (4 + wide) * (queries + sets * model.n_kv_heads * model.head_dim_qk) if config.nsa.qk_norm else 0
    # two norms with their float32 inputs and casts, projections before and after RoPE, each branch's output, the MLP
    own = wide * (2 * queries + 2 * sets * keys_values + (branches + 1) * outputs + 4 * mlp_width(model.dim))
    return 2 * model.dim * (4 + 4 + wide) + own + norms
