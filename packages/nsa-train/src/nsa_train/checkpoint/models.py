"""Open a trained model with its tokenizer, from a run, a checkpoint or a folder of Hugging Face Transformers, and compare it with its twin."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from attrs import evolve
from torch import Tensor

from nsa_core.decoder import Decoder, weightless
from nsa_core.errors import NSAError
from nsa_core.module import NativeSparseAttention
from nsa_train.checkpoint.folders import MODEL_TYPE, require_installed
from nsa_train.checkpoint.layout import HF_CONFIG, is_folder
from nsa_train.checkpoint.resuming import load_model
from nsa_train.checkpoint.store import open_checkpoint
from nsa_train.data.tokenizer import Ids, Tokenizer, build_tokenizer
from nsa_train.errors import ConfigError
from nsa_train.host.routing import AUTO, with_backend
from nsa_train.model.decoder import build_model
from nsa_train.settings.config import RunConfig

ADVICE = "name a run, or a folder that an export wrote"


class OpenedModel(NamedTuple):
    """A model for inspection; it is not trained further."""

    decoder: Decoder
    """In evaluation mode, float32, on the CPU. Call `hidden` and `logits`: `forward` differs between runs and folders."""
    tokenizer: Tokenizer
    max_position: int
    """Tokens of the longest text that the model is meant for."""
    path: Path
    """The checkpoint or folder that was read."""
    step: int | None
    """Number of training steps that made the weights; None if the folder does not say."""
    config: RunConfig | None
    """The recipe of the run; None for a folder of Hugging Face Transformers, which has none."""
    fingerprint: Mapping[str, Any] = {}
    """The settings and content of the run's data, as the checkpoint holds them; empty if it holds none."""


def open_model(path: Path, *, say: Callable[[str], None] = lambda line: None, with_weights: bool = True) -> OpenedModel:
    """Return the model at `path`: a run, a checkpoint, or a folder with config.json of `ckpt export --format hf` or `convert`.

    Operations use this machine's choice of backends, not the run's. `say` gets a line about each checkpoint that was skipped.
    Without `with_weights` the decoder is on the meta device, for its layers and shapes: weights are neither read nor drawn.

    Raises:
        ConfigError: if there is none, or the folder is refused: it is damaged, its weights do not fit its config.json, the model has no row for
            the id that ends a text, or nsa-transformers is not installed.
        CheckpointError: if a checkpoint of a run is damaged, or its weights do not fit its config.toml.
    """
    if is_folder(path):
        return _open_folder(path, with_weights=with_weights)
    checkpoint = open_checkpoint(path)
    for line in checkpoint.refused:
        say(line)
    config = with_backend(checkpoint.config, AUTO)
    # first, because without its file the number of rows is not known
    tokenizer = build_tokenizer(config.data)
    return OpenedModel(
        decoder=load_model(evolve(checkpoint, config=config)) if with_weights else _without_weights(lambda: build_model(config)),
        tokenizer=tokenizer,
        max_position=config.model.max_position or config.train.seq_len,
        path=checkpoint.path,
        step=checkpoint.step,
        config=config,
        fingerprint=checkpoint.state.get("data", {}).get("fingerprint", {}),
    )


def _without_weights(build: Callable[[], Decoder]) -> Decoder:
    with weightless():
        return build().eval()


def _open_folder(folder: Path, *, with_weights: bool) -> OpenedModel:
    require_installed(f"the model at {str(folder)!r}")
    _require_kind(folder)
    from huggingface_hub.errors import StrictDataclassError

    from nsa_transformers import NSAForCausalLM, NSAModelConfig
    from nsa_transformers.tokenizer import tokenizer_of
    from nsa_transformers.weights import generation_settings, quiet

    try:
        # Transformers would ignore a damaged file, and fail on a list without its name
        generation_settings(folder)
        with quiet():
            model: Any = (
                NSAForCausalLM.from_pretrained(folder, dtype=torch.float32)
                if with_weights
                else _without_weights(lambda: NSAForCausalLM(NSAModelConfig.from_pretrained(folder)))
            )
            tokenizer = tokenizer_of(folder)
    # Transformers raises ValueError, TypeError and its own errors for foreign files, and ImportError for quantized weights
    except (NSAError, StrictDataclassError, ImportError, OSError, ValueError, TypeError, AttributeError) as error:
        said = " ".join(str(error).split())
        raise ConfigError(f"{str(folder)!r} cannot be loaded ({said[:300]}); {ADVICE}") from None
    return OpenedModel(model.eval(), FolderTokenizer(tokenizer, model.config), model.config.max_position_embeddings, folder, None, None)


def _require_kind(folder: Path) -> None:
    """Raise ConfigError if the config.json of `folder` has another model_type than nsa-transformers. Loading reports one that cannot be read."""
    from nsa_transformers.conversion.sources import ARCHITECTURES
    from nsa_transformers.weights import read_json

    try:
        kind = read_json(folder / HF_CONFIG).get("model_type")
    except NSAError:
        return
    if kind == MODEL_TYPE:
        return
    said, advice = f"its model_type {kind!r:.80} is not {MODEL_TYPE!r}", ADVICE
    if kind in tuple(ARCHITECTURES):
        said = f"its model_type {kind!r} is that of a dense model"
        command = f"nsa-train convert {shlex.quote(str(folder))} --out NEW"
        advice = f"convert it with {command}, and with --layers '[\"dense\"]' to keep it dense"
    raise ConfigError(f"{str(folder)!r} cannot be loaded ({said}); {advice}")


def require_twin(twin: OpenedModel, model: OpenedModel, *, num_tokens: int, reads_alike: bool) -> None:
    """Check that `twin` is dense, has the shape of `model`, and supports `num_tokens` tokens; `reads_alike` says if its tokenizer is the same.

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


class FolderTokenizer:
    """The tokenizer.json in a model's folder, with the interface of `Tokenizer`."""

    def __init__(self, tokenizer: Any, config: Any) -> None:
        """Wrap the result of `AutoTokenizer`; the ids of the model's configuration take precedence.

        Raises:
            ConfigError: if the model has no row for the id that ends a text.
        """
        ends = config.eos_token_id
        self._tokenizer, self.vocab_size = tokenizer, int(config.vocab_size)
        self.separator = int((next(iter(ends), 0) if isinstance(ends, list | tuple) else ends) or 0)
        if not 0 <= self.separator < self.vocab_size:
            raise ConfigError(
                f"config.json of {tokenizer.name_or_path!r} has eos_token_id={self.separator} (the model has ids 0 .. {self.vocab_size - 1}); "
                "use the id of its tokenizer"
            )
        pad = config.pad_token_id
        # in some dense models the id of the pad is -1
        self.pad = pad if pad is not None and 0 <= pad < self.vocab_size else self.separator

    def encode(self, text: bytes) -> Tensor:
        """Return int32 `(num_tokens,)` ids of UTF-8 `text`, without separator.

        Raises:
            ConfigError: if the model has no row for one of them.
        """
        return torch.tensor(self._ids(text), dtype=torch.int32)

    def encode_batch(self, texts: Sequence[bytes]) -> list[Ids]:
        """Return the ids of each of `texts`, followed by the separator."""
        return [np.array([*self._ids(text), self.separator], np.int32) for text in texts]

    def decode(self, ids: Tensor) -> str:
        """Return the text of `ids` `(num_tokens,)`; separator and pad are left out."""
        return str(self._tokenizer.decode([index for index in ids.tolist() if index not in (self.separator, self.pad)]))

    def _ids(self, text: bytes) -> list[int]:
        # not verbose: callers compare the length with the model's positions
        ids = list(self._tokenizer(text.decode("utf-8", errors="replace"), add_special_tokens=False, verbose=False).input_ids)
        if (largest := max(ids, default=0)) >= self.vocab_size:
            raise ConfigError(
                f"the tokenizer in {self._tokenizer.name_or_path!r} gives the id {largest} (the model has ids 0 .. {self.vocab_size - 1}); "
                "use the tokenizer of this model"
            )
        return ids
