"""Check that a dense model is the twin of another model: their layers are compared one by one, and their heads group by group."""

from typing import Any

from nsa_core.module import NativeSparseAttention
from nsa_train.checkpoint.models import OpenedModel
from nsa_train.errors import ConfigError


def require_twin(twin: OpenedModel, model: OpenedModel, *, num_tokens: int, reads_alike: bool) -> None:
    """Check that `twin` is dense, has the shape of `model`, takes `num_tokens` tokens and, by `reads_alike`, has the same tokenizer.

    The shape is the width, the numbers of layers, heads and KV heads, the head dimensions and the vocabulary. The MLP may have another width.

    Raises:
        ConfigError: with every reason, in one line.
    """
    theirs, ours = _shape(twin), _shape(model)
    problems = [f"it has {name} {theirs[name]:,}, the model {ours[name]:,}" for name in ours if theirs[name] != ours[name]]
    if sparse := len(twin.decoder.sparse_layers):
        problems.append(f"it has {sparse} NSA layers")
    if twin.max_position < num_tokens:
        problems.append(f"it is meant for {twin.max_position:,} tokens, the longest text has {num_tokens:,}")
    if not problems and not reads_alike:
        problems.append("it has another tokenizer, whose ids mean other text")
    if problems:
        raise ConfigError(
            f"--twin={str(twin.path)!r} is no dense twin of the model ({'; '.join(problems)}); "
            "name the model of the same recipe with model.attention='dense', or leave --twin out"
        )


def _shape(model: OpenedModel) -> dict[str, int]:
    blocks: Any = model.decoder.blocks
    vocab_size, width = model.decoder.embedding.weight.shape
    # no pattern of layers changes their heads
    layer = blocks[0].attention
    if isinstance(layer, NativeSparseAttention):
        config = layer.config
        heads = config.num_heads, config.num_kv_heads, config.head_dim_qk, config.head_dim_v
    else:
        heads = layer.heads, layer.kv_heads, layer.dim_qk, layer.dim_v
    names = ("width", "layers", "vocabulary", "heads", "KV heads", "head_dim_qk", "head_dim_v")
    return dict(zip(names, (width, len(blocks), vocab_size, *heads), strict=True))
