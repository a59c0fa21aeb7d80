"""Run the trials of a plan as processes, several at a time; a finished trial is not run again. Imports no torch at the top."""

import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from attrs import evolve, frozen

from nsa_bench.ablate.plan import Trial
from nsa_bench.errors import OptionError
from nsa_bench.launching import environment_of_run, stopped_by_signals
from nsa_train.checkpoint.layout import step_folders
from nsa_train.errors import INTERRUPTED, TerminatedError, TrainError
from nsa_train.files import written_whole
from nsa_train.run_dir import RunDirectory
from nsa_train.settings.recipe import to_toml

JUDGED = "held_out.json"
"""The last file that a trial writes, in the run's directory: its model on the held-out rows."""
POLL_S = 0.2
SAVED = (TerminatedError.exit_code, INTERRUPTED)
"""Exit codes of a run that was stopped and can continue from where it stopped."""


@frozen(eq=False)
class TrialFolder:
    """The files of a trial below the directory of its ablation."""

    root: Path
    trial: Trial

    @property
    def recipe(self) -> Path:
        """The resolved recipe."""
        return self.root / "recipes" / f"{self.trial.name}.toml"

    @property
    def run(self) -> RunDirectory:
        """The run's directory."""
        return RunDirectory(self.root / "runs" / self.trial.name)

    @property
    def log(self) -> Path:
        """The output of the run."""
        return self.root / "logs" / f"{self.trial.name}.log"

    @property
    def judged(self) -> Path:
        """The file with the trained model's results on its held-out rows; it exists once the trial is finished."""
        return self.run.root / JUDGED


def prepare(trials: Sequence[Trial], root: Path) -> list[TrialFolder]:
    """Write the recipe of each of `trials` below `root` and return their folders.

    Raises:
        OptionError: if a run below `root` was begun with another recipe.
    """
    folders = [TrialFolder(root, trial) for trial in trials]
    others = [
        f"--out={str(root)!r} holds the run {folder.trial.name!r} of another recipe (a trial goes on as it began); name another directory"
        + ("" if folder.judged.is_file() else f", or delete {folder.run.root} to begin it again")
        for folder in folders
        if is_of_another_recipe(folder)
    ]
    if others:
        raise OptionError.of(others)
    for name in ("recipes", "runs", "logs"):
        (root / name).mkdir(parents=True, exist_ok=True)
    for folder in folders:
        with written_whole(folder.recipe) as aside:
            aside.write_text(to_toml(folder.trial.config), encoding="utf-8")
    return folders


def check_trials(trials: Iterable[Trial], root: Path) -> None:
    """Check every rule of the unfinished trials below `root`, as `nsa-train preflight` does.

    Seeds of a variant whose recipes differ in `train.seed` alone are checked once.

    Raises:
        OptionError: with a line for each rule that a trial breaks.
    """
    unfinished: dict[tuple[Any, str], TrialFolder] = {}
    for folder in (TrialFolder(root, trial) for trial in trials):
        if not folder.judged.is_file():
            config = folder.trial.config
            unfinished[folder.trial.variant, to_toml(evolve(config, train=evolve(config.train, seed=0)))] = folder
    problems: list[str] = []
    opened: list[tuple[Any, ...]] = []
    for (variant, _), folder in unfinished.items():
        config = folder.trial.config
        # a corpus is opened once for all variants that read it alike
        reading = config.data, config.train.seq_len, config.train.batch_size, config.train.eval_batches
        problems += [f"{variant}: {line}" for line in _failed(folder, opens_data=reading not in opened)]
        opened.append(reading)
    if problems:
        # seeds that begin with other weights may break the same rule
        raise OptionError.of(list(dict.fromkeys(problems)))


def _failed(folder: TrialFolder, *, opens_data: bool) -> list[str]:
    """Return the rules that a trial breaks, a line each."""
    from nsa_train.preflight.judge import run_preflight

    resuming = folder.run.holds_run()
    try:
        return run_preflight(folder.trial.config, folder.run.root, resuming=resuming, opens_data=opens_data).failed
    except TrainError as error:
        return str(error).splitlines()


def is_of_another_recipe(folder: TrialFolder) -> bool:
    """Return True if the run of the trial was begun with another recipe than the trial's, whatever its spelling."""
    if not (folder.recipe.is_file() and folder.run.root.exists()):
        return False
    planned = tomllib.loads(to_toml(folder.trial.config))
    try:
        written = tomllib.loads(folder.recipe.read_text(encoding="utf-8"))
        # a stage begins with the run beside its own, also after the directory of both has moved
        start, begun = (Path(recipe.get("train", {}).get("init_from", "")) for recipe in (planned, written))
    except (ValueError, AttributeError, TypeError):
        return True
    if start.parent == folder.run.root.absolute().parent and begun.name == start.name:
        written["train"]["init_from"] = planned["train"]["init_from"]
    return written != planned


def run_trials(
    folders: list[TrialFolder],
    *,
    side_by_side: int,
    minutes: float | None,
    say: Callable[[str], None],
    after_each: Callable[[], object],
    gpus: Sequence[str] = (),
    need_previous: bool = False,
) -> bool:
    """Run the unfinished trials, at most `side_by_side` at a time; return whether all ended by themselves.

    `after_each` is called when a trial has ended. With several `gpus`, as CUDA_VISIBLE_DEVICES names them, a trial runs on the one that has
    the fewest trials. After `minutes`, at Ctrl-C, SIGTERM and SIGHUP, and if this process is killed, the runs save and end; the next call
    continues them. A trial that fails stops no other trial, but with `need_previous` no later trial starts; its log says why.
    """
    waiting = [folder for folder in folders if not folder.judged.is_file()]
    running: dict[TrialFolder, subprocess.Popen[bytes]] = {}
    log_starts: dict[TrialFolder, int] = {}
    gpu_of: dict[TrialFolder, str | None] = {}
    if len(folders) > len(waiting):
        say(f"{len(folders) - len(waiting)} of {len(folders)} trials are finished already")
    deadline = None if minutes is None else time.monotonic() + 60 * minutes
    try:
        with stopped_by_signals():
            while waiting or running:
                while waiting and len(running) < side_by_side:
                    folder = waiting.pop(0)
                    taken = [gpu_of[other] for other in running]
                    # None: the trial sees all GPUs of this process
                    gpu = gpu_of[folder] = min(gpus, key=taken.count) if len(gpus) > 1 else None
                    say(f"started {folder.trial.name}" + (f" on GPU {gpu}" if gpu else ""))
                    log_starts[folder] = folder.log.stat().st_size if folder.log.is_file() else 0
                    running[folder] = _started(folder, gpu)
                for folder in [folder for folder, process in running.items() if process.poll() is not None]:
                    code = running.pop(folder).returncode
                    say(_ended(folder, code, log_starts[folder]))
                    after_each()
                    if need_previous and code != 0:
                        waiting.clear()
                if deadline is not None and time.monotonic() > deadline and (waiting or running):
                    say(f"{minutes:g} minutes are over: {len(waiting) + len(running)} trials are left for the next call")
                    return False
                time.sleep(POLL_S)
    except KeyboardInterrupt:
        say(f"stopped: {len(waiting) + len(running)} trials are left for the next call")
        return False
    finally:
        # ask every run to save and end; a second signal ends this process at once
        for process in running.values():
            with suppress(ProcessLookupError):
                process.terminate()
        for folder, process in running.items():
            say(_ended(folder, process.wait(), log_starts[folder]))
    return True


def command_of(folder: TrialFolder) -> list[str]:
    """Return the command line of a trial's process."""
    return [sys.executable, "-m", "nsa_bench.ablate.trial", str(folder.recipe), str(folder.run.root)]


def visible_gpus() -> list[str]:
    """Return the GPUs that this process sees, as CUDA_VISIBLE_DEVICES names them."""
    import torch

    count = torch.cuda.device_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES")  # noqa: TID251 - only CUDA's own variable says which GPUs there are
    # CUDA ignores names from the first invalid one on
    return [str(index) for index in range(count)] if named is None else [name.strip() for name in named.split(",")][:count]


def _started(folder: TrialFolder, gpu: str | None) -> "subprocess.Popen[bytes]":
    environment = environment_of_run() if gpu is None else environment_of_run(CUDA_VISIBLE_DEVICES=gpu)
    with folder.log.open("ab") as log:
        # a separate session, so that only this process receives Ctrl-C and passes it on once
        return subprocess.Popen(
            command_of(folder), stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True, env=environment
        )


def _ended(folder: TrialFolder, code: int, log_start: int = 0) -> str:
    """Return a line about a trial that ended with exit `code`; its log before byte `log_start` is that of earlier calls."""
    if code == 0:
        return f"finished {folder.trial.name}"
    if code in (-signal.SIGTERM, *SAVED):
        if not (steps := step_folders(folder.run.checkpoints)):
            return f"stopped {folder.trial.name} before it had anything to save"
        # SIGTERM itself ends a trial that loads modules, or that evaluates its trained model
        return f"saved {folder.trial.name}" if code in SAVED else f"stopped {folder.trial.name}; it goes on from step {max(steps)}"
    log = folder.log.read_bytes()[log_start:].decode("utf-8", errors="replace")
    lines = [line for line in log.splitlines() if line.strip()]
    # another process may write to the log too
    said = [line for line in lines if line.startswith("nsa-train: ")] or lines or ["it said nothing"]
    return f"FAILED {folder.trial.name} (exit code {code}; {folder.log}): {said[-1]}"
