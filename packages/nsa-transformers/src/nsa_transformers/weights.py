"""Load weights only from safetensors files that hold exactly the model's tensors, and save weights with checksums."""

import dataclasses
import json
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, logging

from nsa_core import NativeSparseAttention
from nsa_core.decoder import weightless
from nsa_core.errors import ConfigError, InputError
from nsa_transformers.checksums import KEY, require_undamaged, seal_copy

ARCHITECTURES = ("NSAForCausalLM", "NSAModel")
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
SAVED = re.compile(r"(?P<name>model(\.[^.]+?)?)(?P<shard>-\d{5}-of-\d{5})?\.safetensors")
"""Matches the names of weight files that `save_pretrained` writes, but not those of an adapter."""
NAMED = 3
"""Maximum number of tensors that a message names."""
GENERATION = "generation_config.json"
WORKING_CACHES = (None, "dynamic", "static")
"""The values of `cache_implementation` that `generate` takes."""
MOST_JSON = 16 * 2**20
"""Maximum bytes of a JSON file of a checkpoint; a larger file is not read."""


class Stored:
    """Mixin of a `PreTrainedModel`: `from_pretrained` refuses weights that it cannot load completely, `save_pretrained` writes checksums."""

    config_class: Any
    base_model_prefix: str

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the model at a path or hub name; see `PreTrainedModel.from_pretrained`. Weights are read only from safetensors.

        Raises:
            ConfigError: for a generation_config.json that `generation_settings` refuses.
            InputError: for pickled weights; damaged files, or data that differ from the checksum in their file; another architecture; tensors
                that are missing, extra or of another shape; integers in a folder without quantization.
        """
        if kwargs.pop("use_safetensors", True) is False:
            raise InputError("use_safetensors=False asks for pickled weights (a pickle runs code when it is read); leave it out")
        wants_info = kwargs.pop("output_loading_info", False)
        folder = Path(str(pretrained_model_name_or_path))
        if folder.is_dir():
            inner = folder / kwargs.get("subfolder", "")
            require_safetensors(inner, variant=kwargs.get("variant"))
            require_floats(inner, variant=kwargs.get("variant"))
            require_config(inner, cls.config_class.model_type, is_needed=kwargs.get("config") is None)
            require_own_names(inner, f"{cls.base_model_prefix}.", variant=kwargs.get("variant"))
            cls._require_sizes(inner, kwargs)
            if cls.can_generate():  # type: ignore[attr-defined]
                generation_settings(inner)
            require_undamaged(weight_files(inner, variant=kwargs.get("variant")))
        parent: Any = super()
        try:
            model, info = parent.from_pretrained(
                pretrained_model_name_or_path,
                *args,
                use_safetensors=True,
                output_loading_info=True,
                **{**kwargs, "ignore_mismatched_sizes": True},
            )
        except SafetensorError as error:
            raise InputError(f"{folder} holds a damaged safetensors file ({error}); copy it again") from None
        except KeyError as error:
            if error.args != ("metadata",):
                raise
            raise InputError(f"the index of weights in {folder} has no metadata (Transformers reads them); add an empty table") from None
        require_architecture(model.config, cls.__name__)
        require_whole(info, str(folder))
        require_tied(model, str(folder))
        for layer in model.modules():
            if isinstance(layer, NativeSparseAttention):
                # Transformers creates parameters anew, all of them with gradients
                layer.freeze_choice()
        return (model, info) if wants_info else model

    @classmethod
    def _require_sizes(cls, folder: Path, keywords: Mapping[str, Any]) -> None:
        """Raise InputError if the weights in `folder` are smaller than the configuration says: Transformers would allocate what is missing."""
        config = keywords.get("config")
        if config is None and (folder / "config.json").is_file():
            own = {field.name for field in dataclasses.fields(cls.config_class)} - {
                field.name for field in dataclasses.fields(PreTrainedConfig)
            }
            config = cls.config_class.from_pretrained(folder, **{name: keywords[name] for name in own & {*keywords}})
        # shapes are not checked in an adapter's folder, which has no weights of the model, for quantized weights, which are packed into other
        # shapes, and with a key_mapping, which changes names
        is_here = bool(weight_files(folder, variant=keywords.get("variant")))
        if keywords.get("key_mapping") or not is_here:
            return
        if isinstance(config, cls.config_class) and not _is_quantized(folder / "config.json"):
            require_shapes(folder, config, cls.block, variant=keywords.get("variant"))  # type: ignore[attr-defined]

    def save_pretrained(self, save_directory: Any, is_main_process: bool = True, *args: Any, **kwargs: Any) -> None:
        """Write the model to a folder; see `PreTrainedModel.save_pretrained`. Every weight file except an adapter's gets a checksum.

        If shards are written beside an older single file, that file is removed, because it would be loaded instead of the shards.
        """
        before = modified(Path(save_directory))
        parent: Any = super()
        parent.save_pretrained(save_directory, is_main_process, *args, **kwargs)
        is_alone = not torch.distributed.is_available() or not torch.distributed.is_initialized()
        if is_main_process and (is_alone or torch.distributed.get_rank() == 0):
            complete_save(Path(save_directory), before)

    def _upload_modified_files(
        self, working_dir: Any, repo_id: str, files_timestamps: Mapping[str, float], *args: Any, **kwargs: Any
    ) -> Any:
        """Add checksums to the files that a save has written, then upload them: `push_to_hub=True` uploads before `save_pretrained` returns."""
        complete_save(Path(working_dir), files_timestamps)
        parent: Any = super()
        return parent._upload_modified_files(working_dir, repo_id, files_timestamps, *args, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """Do nothing: every saved configuration names its classes, in a module of three lines."""


@contextmanager
def quiet() -> Iterator[None]:
    """Let Transformers draw no progress bars and log no warnings: one about a file would come before its refusal here, which is one line."""
    level, *bars = logging.get_verbosity(), logging.is_progress_bar_enabled(), not are_progress_bars_disabled()
    logging.set_verbosity_error()
    _draw_bars(False, False)
    try:
        yield
    finally:
        logging.set_verbosity(level)
        _draw_bars(*bars)


def _draw_bars(ours: bool, of_the_hub: bool) -> None:
    """Switch the progress bars of Transformers, which switches those of huggingface_hub as well, and then the latter."""
    with warnings.catch_warnings():
        # huggingface_hub warns if an environment variable has decided
        warnings.simplefilter("ignore")
        (logging.enable_progress_bar if ours else logging.disable_progress_bar)()
        (enable_progress_bars if of_the_hub else disable_progress_bars)()


def modified(folder: Path) -> dict[str, float]:
    """Return file name -> time of its last change in `folder`; empty if the folder does not exist."""
    return {path.name: path.stat().st_mtime for path in folder.iterdir() if path.is_file()} if folder.is_dir() else {}


def complete_save(folder: Path, before: Mapping[str, float]) -> None:
    """Add checksums to the weight files in `folder` that changed since `before`; if they are shards, remove the older single file."""
    now = modified(folder)
    for name in sorted(name for name, time in now.items() if before.get(name) != time):
        if found := SAVED.fullmatch(name):
            with safe_open(folder / name, "pt") as opened:
                is_sealed = KEY in (opened.metadata() or {})
            if not is_sealed:
                seal_copy(folder / name)
            single = f"{found['name']}.safetensors"
            if found["shard"] and before.get(single) == now.get(single):
                (folder / single).unlink(missing_ok=True)


def require_architecture(config: Any, *others: str) -> None:
    """Raise InputError if `config.architectures` is not a list of names, or names neither a class of this package nor one of `others`."""
    named = getattr(config, "architectures", None) or []
    require_names(named, "config.json")
    if named and not set(named) & {*ARCHITECTURES, *others}:
        raise InputError(
            f"config.json has architectures={named} (this package has {', '.join(ARCHITECTURES)}); use a checkpoint of one of them"
        )


def require_names(architectures: Any, where: object) -> None:
    """Raise InputError unless `architectures` of the configuration at `where` are a list of names."""
    if not (isinstance(architectures, list) and all(isinstance(name, str) for name in architectures)):
        raise InputError(f"{where} has architectures={architectures!r:.120} (the rule: a list of names); use {list(ARCHITECTURES[:1])}")


def require_whole(info: Any, where: str) -> None:
    """Raise InputError if `info`, the loading info of Transformers, has missing, unexpected or mismatched tensors; `where`: their place."""
    parts = {"missing": "missing_keys", "not of this model": "unexpected_keys", "of another shape": "mismatched_keys"}
    problems = []
    for what, key in parts.items():
        names = sorted(name if isinstance(name, str) else _with_shapes(*name) for name in info.get(key) or ())
        if names:
            more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
            problems.append(f"{what}: {', '.join(names[:NAMED])}{more}")
    if problems:
        raise InputError(f"the weights at {where} are not those of config.json ({'; '.join(problems)}); use the files of one export")


def require_shapes(folder: Path, config: Any, block: Any, *, variant: str | None = None) -> None:
    """Raise InputError if the files in `folder` lack a layer of `config`, or hold a tensor of another shape. Only headers are read.

    `block` is the class of the layers; it is called with the sizes and a function that makes the attention.
    """
    found: dict[str, tuple[int, ...]] = {}
    for file in weight_files(folder, variant=variant):
        with safe_open(file, "pt") as opened:
            found |= {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    held = {name.split(".")[1] for name in found if name.startswith("blocks.")}
    if missing := [f"blocks.{layer_index}" for layer_index in range(config.num_hidden_layers) if str(layer_index) not in held]:
        require_whole({"missing_keys": missing}, str(folder))
    wanted: dict[str, tuple[int, ...]] = {
        "embedding.weight": (config.vocab_size, config.hidden_size),
        "lm_head.weight": (config.vocab_size, config.hidden_size),
        "norm.weight": (config.hidden_size,),
    }
    shapes: dict[int, dict[str, tuple[int, ...]]] = {}
    for layer_index, layer in enumerate(config.decoder_layers()):
        # layers that a pattern repeats are one object, and are built once
        if id(layer) not in shapes:
            with weightless():
                weights = block(config.sizes(), layer.build).state_dict()
            shapes[id(layer)] = {name: tuple(weight.shape) for name, weight in weights.items()}
        wanted |= {f"blocks.{layer_index}.{name}": shape for name, shape in shapes[id(layer)].items()}
    others = [(name, shape, wanted[name]) for name, shape in found.items() if shape != wanted.get(name, shape)]
    require_whole({"mismatched_keys": others}, str(folder))


def require_tied(model: Any, where: str) -> None:
    """Raise InputError if the configuration of `model` ties its output layer to the embedding, but the loaded weights differ."""
    head = getattr(model, "lm_head", None)
    if head is None or not model.config.tie_word_embeddings or head.weight is model.embedding.weight or head.weight.is_meta:
        return
    # wrapped parameters may be two tensors with equal values
    if torch.equal(head.weight, model.embedding.weight):
        return
    raise InputError(
        f"lm_head.weight differs from embedding.weight at {where} (tie_word_embeddings=true would lose it); "
        "set tie_word_embeddings to false in config.json"
    )


def _with_shapes(name: str, found: Any, expected: Any) -> str:
    return f"{name} {list(found)} in place of {list(expected)}"


def require_config(folder: Path, model_type: str, *, is_needed: bool = True) -> None:
    """Raise InputError unless `folder` has a config.json of `model_type`. An adapter's folder, and one where none `is_needed`, may lack it.

    Without a config.json, Transformers would use default sizes. It would also read the config.json of another model type.
    """
    path = folder / "config.json"
    if not path.is_file() and (not is_needed or (folder / "adapter_config.json").is_file()):
        return
    if not path.is_file():
        raise InputError(f"{folder} has no config.json (it is written last: the folder is not whole); write it again")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("it is no object")
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path} cannot be read ({error!r:.120}); copy it again") from None
    if (kind := content.get("model_type")) != model_type:
        raise InputError(f"{path} has model_type={kind!r} (the rule: {model_type!r}); use AutoModelForCausalLM for other models")
    if (named := content.get("architectures")) is not None:
        require_names(named, path)


def read_json(path: Path) -> dict[str, Any]:
    """Return the object that a JSON file holds.

    Raises:
        ConfigError: if the file cannot be read, or holds no object.
    """
    try:
        with path.open("rb") as file:
            found = json.loads(file.read(MOST_JSON))
        if not isinstance(found, dict):
            raise ValueError("it is no object")
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read ({error!r:.120}); use the files of one checkpoint") from None
    return found


def generation_settings(folder: Path) -> dict[str, Any]:
    """Return the content of the generation_config.json in `folder`; empty if there is none.

    Raises:
        ConfigError: if it cannot be read, holds no object, or has a `pad_token_id` that is no integer.
    """
    path = folder / GENERATION
    found = read_json(path) if path.is_file() else {}
    pad = found.get("pad_token_id")
    if pad is not None and type(pad) is not int:
        raise ConfigError(f"{path} has pad_token_id={pad!r:.80} (the rule: an integer, or null); use the id of its tokenizer")
    return found


def require_safetensors(folder: Path, *, variant: str | None = None) -> None:
    """Raise InputError unless `folder` has safetensors files with readable headers, and one file for each tensor: the one that an index names.

    An adapter's folder passes.
    """
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        return
    files = weight_files(folder, variant=variant)
    if not files:
        pickles = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
        found = f"{', '.join(pickles[:NAMED])} is a pickle, which runs code when it is read" if pickles else "it has no weights"
        raise InputError(f"{folder} has no {SAFE_WEIGHTS_NAME} ({found}); save it with safetensors")
    holders: dict[str, Path] = {}
    for file in files:
        try:
            # a named pipe would wait for a writer
            if file.exists() and not file.is_file():
                raise OSError("it is no regular file")
            with safe_open(file, "pt") as opened:
                names = list(opened.keys())
        except (SafetensorError, OSError) as error:
            raise InputError(f"{file} is no whole safetensors file ({error}); copy it again") from None
        if twice := [name for name in names if name in holders]:
            raise InputError(
                f"{file} and {holders[twice[0]].name} both hold {shown(twice[0])} (a tensor has one file); use the files of one save"
            )
        holders |= dict.fromkeys(names, file)
    single, index = _single_and_index(folder, variant)
    if files != [single]:
        _require_indexed(index, holders)


def require_own_names(folder: Path, prefix: str, *, variant: str | None = None) -> None:
    """Raise InputError if a tensor's name in `folder` begins with `prefix`. Transformers would remove it, and replace the model's own tensor."""
    for file in weight_files(folder, variant=variant):
        with safe_open(file, "pt") as opened:
            if prefixed := [name for name in opened.keys() if name.startswith(prefix)]:  # noqa: SIM118
                raise InputError(
                    f"{file} holds {shown(prefixed[0])} (names of this model have no {prefix!r} in front); use the files of one export"
                )


def require_floats(folder: Path, *, variant: str | None = None) -> None:
    """Raise InputError if a weight file in `folder` holds integers. Quantized weights are not checked here; their quantizer checks them."""
    if _is_quantized(folder / "config.json"):
        return
    for file in weight_files(folder, variant=variant):
        with safe_open(file, "pt") as opened:
            dtypes = {name: opened.get_slice(name).get_dtype() for name in opened.keys()}  # noqa: SIM118
        if wrong := sorted(name for name, dtype in dtypes.items() if "F" not in dtype):
            more = f" and {len(wrong) - NAMED} more" if len(wrong) > NAMED else ""
            named = ", ".join(f"{shown(name)} {dtypes[name]}" for name in wrong[:NAMED])
            raise InputError(f"{file} holds {named}{more} (weights are floating point); save the model in float32 or bfloat16")


def _is_quantized(config: Path) -> bool:
    try:
        return "quantization_config" in json.loads(config.read_text(encoding="utf-8"))
    except (OSError, RecursionError, ValueError, TypeError):
        # reading the configuration reports this error
        return False


def weight_files(folder: Path, *, variant: str | None = None) -> list[Path]:
    """Return the weight files in `folder`: a single file, or the files that its index names; empty if there are none.

    Raises:
        InputError: for an index that cannot be read, or that names a file outside the folder.
    """
    single, index = _single_and_index(folder, variant)
    if single.is_file():
        return [single]
    return [folder / name for name in sorted(set(_weight_map(index).values()))] if index.is_file() else []


def _single_and_index(folder: Path, variant: str | None) -> tuple[Path, Path]:
    """Return the paths that a single weight file and an index of shards would have."""
    mark = f".{variant}" if variant else ""
    names = SAFE_WEIGHTS_NAME.replace(".safetensors", f"{mark}.safetensors"), SAFE_WEIGHTS_INDEX_NAME.replace(".json", f"{mark}.json")
    return folder / names[0], folder / names[1]


def _weight_map(index: Path) -> dict[str, str]:
    """Return tensor -> file, the names in `index`."""
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
        files = dict[str, str](content["weight_map"].items())
        names = sorted(set(files.values()))
        wrong = [name for name in names if not isinstance(name, str) or not _is_file_name(name)]
    except (ValueError, KeyError, AttributeError, TypeError, OSError, RecursionError) as error:
        raise InputError(f"{index} is no index of weights ({error!r:.120}); copy it again") from None
    if wrong:
        raise InputError(
            f"{index} names files elsewhere ({wrong[:NAMED]}; the rule: safetensors files in the same folder); use the files of one export"
        )
    if not isinstance(content.get("metadata", {}), dict):
        raise InputError(f"{index} has metadata={content['metadata']!r:.120} (the rule: a table, which Transformers changes); use {{}}")
    return files


def _is_file_name(name: str) -> bool:
    """Return True for the name of a safetensors file in the index's folder. No name holds NUL or a lone surrogate, which UTF-8 cannot encode."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return Path(name).name == name and name.endswith(".safetensors") and "\0" not in name


def shown(name: str) -> str:
    """Return a tensor's name for a message; control characters are escaped."""
    return name if name.isprintable() else repr(name)


def _require_indexed(index: Path, holders: Mapping[str, Path]) -> None:
    """Raise InputError unless `index` names for each tensor of `holders` the file that holds it.

    It may name tensors that no file holds: some converters drop a tied output layer, but keep its name in the index.
    """
    named = _weight_map(index)
    for name, file in holders.items():
        if named.get(name) != file.name:
            said = f"names {named[name]} for {shown(name)}" if name in named else f"does not name {shown(name)}"
            raise InputError(f"{index} {said}, which {file.name} holds (an index names the file of each tensor); use the files of one save")
