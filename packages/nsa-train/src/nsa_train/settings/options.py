"""Rules of command-line options that are not keys of a recipe. Imports no torch."""

import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from itertools import count
from pathlib import Path

from nsa_train.errors import ConfigError
from nsa_train.files import MOST_JSON, broken_link, nearest_existing, read_regular
from nsa_train.settings.rules import LEAST_SECONDS, MOST_SECONDS, MOST_SEED, is_number, is_utf_8

MOST_SAMPLED = 100_000
"""Maximum tokens of one sample: each takes a step of the model, and the cache has room for all."""
COLDEST, HOTTEST = 1e-3, 1e3
"""Bounds of temperatures other than 0. Below them the draw would be the most likely token, above them uniform."""
NEWEST, AUTO = -1, -2
"""Values of the step to resume from. NEWEST: the newest complete checkpoint. AUTO: the same if there is a run, else a new run."""
STANDARD_INPUT = "-"
LONGEST_BELOW = 128
"""Bytes of the longest path below a run's directory, rounded up."""


def resume_step(text: str) -> int:
    """Return the step that the value of `--resume` names; NEWEST if it is empty, AUTO for `auto`.

    Raises:
        ConfigError: if it is anything else.
    """
    if text in ("", "auto"):
        return AUTO if text else NEWEST
    if not re.fullmatch("[0-9]{1,18}", text):
        raise ConfigError(
            f"--resume={_shortened(text)} is neither a step nor 'auto'; use --resume for the newest complete checkpoint, --resume 4000 for that of "
            "a step, or --resume auto to start where there is no run yet"
        )
    return int(text)


def read_prompts(source: Path) -> list[str]:
    """Return the prompts of a file, or of standard input if `source` is "-": one per line, without blank lines.

    Raises:
        ConfigError: if it cannot be read, or holds none.
    """
    try:
        content = sys.stdin.buffer.read(MOST_JSON + 1) if str(source) == STANDARD_INPUT else read_regular(source, MOST_JSON)
        if len(content) > MOST_JSON:
            raise ValueError(f"it has more than {MOST_JSON:,} bytes")
        # only a line feed ends a line; a form feed or U+2028 is text
        lines = [line.removesuffix("\r") for line in content.decode("utf-8").split("\n")]
    except (OSError, ValueError) as error:
        raise ConfigError(f"--prompts={str(source)!r} cannot be read ({error}); name a UTF-8 file with a prompt a line, or -") from None
    found = [line for line in lines if line.strip()]
    if not found:
        raise ConfigError(f"--prompts={str(source)!r} holds no prompt (one a line); write one, or use --prompt 'def '")
    return found


def check_path(option: str, path: str | Path) -> None:
    """Check that a file system can hold `path` and the files of a run below it.

    Raises:
        ConfigError: naming `option`.
    """
    text = str(path)
    most, longest = os.pathconf("/", "PC_NAME_MAX"), os.pathconf("/", "PC_PATH_MAX") - LONGEST_BELOW
    size, name_size = _size(text), max(map(_size, Path(text).parts), default=0)
    if name_size > most:
        raise ConfigError(f"{option}={_shortened(text)} has a name of {name_size:,} bytes (at most {most}); use a shorter one")
    if size > longest:
        raise ConfigError(f"{option}={_shortened(text)} has {size:,} bytes (at most {longest:,}); use a shorter path")


def check_openable(inputs: Mapping[str, Path | None]) -> None:
    """Check that safetensors can open files below the paths of `inputs` (argument -> path; None: left out).

    Raises:
        ConfigError: a line for each path that is not UTF-8.
    """
    if wrong := {name: path for name, path in inputs.items() if path is not None and not is_utf_8(str(path))}:
        raise ConfigError.of(
            [f"{name}={str(path)!r} is not UTF-8 (safetensors opens no such path); rename it" for name, path in wrong.items()]
        )


def check_writable(option: str, path: Path, file: str = "") -> None:
    """Check that `path`, or `file` below it, can be written; neither need exist.

    Raises:
        ConfigError: naming `option` and the existing folder that refuses it.
    """
    if link := broken_link(path):
        raise ConfigError(
            f"{option}={str(path)!r}: {str(link)!r} is a link to {str(link.readlink())!r}, which is not there; make that, or name another"
        )
    nearest = nearest_existing(path if file else path.absolute().parent)
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        reason = "cannot be written to" if nearest.is_dir() else "is no directory"
        written = f" ({file} is written there)" if file else ""
        raise ConfigError(f"{option}={str(path)!r}: {str(nearest)!r} {reason}{written}; use another directory")


def _size(text: str) -> int:
    return len(text.encode(errors="surrogatepass"))


def check_text(words: Iterable[str]) -> None:
    """Check the words of a command line.

    Raises:
        ConfigError: if one holds a NUL character.
    """
    for word in words:
        if "\0" in word:
            raise ConfigError(f"{_shortened(word)} holds a NUL character (no file name and no option does); leave it out")


def _shortened(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:40]}...{text[-17:]}")


def check_seconds(option: str, seconds: float, *, example: float) -> None:
    """Check that a time is a valid wait.

    Raises:
        ConfigError: naming `option`.
    """
    if not is_number(seconds, at_least=LEAST_SECONDS, at_most=MOST_SECONDS):
        raise ConfigError(f"{option}={seconds} is not a number of seconds from {LEAST_SECONDS:g} to {MOST_SECONDS:,}; use {example:g}")


def check_sampling(
    prompt: str | None,
    *,
    tokens: int,
    temperature: float,
    seed: int,
    top_p: float = 1.0,
    stops: Iterable[str] = (),
    file: Path | None = None,
) -> None:
    """Check the options of `nsa-train sample`: a `prompt`, or a `file` of prompts.

    Raises:
        ConfigError: with a line for each option that breaks its rule.
    """
    problems = []
    if (prompt is None) == (file is None):
        problems.append(
            "--prompt and --prompts came together or not at all (one of them has the beginning of the text); use --prompt 'def '"
        )
    prompt = "x" if prompt is None else prompt
    if not prompt:
        problems.append("--prompt='' is empty (the model needs a first token); use --prompt 'def '")
    if not is_utf_8(prompt):
        problems.append(f"--prompt={prompt!r} is not UTF-8 (the tokenizer reads that); use --prompt 'def '")
    if not 1 <= tokens <= MOST_SAMPLED:
        problems.append(f"--tokens={tokens} is not an integer from 1 to {MOST_SAMPLED:,}; use 200")
    if not (temperature == 0 or is_number(temperature, at_least=COLDEST, at_most=HOTTEST)):
        problems.append(f"--temperature={temperature} is neither 0 nor a number from {COLDEST:g} to {HOTTEST:g}; use 0.8")
    if not 0 < top_p <= 1:
        problems.append(f"--top-p={top_p} is not a number above 0, up to 1; use 0.95")
    problems += [
        f"--stop={stop!r} is empty or not UTF-8 (it would end every text, or none); leave it out"
        for stop in stops
        if not (stop and is_utf_8(stop))
    ]
    if not 0 <= seed <= MOST_SEED:
        problems.append(f"--seed={seed} is not an integer from 0 to {MOST_SEED:,}; use 0")
    if problems:
        raise ConfigError.of(problems)


def check_source(source: Path) -> None:
    """Check that `source` is a folder with a config.json, before torch is loaded.

    Raises:
        ConfigError: if it is none.
    """
    if not source.is_dir():
        raise ConfigError(f"SOURCE={str(source)!r} is no folder (nothing is downloaded); name one that holds config.json and safetensors")
    if not (source / "config.json").is_file():
        raise ConfigError(
            f"SOURCE={str(source)!r} has no config.json (it describes the model); name a folder that holds it and safetensors"
        )


def check_there(inputs: Mapping[str, Path | None]) -> None:
    """Check that the paths of `inputs` (argument -> path; None: left out) exist, before torch is loaded.

    Raises:
        ConfigError: a line for each that does not.
    """
    if problems := list(_missing(inputs)):
        raise ConfigError.of(problems)


def _missing(inputs: Mapping[str, Path | None]) -> Iterator[str]:
    for name, path in inputs.items():
        if path is not None and not path.exists():
            yield f"{name}={str(path)!r} does not exist; name a {'text file' if name == '--text' else 'run, a checkpoint or an exported folder'}"


def _is_page(path: Path) -> bool:
    """Return True if the name is that of a page of `explore`; a model's folder has no other page than a run's report."""
    return path.suffix == ".html" and path.name != "report.html"


def _own_folder(path: Path) -> Path:
    """Return the folder that a model's `path` belongs to: the run of a checkpoint or of `checkpoints`, else the path itself."""
    return next((folder.parent for folder in (path, path.parent) if folder.name == "checkpoints"), path)


def _unfit_output(option: str, path: Path, taken: Mapping[Path, str]) -> Iterator[str]:
    """Yield why `path` cannot be an output, if it cannot; `taken`: resolved paths of inputs and other outputs -> argument."""
    resolved = path.resolve()
    holders = [name for folder, name in taken.items() if _own_folder(folder) in resolved.parents]
    if other := taken.get(resolved):
        yield f"{option}={str(path)!r} is the path of {other} (it would be lost); name another file"
    elif path.is_dir():
        yield f"{option}={str(path)!r} is a directory (a file is written there); use {str(path / 'explorer.html')!r}"
    elif path.exists() and not path.is_file():
        yield f"{option}={str(path)!r} is no regular file (it would be replaced); name another file"
    elif path.exists() and not _is_page(path) and holders:
        yield f"{option}={str(path)!r} is a file of {holders[0]} (it would be lost); name another file"
    elif not path.parent.is_dir():
        yield f"{option}={str(path)!r} is in no existing directory ({str(path.parent)!r} does not exist); make it, or name another"


def default_folder(model: Path, now: datetime) -> Path:
    """Return a directory for an evaluation of `model`: evals/NAME-TIME, numbered if it exists. NAME begins with the run of a checkpoint."""
    path = model.absolute()
    own = _own_folder(path)
    name = path.name if own == path else f"{own.name}-{path.name}"
    first = Path("evals") / f"{name}-{now:%Y%m%d-%H%M%S}"
    others = (first.with_name(f"{first.name}-{number}") for number in count(2))
    return first if not first.exists() else next(folder for folder in others if not folder.exists())


def check_explored(inputs: Mapping[str, Path | None], outputs: Mapping[str, Path | None], *, tokens: int | None) -> None:
    """Check the options of `nsa-train explore`.

    No output may overwrite an input, a file below one or of its run, another output, a device or a pipe.

    Args:
        inputs: argument to the path that is read; None: left out.
        outputs: option to the file that is written; None: left out.
        tokens: most tokens of the text; None: all.

    Raises:
        ConfigError: a line for each that breaks its rule.
    """
    problems = list(_missing(inputs))
    if tokens is not None and tokens < 1:
        problems.append(f"--tokens={tokens} is not an integer from 1 up; use 256, or leave it out for the whole text")
    taken = {path.resolve(): name for name, path in inputs.items() if path is not None}
    for option, path in outputs.items():
        if path is None:
            continue
        check_path(option, path)
        problems.extend(_unfit_output(option, path, taken))
        taken[path.resolve()] = option
    if problems:
        raise ConfigError.of(problems)
    for option, path in outputs.items():
        if path is not None:
            check_writable(option, path)
