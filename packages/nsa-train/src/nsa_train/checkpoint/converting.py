"""`nsa-train convert`: convert a dense checkpoint of Transformers to a folder from which a run can begin. Needs nsa-train[hf]."""

import json
import shlex
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from nsa_core.errors import InputError
from nsa_core.serialization import toml_value
from nsa_train.checkpoint.folders import model_tables, require_installed
from nsa_train.checkpoint.publish import whole
from nsa_train.data.tokenizer import SEPARATOR, ByteTokenizer, open_bpe, reads_alike
from nsa_train.errors import CheckpointError, ConfigError, DataError
from nsa_train.settings.config import RunConfig, structure
from nsa_train.settings.recipe import parse_value, settled, to_toml

RECIPE = "recipe.toml"
TOKENIZER = "tokenizer.json"
SPARE_BYTES = 64 * 2**20
"""Maximum bytes of the folder's other files: tokenizer, headers and index."""
TRAINING = {"steps": 1000, "batch_size": 8, "lr": 2e-5, "warmup_steps": 50, "save_every": 500, "precision": "bf16"}
"""Initial keys of `train` in the recipe; users are expected to change them."""
LONGEST_ROW = 4096


def convert(
    source: Path,
    out: Path,
    *,
    kv: str = "shared",
    gates: str = "open",
    nsa: Sequence[str] = (),
    layers: str | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> list[str]:
    """Write the dense checkpoint in `source` to `out` as a model of NSA, and return lines about it.

    `nsa`: a list of `key=value`. `layers`: the pattern, as for `--set model.layers`. Values are TOML or JSON. `say` gets lines of progress, and
    of keys that are given twice.

    Raises:
        ConfigError: if `out` exists, nsa-transformers is not installed, or the checkpoint or an option is refused.
        CheckpointError: if files are damaged, or tensors are missing, extra or of another shape; nothing that loads is left behind.
    """
    if out.exists() or out.is_symlink():
        raise ConfigError(f"--out={str(out)!r} exists already (a conversion never overwrites); use another name")
    require_installed("convert")
    from nsa_transformers.conversion import ConversionOptions, plan_conversion, write_converted

    pattern: Any = None if layers is None else _parsed("--layers", layers)
    options = ConversionOptions(kv=kv, gates=gates, nsa=dict(map(_pair, settled(nsa, say=say, option="--nsa"))), layers=pattern)  # type: ignore[arg-type]
    try:
        conversion = plan_conversion(source, options)
        recipe = _recipe_of(conversion.config, source, out)
        _require_room(out, conversion.nbytes)

        with whole(out) as aside:
            written = write_converted(conversion, aside, say)
            (aside / RECIPE).write_text(to_toml(recipe), encoding="utf-8")
    except InputError as error:
        raise CheckpointError(str(error)) from None
    return _summary(written, recipe, out)


def _recipe_of(config: Any, source: Path, out: Path) -> RunConfig:
    """Return a recipe with the model of an `NSAModelConfig`, for text in the tokenizer of `source`, which is copied to `out`."""
    data = {"source": "text", **_tokenizer_keys(source, config)}
    if "tokenizer_path" in data:
        data["tokenizer_path"] = str((out / TOKENIZER).absolute())
    train = {**TRAINING, "seq_len": min(config.max_position_embeddings, LONGEST_ROW)}
    return structure({**model_tables(config), "data": data, "train": train})


def _tokenizer_keys(folder: Path, config: Any) -> dict[str, str]:
    """Return the keys of `data` for text in the tokenizer.json of `folder`; empty if a run cannot read it, or the model lacks rows for its ids."""
    path = (folder / TOKENIZER).absolute()
    if not path.is_file():
        return {}
    try:
        found = open_bpe(str(path))
    except DataError:
        return {}
    if found.vocab_size > int(config.vocab_size):
        return {}
    if found.separator == SEPARATOR and reads_alike(found, ByteTokenizer()):
        return {"tokenizer": "byte"}
    return {"tokenizer": "gpt2", "tokenizer_path": str(path)}


def _pair(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--nsa {text!r} is not of the form key=value; use --nsa window_size=512")
    return key.strip(), _parsed("--nsa", value.strip())


def _parsed(option: str, text: str) -> Any:
    """Return the value that `text` spells in JSON or in TOML, or `text` itself."""
    with suppress(ValueError, RecursionError):
        return json.loads(text)
    try:
        return parse_value(text)
    except ValueError as error:
        raise ConfigError(f"{option}={text!r:.80} holds {error}; use fewer brackets and digits") from None


def _require_room(out: Path, needed: int) -> None:
    folder = next(parent for parent in out.absolute().parents if parent.is_dir())
    free = shutil.disk_usage(folder).free
    if free < needed + SPARE_BYTES:
        raise ConfigError(
            f"--out={str(out)!r} needs {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free there; name a folder on another disk"
        )


def _summary(written: Any, recipe: RunConfig, out: Path) -> list[str]:
    """Return what is printed about a conversion: sizes, differences, and the command that trains the model."""
    from nsa_transformers.conversion.verifying import TOLERANCE

    conversion, found = written
    config, options = conversion.config, conversion.options
    kinds = [layer.attention for layer in config.decoder_layers()]
    loss = (
        f"{found.converted_loss:.4f} in place of {found.source_loss:.4f}, a difference of {found.converted_loss - found.source_loss:+.4f}"
    )
    lines = [
        f"{out}: {conversion.num_parameters:,} parameters in {len(kinds)} layers, {kinds.count('nsa')} of them sparse; "
        f"kv {options.kv}, gates {options.gates}",
        f"layers: the largest difference is {found.layers:.1e} of the largest output (at most {TOLERANCE:.0e})",
        f"logits at S = {found.num_tokens}: the largest difference is {found.logits:.1e} of the largest logit",
    ]
    if found.num_tokens > 1:
        lines.append(f"loss at S = {found.num_tokens}, random ids: {loss}")
    if not _tokenizer_keys(out, config):
        lines.append(
            "tokenizer: nsa-train reads none here (a byte-level tokenizer.json with <|endoftext|>); set data.tokenizer in recipe.toml"
        )
    # TOML would read a name such as 2024 or true as a number or boolean
    named = str(out) if parse_value(str(out)) == str(out) else toml_value(str(out))
    command = ["nsa-train", "run", str(out / RECIPE), "--set", f"train.init_from={named}", "--set", "data.path=FILE"]
    return [*lines, f"train it: {shlex.join(command)}"]
