"""`nsa-train eval`: the table of tasks, the checks of their options, and an evaluation, from its paths to its files."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from attrs import asdict, frozen
from rich.console import Console

from nsa_core.environment import describe_environment
from nsa_train.checkpoint.models import OpenedModel, open_model, require_twin
from nsa_train.data.packing import Batch
from nsa_train.data.tokenizer import reads_alike
from nsa_train.errors import ConfigError, DataError
from nsa_train.evaluation.blocks import RECALL_MODES, block_recall
from nsa_train.evaluation.options import MOST_LENGTH, EvalOptions, Figure, Mode, TaskName
from nsa_train.evaluation.positions import loss_by_position
from nsa_train.evaluation.recall import copy, least_copy, least_mqar, least_passkey, mqar, passkey
from nsa_train.evaluation.report import figure_object, tables, write_files
from nsa_train.evaluation.subject import Subject
from nsa_train.host.environment import PACKAGES
from nsa_train.model.stream import torch_device
from nsa_train.settings.config import listed

TABLE_WIDTH = 110
Figures = Iterator[Figure]


@frozen(kw_only=True)
class Task:
    """One task."""

    figures: Callable[[Subject, OpenedModel | None], Figures]
    """Yields the figures of a model, and of its dense twin if there is one."""
    problems: Callable[[Subject], list[str]]
    """Returns why a model cannot do the task with its options; empty if it can."""
    reads_documents: bool = False
    """True if the task reads held-out documents; False if it draws its sequences."""


def position_figures(subject: Subject) -> Figures:
    """Yield loss and right answers of held-out rows by the position of a token in its document, by mode."""
    longest = subject.opened.max_position
    for mode in subject.modes:
        with subject.in_mode(mode, "loss-by-position"):
            buckets = loss_by_position(subject.batch_logits, subject.held_out, longest=longest, device=subject.device)
        for one in buckets:
            for measure, value in (("loss", one.loss), ("right", one.right)):
                yield Figure(TaskName.LOSS_BY_POSITION, mode, measure, value, one.targets, first=one.first, last=one.last)


def layer_figures(subject: Subject) -> Figures:
    """Yield the loss of the model, and by mode that of the model with all layers, and with each layer alone, in that mode."""
    batches = [*_first(subject.held_out, subject.options.samples)]
    for mode in (Mode.TRAINED, *(mode for mode in subject.modes if mode is not Mode.TRAINED)):
        for layer in (None,) if mode is Mode.TRAINED else (None, *subject.choosing_layers):
            with subject.in_mode(mode, "loss-by-layer", layer=layer):
                buckets = loss_by_position(subject.batch_logits, batches, longest=subject.opened.max_position, device=subject.device)
            targets = sum(one.targets for one in buckets)
            loss = sum(one.loss * one.targets for one in buckets) / targets
            yield Figure(TaskName.LOSS_BY_LAYER, mode, "loss", loss, targets, layer=layer)


def _first(batches: Iterable[Batch], count: int) -> Iterator[Batch]:
    """Yield the first batches that together have `count` sequences; all, if they have fewer."""
    for batch in batches:
        if count > 0:
            yield batch
        count -= len(batch.cu_seqlens) - 1


def _without_text(subject: Subject) -> list[str]:
    if subject.options.texts or subject.opened.config is not None:
        return []
    return [f"needs a text ({str(subject.opened.path)!r} is no run with held-out rows); use --text FILE"]


def _without_choice(subject: Subject) -> list[str]:
    if subject.choosing_layers:
        return _without_text(subject)
    return [
        *_without_text(subject),
        "needs a layer that chooses blocks (all layers of the model are dense, or have no selected branch); name a model with one",
    ]


def _without_recall(subject: Subject) -> list[str]:
    found = _without_choice(subject)
    if not found and not {*subject.modes} & {*RECALL_MODES}:
        found.append(f"has figures of --mode {listed(RECALL_MODES)} only (other modes ignore the choice); use --mode trained")
    return found


def _without_mode(subject: Subject) -> list[str]:
    found = _without_choice(subject)
    if not found and {*subject.modes} == {Mode.TRAINED}:
        found.append("compares other modes with --mode trained; use --mode dense as well")
    return found


def _too_short(least: Callable[[Subject], int]) -> Callable[[Subject], list[str]]:
    """Return a function that reports the shortest requested length (by default the model's positions) if it is below `least` of the model."""

    def problems(subject: Subject) -> list[str]:
        if not subject.options.lengths and subject.opened.max_position > MOST_LENGTH:
            return [
                f"needs --lengths (the model has {subject.opened.max_position:,} positions, at most {MOST_LENGTH:,}); use --lengths 1024"
            ]
        shortest, needed = min(subject.options.lengths, default=subject.opened.max_position), least(subject)
        if shortest >= needed:
            return []
        if not subject.options.lengths:
            return [f"needs sequences of at least {needed} tokens (the model has {shortest} positions); leave it out"]
        return [f"needs sequences of at least {needed} tokens (--lengths has {shortest}); use --lengths {needed}"]

    return problems


def _broken_mqar(subject: Subject) -> list[str]:
    symbols, tokens, pairs = subject.alphabet
    if symbols**tokens >= pairs:
        return _too_short(least_mqar)(subject)
    return [f"has no different key for each of {pairs} pairs ({symbols} symbols to the power of {tokens}); use --pairs {symbols**tokens}"]


TASKS: dict[TaskName, Task] = {
    TaskName.LOSS_BY_POSITION: Task(figures=lambda subject, twin: position_figures(subject), problems=_without_text, reads_documents=True),
    TaskName.LOSS_BY_LAYER: Task(figures=lambda subject, twin: layer_figures(subject), problems=_without_mode, reads_documents=True),
    TaskName.PASSKEY: Task(figures=lambda subject, twin: passkey(subject), problems=_too_short(least_passkey)),
    TaskName.MQAR: Task(figures=lambda subject, twin: mqar(subject), problems=_broken_mqar),
    TaskName.COPY: Task(figures=lambda subject, twin: copy(subject), problems=_too_short(least_copy)),
    TaskName.BLOCK_RECALL: Task(figures=block_recall, problems=_without_recall, reads_documents=True),
}
"""Every task by its name, in the order in which they run."""


def check(subject: Subject, twin: OpenedModel | None, say: Callable[[str], None]) -> tuple[TaskName, ...]:
    """Return the tasks to run: the requested ones, or all that the model can do; `say` gets a line for each task that is left out.

    Raises:
        ConfigError: with a line for each option that does not fit the model or its tasks.
        DataError: if the run's data cannot be read.
    """
    if problems := [*_broken_model(subject)]:
        raise ConfigError.of(problems)
    against = {name: task.problems(subject) for name, task in TASKS.items()}
    chosen = subject.options.tasks or tuple(name for name, reasons in against.items() if not reasons)
    # if the model can do no task, every reason is a problem
    if problems := [f"--tasks {name} {reason}" for name in chosen or against for reason in against[name]]:
        raise ConfigError.of(problems)
    for name, reason in ((name, reason) for name, reasons in against.items() for reason in reasons if not subject.options.tasks):
        say(f"{name} is left out: it {reason}")
    if problems := [*_ignored(subject, twin, chosen)]:
        raise ConfigError.of(problems)
    if twin is not None:
        alike = (subject.trained_on_pairs and not subject.options.texts) or reads_alike(subject.opened.tokenizer, twin.tokenizer)
        require_twin(twin, subject.opened, num_tokens=max(map(len, subject.documents)), reads_alike=alike)
    if any(TASKS[name].reads_documents for name in chosen):
        # unreadable data is refused before anything is computed
        _ = subject.held_out
    return chosen


def _ignored(subject: Subject, twin: OpenedModel | None, tasks: Sequence[TaskName]) -> Iterator[str]:
    if subject.options.texts and not any(TASKS[name].reads_documents for name in tasks):
        yield f"--text would be ignored (no task of {listed(tasks)} reads a text); use --tasks loss-by-position, or leave it out"
    if twin is not None and TaskName.BLOCK_RECALL not in tasks:
        yield f"--twin would be ignored (no task of {listed(tasks)} reads it); use --tasks block-recall, or leave it out"


def _broken_model(subject: Subject) -> Iterator[str]:
    options, most = subject.options, subject.opened.max_position
    if not subject.choosing_layers:
        yield from (
            f"--mode={mode.value!r} changes nothing (the model has no selected branch); use --mode trained"
            for mode in options.modes
            if mode is not Mode.TRAINED
        )
    yield from (
        f"--lengths has {length:,}, more than the model's {most:,} positions (it was trained on no longer ones); use --lengths {most}"
        for length in options.lengths
        if length > most
    )
    num_ids = len(subject.plain_ids)
    if options.symbols is not None and 3 * options.symbols > num_ids:
        yield f"--symbols={options.symbols} needs {3 * options.symbols:,} ids (there are {num_ids:,}); use --symbols {num_ids // 3}"


@torch.inference_mode()
def evaluate(subject: Subject, tasks: Sequence[TaskName], twin: OpenedModel | None, say: Callable[[str], None]) -> list[Figure]:
    """Return the figures of `tasks`, which `check` returned; `say` gets a line for each task that begins. Equal seeds give equal figures.

    Raises:
        TrainError: if a text or the run's data cannot be read.
    """
    found: list[Figure] = []
    for name in tasks:
        say(f"eval: {name}")
        found += TASKS[name].figures(subject, twin)
    return found


def run_evaluation(
    path: Path, twin: Path | None, options: EvalOptions, *, device: str, out: Path, say: Callable[[str], None]
) -> dict[str, Any]:
    """Evaluate the model at `path`, write the files below `out`, print the tables, and return what `eval --json` prints.

    Raises:
        ConfigError: for options that do not fit the model; nothing is written then.
        TrainError: for files that are damaged, or data that cannot be read.
    """
    where = torch_device(device)
    subject = Subject(open_model(path, say=say), options, where)
    try:
        dense = None if twin is None else open_model(twin, say=say)
    except (ConfigError, DataError) as error:
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
    for table in tables(figures):
        screen.print(table)
    for file in written:
        screen.print(str(file), markup=False, highlight=False, soft_wrap=True)
    return {**content, "files": [str(file) for file in written], "figures": [figure_object(figure) for figure in figures]}


def _described(opened: OpenedModel) -> dict[str, Any]:
    parameters = sum(weight.numel() for weight in opened.decoder.parameters())
    return {"path": str(opened.path), "step": opened.step, "parameters": parameters, "max_position": opened.max_position}
