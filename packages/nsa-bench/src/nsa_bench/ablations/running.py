"""The trials of a plan as processes, some side by side; what is finished is not run again. Imports no torch."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from attrs import frozen

from nsa_bench.ablations.plan import Plan, Trial
from nsa_bench.ablations.trial import JUDGED
from nsa_bench.errors import OptionError
from nsa_train.errors import INTERRUPTED, TerminatedError
from nsa_train.files import written_whole
from nsa_train.run_dir import RunDirectory
from nsa_train.settings.recipe import to_toml

POLL_S = 0.2
SAVED = (TerminatedError.exit_code, INTERRUPTED)
"""Exit codes of a run that was stopped, and goes on where it was."""


@frozen(eq=False)
class Place:
    """Where a trial lies below the directory of its ablation."""

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
        """The judgement of the trained model on its held-out rows; there once the trial is finished."""
        return self.run.root / JUDGED


def prepare(plan: Plan, root: Path) -> list[Place]:
    """Write the recipe of every trial below `root` and return their places.

    Raises:
        OptionError: when a run below `root` was begun with another recipe.
    """
    places = [Place(root, trial) for trial in plan.trials]
    others = [
        f"--out={str(root)!r} holds the run {place.trial.name!r} of another recipe (a trial goes on as it began); name another directory"
        for place in places
        if place.recipe.is_file() and place.run.root.exists() and place.recipe.read_text(encoding="utf-8") != to_toml(place.trial.config)
    ]
    if others:
        raise OptionError.of(others)
    for folder in ("recipes", "runs", "logs"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    for place in places:
        with written_whole(place.recipe) as aside:
            aside.write_text(to_toml(place.trial.config), encoding="utf-8")
    return places


class _Stop(Exception):  # noqa: N818 - a request, not an error
    """SIGTERM came."""


@contextmanager
def _stopped_by_signals() -> Iterator[None]:
    def stop(number: int, frame: Any) -> None:
        raise _Stop

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def run_trials(places: list[Place], *, side_by_side: int, minutes: float | None, say: Callable[[str], None]) -> bool:
    """Run what is not finished, at most `side_by_side` at a time; return whether all were started and ended by themselves.

    After `minutes`, at Ctrl-C and at SIGTERM the runs save and end; the next call goes on with them. A trial that fails
    stops no other: its log says why.
    """
    waiting = [place for place in places if not place.judged.is_file()]
    running: dict[Place, subprocess.Popen[bytes]] = {}
    if len(places) > len(waiting):
        say(f"{len(places) - len(waiting)} of {len(places)} trials are finished already")
    deadline = None if minutes is None else time.monotonic() + 60 * minutes
    try:
        with _stopped_by_signals():
            while waiting or running:
                while waiting and len(running) < side_by_side:
                    place = waiting.pop(0)
                    say(f"started {place.trial.name}")
                    running[place] = _started(place)
                for place in [place for place, process in running.items() if process.poll() is not None]:
                    say(_ended(place, running.pop(place).returncode))
                if deadline is not None and time.monotonic() > deadline and (waiting or running):
                    say(f"{minutes:g} minutes are over: {len(waiting) + len(running)} trials are left for the next call")
                    return False
                time.sleep(POLL_S)
    except (KeyboardInterrupt, _Stop):
        say(f"stopped: {len(waiting) + len(running)} trials are left for the next call")
        return False
    finally:
        _end(running, say)
    return True


def command_of(place: Place) -> list[str]:
    """Return the command line of a trial's process."""
    return [sys.executable, "-m", "nsa_bench.ablations.trial", str(place.recipe), str(place.run.root)]


def _started(place: Place) -> "subprocess.Popen[bytes]":
    with place.log.open("ab") as log:
        # a session of its own: Ctrl-C comes here alone, and is passed on once
        return subprocess.Popen(command_of(place), stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True)


def _ended(place: Place, code: int) -> str:
    if code == 0:
        return f"finished {place.trial.name}"
    if code in SAVED:
        return f"saved {place.trial.name}"
    if code == -signal.SIGTERM:
        return f"stopped {place.trial.name} before it had anything to save"
    lines = [line for line in place.log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return f"FAILED {place.trial.name} (exit code {code}; {place.log}): {lines[-1] if lines else 'it said nothing'}"


def _end(running: "dict[Place, subprocess.Popen[bytes]]", say: Callable[[str], None]) -> None:
    """Let every run save and end; a second signal meanwhile ends this process and leaves them to it."""
    for process in running.values():
        with suppress(ProcessLookupError):
            process.terminate()
    for place, process in running.items():
        say(_ended(place, process.wait()))
