"""Find and open checkpoints; every byte is verified before any is used."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from attrs import evolve, field, frozen

from nsa_train.checkpoint.layout import CONFIG, LATEST, STATE, folder_of_step, latest_folder, locate_folder, locate_root, step_folders
from nsa_train.checkpoint.manifest import OTHERS, verify_files
from nsa_train.checkpoint.schema import state_problems
from nsa_train.errors import CheckpointError
from nsa_train.files import parse_json
from nsa_train.settings.config import RunConfig, structure
from nsa_train.settings.recipe import parse_toml
from nsa_train.settings.structuring import listed_problems


@frozen(kw_only=True)
class Checkpoint:
    """A checkpoint whose files were verified."""

    path: Path
    step: int
    config: RunConfig
    state: dict[str, Any] = field(factory=dict)
    """The content of state.json: world_size, schedule, scaler, data, routes, counters."""
    refused: tuple[str, ...] = ()
    """The checkpoints that were skipped to find this one, such as damaged ones, one line each."""


Judge = Callable[[Checkpoint], None]
"""Function that raises a CheckpointError for a checkpoint that the caller cannot use."""


def open_checkpoint(path: Path) -> Checkpoint:
    """Return the verified checkpoint at `path`: a step-N directory, a `latest` link, or a run's directory.

    If a run's `latest`, or the checkpoint that it names, is missing, the newest complete checkpoint is used, as for a resume; `refused` then says so.

    Raises:
        ConfigError: if there is none.
        CheckpointError: if it is damaged; the message names file, expected and found.
    """
    root = locate_root(path)
    if step_folders(root) and not (root / LATEST).is_dir() and (found := latest_valid(root)):
        return evolve(found, refused=(f"{root / LATEST} names no checkpoint; {found.path.name} is taken", *found.refused))
    return _opened(locate_folder(path))


def _opened(folder: Path) -> Checkpoint:
    manifest, contents = verify_files(folder)
    try:
        config = structure(parse_toml(contents[CONFIG]))
        config.pattern()
    # ValueError: it breaks a rule of the recipe, is not TOML, or is not UTF-8
    except ValueError as error:
        problems = listed_problems(str(error).splitlines())
        raise CheckpointError(f"{folder / CONFIG} is not a recipe that this version reads ({problems}); {OTHERS}") from None
    try:
        state = parse_json(contents[STATE])
    except ValueError as error:
        raise CheckpointError(f"{folder / STATE} is not JSON ({error}); {OTHERS}") from None
    if wrong := state_problems(state, config):
        raise CheckpointError(f"{folder / STATE} is damaged: {listed_problems(wrong)}; {OTHERS}")
    return Checkpoint(path=folder, step=manifest["step"], config=config, state=state)


def latest_valid(root: Path, *, judge: Judge = lambda checkpoint: None) -> Checkpoint | None:
    """Return the checkpoint to resume from: the one that `root`/latest names, or if that is damaged the newest complete one before it.

    Checkpoints of steps after `latest`, from a branch of the run that a resume abandoned, are tried last. If `judge` raises a
    CheckpointError for a checkpoint, it counts as damaged. The result is None if `root` holds no checkpoint at all.

    Raises:
        CheckpointError: if there are checkpoints and all are damaged.
    """
    refused: list[str] = []
    for folder in _newest_first(root):
        try:
            judge(found := _opened(folder.resolve()))
            return evolve(found, refused=tuple(refused))
        except CheckpointError as error:
            refused.append(str(error))
    if not refused:
        return None
    raise CheckpointError(f"none of the {len(refused)} checkpoints in {root} is complete; start a new run. The newest:\n{refused[0]}")


def valid_at(root: Path, step: int, *, judge: Judge = lambda checkpoint: None) -> Checkpoint:
    """Return the checkpoint of `root` that was saved after step `step`; `judge` as in `latest_valid`.

    Raises:
        ConfigError: if there is none; the message names those that exist.
        CheckpointError: if it is damaged.
    """
    judge(found := _opened(folder_of_step(root, step).resolve()))
    return found


def _newest_first(root: Path) -> list[Path]:
    """Return the order in which a resume tries checkpoints: `latest`, earlier ones from the newest on, later ones from the newest on."""
    folders = step_folders(root)
    latest = latest_folder(root)
    head = next((step for step, path in folders.items() if path == latest), None)
    if head is None and latest is not None:
        # its target is gone, but later checkpoints still belong to another branch
        head = int(latest.name.removeprefix("step-"))
    order = sorted(folders, key=lambda step: (head is None or step <= head, step), reverse=True)
    return [folders[step] for step in order]
