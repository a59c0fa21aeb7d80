"""Run `nsa-train eval`, from its paths to its files."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from attrs import asdict
from rich.console import Console

from nsa_core.environment import describe_environment
from nsa_train.checkpoint.models import OpenedModel, open_model
from nsa_train.errors import ConfigError
from nsa_train.evaluation.options import EvalOptions
from nsa_train.evaluation.report import figure_object, figures_table, write_files
from nsa_train.evaluation.subject import Subject
from nsa_train.evaluation.tasks import check, evaluate
from nsa_train.host.environment import PACKAGES
from nsa_train.model.stream import torch_device

TABLE_WIDTH = 110


def run_evaluation(
    path: Path, twin: Path | None, options: EvalOptions, *, device: str, out: Path, say: Callable[[str], None]
) -> dict[str, Any]:
    """Evaluate the model at `path`, write the files below `out`, print the table, and return what `eval --json` prints.

    Raises:
        ConfigError: for options that do not fit the model; nothing is written then.
        TrainError: for files that are damaged, or data that cannot be read.
    """
    place = torch_device(device)
    subject = Subject(open_model(path, say=say), options, place)
    try:
        dense = None if twin is None else open_model(twin, say=say)
    except ConfigError as error:
        raise ConfigError(f"--twin={str(twin)!r}: {error}") from None
    tasks = check(subject, dense, say)
    figures = evaluate(subject, tasks, dense, say)
    content = {
        "model": _described(subject.opened),
        "twin": None if dense is None else _described(dense),
        "options": asdict(options)
        | {"texts": [*map(str, options.texts)], "device": device, "lengths": subject.lengths, "modes": subject.modes},
        "tasks": tasks,
        "environment": describe_environment(PACKAGES, Path(__file__).parent),
    }
    written = write_files(out, content, figures, say)
    screen = Console(width=TABLE_WIDTH)
    screen.print(figures_table(figures))
    for file in written:
        screen.print(str(file), markup=False, highlight=False, soft_wrap=True)
    return {**content, "files": [str(file) for file in written], "figures": [figure_object(figure) for figure in figures]}


def _described(opened: OpenedModel) -> dict[str, Any]:
    parameters = sum(weight.numel() for weight in opened.decoder.parameters())
    return {"path": str(opened.path), "step": opened.step, "parameters": parameters, "max_position": opened.max_position}
