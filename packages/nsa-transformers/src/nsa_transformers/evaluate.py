"""Evaluate an export with lm-eval on a file of tasks, without a network: `python -m nsa_transformers.evaluate DIR --tasks FILE`.

FILE is YAML or JSON: a task of lm-eval or a list of tasks, with lm-eval's own keys. The additional key `data` holds the documents of a task: a
list, or a table of lists by split. Without `data`, lm-eval loads the documents, for example by `dataset_path: json` with local files.
"""

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoModelForCausalLM

from nsa_core.errors import ConfigError, NSAError
from nsa_transformers.tokenizer import asks_for_code, tokenizer_of
from nsa_transformers.weights import generation_settings

SPLIT = "test"
"""Name of the split if the `data` of a task is a list."""
MOST_REPEATS = 1000
"""Maximum of a task's `repeats`: lm-eval holds that many requests for each document."""


def evaluate(folder: Path, tasks: Path, *, device: str = "cpu", batch_size: int = 8, limit: int | None = None) -> dict[str, Any]:
    """Return lm-eval's results for the model in `folder` on the tasks of a file; `limit`: maximum number of documents of each task.

    Raises:
        ConfigError: if lm-eval is not installed or refuses a task, an option is invalid, the file holds no tasks, or `folder` holds no model.
    """
    configs = read_tasks(tasks)
    _require_options(device, batch_size, limit)
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"DIR={str(folder)!r} has no config.json (an export has one); name the folder that `ckpt export --format hf` wrote"
        )
    try:
        from jinja2 import TemplateError
        from lm_eval import simple_evaluate
        from lm_eval.api.task import ConfigurableTask
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise ConfigError(f"an evaluation needs lm-eval, which is not installed ({error}); use pip install lm-eval") from None
    model, tokenizer = _opened(folder)
    wrapped = HFLM(pretrained=model.to(device), tokenizer=tokenizer, batch_size=batch_size)
    try:
        built = [ConfigurableTask(config=config) for config in configs]
        # without an index of lm-eval's own tasks, which takes seconds
        manager = TaskManager(include_defaults=False)
        return dict(simple_evaluate(model=wrapped, tasks=built, task_manager=manager, limit=limit, log_samples=False))
    except NSAError:
        raise
    except (
        ArithmeticError,
        AssertionError,
        AttributeError,
        LookupError,
        SyntaxError,
        TemplateError,
        TypeError,
        ValueError,
        re.error,
    ) as error:
        raise ConfigError(f"--tasks={str(tasks)!r}: lm-eval refuses them ({_line(error)}); see lm-eval's keys") from error


def _opened(folder: Path) -> tuple[Any, Any]:
    """Return the model and the tokenizer in `folder`.

    Raises:
        ConfigError: if the model or its generation_config.json cannot be loaded, tensors are missing, or the tokenizer has ids beyond the
            vocabulary.
    """
    try:
        generation_settings(folder)
        # a folder of another family may hold code and pickles
        model, info = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False, use_safetensors=True, output_loading_info=True)
        tokenizer = tokenizer_of(folder)
    except (StrictDataclassError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError) as error:
        said = "its config.json names code of that folder, which is never run" if asks_for_code(error) else _line(error)
        raise ConfigError(f"DIR={str(folder)!r} cannot be loaded ({said}); name an export") from None
    # Transformers fills other families' missing tensors with random numbers
    if missing := sorted(info["missing_keys"]):
        raise ConfigError(f"DIR={str(folder)!r} lacks {len(missing)} tensors, such as {missing[0]}; copy it again")
    size = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > size:
        raise ConfigError(
            f"DIR={str(folder)!r} has a tokenizer of {len(tokenizer)} ids and a vocabulary of {size} (each id needs a row); copy it again"
        )
    return model, tokenizer


def _require_options(device: str, batch_size: int, limit: int | None) -> None:
    for name, count in (("--batch-size", batch_size), ("--limit", limit)):
        if count is not None and count < 1:
            raise ConfigError(f"{name}={count} is below 1; use 8, or leave it out")
    try:
        torch.empty(0, device=device)
    # torch without CUDA raises AssertionError
    except (AssertionError, RuntimeError) as error:
        raise ConfigError(f"--device={device!r} is not to be had here ({_line(error)}); use cpu") from None


def _line(error: Exception) -> str:
    return (" ".join(str(error).split()) or type(error).__name__)[:300]


def read_tasks(path: Path) -> list[dict[str, Any]]:
    """Return the configurations of the tasks in a YAML or JSON file, as lm-eval expects them. No code in the file is run.

    Raises:
        ConfigError: if the file cannot be read or holds no tasks, or a task has no name, the name of another one, or too many `repeats`.
    """
    import yaml

    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"--tasks={str(path)!r} cannot be read ({_line(error)}); name a YAML or JSON file of tasks") from None
    entries = found if isinstance(found, list) else [found]
    if not entries or not all(isinstance(entry, Mapping) and isinstance(entry.get("task"), str) for entry in entries):
        raise ConfigError(
            f"--tasks={str(path)!r} holds no tasks (the rule: a table with `task`, its name, or a list of them); see lm-eval's keys"
        )
    names = [entry["task"] for entry in entries]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"--tasks={str(path)!r} has two tasks named {twice[0]!r} (results have one entry for each name); rename one")
    for entry in entries:
        repeats = entry.get("repeats", 1)
        if type(repeats) is not int or not 1 <= repeats <= MOST_REPEATS:
            raise ConfigError(
                f"task {entry['task']!r} has repeats={repeats!r} (an integer from 1 to {MOST_REPEATS}: lm-eval holds that many requests for each "
                "document); leave it out, or use 8"
            )
    return [_with_data(dict(entry)) for entry in entries]


def _with_data(task: dict[str, Any]) -> dict[str, Any]:
    data = task.pop("data", None)
    if data is None:
        return task
    splits = data if isinstance(data, Mapping) else {SPLIT: data}
    if not splits or not all(isinstance(rows, list) and rows and all(isinstance(row, Mapping) for row in rows) for rows in splits.values()):
        raise ConfigError(
            f"task {task['task']!r} has data that are no documents (the rule: a list of tables, or such lists by split); fill it"
        )

    def documents(**_: Any) -> Any:
        from datasets import Dataset, DatasetDict

        return DatasetDict({str(split): Dataset.from_list([dict(row) for row in rows]) for split, rows in splits.items()})

    # dataset_path is required, but not opened
    return {"dataset_path": "json", "test_split": SPLIT if SPLIT in splits else next(iter(splits)), **task, "custom_dataset": documents}


def main(arguments: Sequence[str]) -> int:
    """Print a table of the results, and write them to `--json`; return the exit code: 0, or 2 after an error."""
    parser = argparse.ArgumentParser(prog="python -m nsa_transformers.evaluate", description="Evaluate an export with lm-eval, offline.")
    parser.add_argument("folder", metavar="DIR", type=Path, help="the folder that `nsa-train ckpt export --format hf` wrote")
    parser.add_argument(
        "--tasks", metavar="FILE", type=Path, required=True, help="YAML or JSON: tasks of lm-eval, with their documents in `data`"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--limit", type=int, help="documents of each task, at most")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the results here")
    given = parser.parse_args(arguments)
    try:
        if given.json is not None and not given.json.absolute().parent.is_dir():
            raise ConfigError(
                f"--json={str(given.json)!r} is in no existing directory ({str(given.json.parent)!r} does not exist); make it first"
            )
        if given.json is not None and given.json.is_dir():
            raise ConfigError(
                f"--json={str(given.json)!r} is a directory (a file is written there); use {str(given.json / 'results.json')!r}"
            )
        results = evaluate(given.folder, given.tasks, device=given.device, batch_size=given.batch_size, limit=given.limit)
    except (NSAError, OSError) as error:
        sys.stderr.write(f"nsa_transformers.evaluate: {error}\n")
        return 2
    from lm_eval.utils import make_table

    sys.stdout.write(f"{make_table(results)}\n")
    if given.json is not None:
        given.json.write_text(json.dumps(results["results"], indent=1, default=str) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
