"""Start a run from a command line: in this process, or in processes that torchrun starts. Only `start` imports torch."""

import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from attrs import frozen

from nsa_train.errors import INTERRUPTED, ConfigError, HaltedError, SignalledError, StoppedError, TerminatedError
from nsa_train.lifecycle.console import warn
from nsa_train.lifecycle.launch import Meeting, launch, must_launch, num_processes
from nsa_train.lifecycle.outcomes import has_lost_launcher, is_launched, is_worker
from nsa_train.settings.config import RunConfig
from nsa_train.settings.options import AUTO, NEWEST


@frozen
class GoingOn:
    """The commands that continue a run after a stop, without the program's name."""

    saved: list[str]
    begun: list[str]
    """The command for a run that may not have saved anything yet."""

    def command(self, words: list[str]) -> str:
        """Return `words` as a command for a shell."""
        program = "torchrun ... -m nsa_train" if is_worker() and not is_launched() else "nsa-train"
        return f"{program} {shlex.join(words)}"

    @contextmanager
    def spelled_out(self) -> Iterator[None]:
        """In the message of an error that stops the block on request, replace `--resume` by the whole command."""
        try:
            yield
        except (StoppedError, SignalledError) as error:
            # while our launcher runs, it names the command for all of its ranks
            if not is_launched() or has_lost_launcher():
                text = re.sub(" with --resume( auto)?$", "", str(error))
                error.args = (f"{text} with: {self.command(self.saved if isinstance(error, StoppedError) else self.begun)}",)
            raise


def start(config: RunConfig, out: Path, words: list[str], meeting: Meeting, resume: int | None, again: GoingOn) -> int:
    """Train `config` into `out`, in this process or in processes that are started with `words`, and return their common exit code.

    `resume`: a step, NEWEST, AUTO, or None for a new run.
    """
    from nsa_train.host.machine import target_machine
    from nsa_train.loop.run import check_start, settled_resume, train
    from nsa_train.preflight.judge import unequal_shares

    with again.spelled_out():
        if not must_launch(config, meeting):
            train(config, out, resume=resume)
            return 0
        if meeting.hosts == "1":
            # rank 0 prints its warnings
            check_start(config, out, resuming=settled_resume(out, resume) is not None, say=lambda line: None)
        elif problems := unequal_shares(config, meeting.world_sizes(config, target_machine(config))):
            # rank 0 checks the rest
            raise ConfigError.of(problems)
        resumed = [] if resume is None else ["--resume" + {NEWEST: "", AUTO: "=auto"}.get(resume, f"={resume}")]
        code = launch([*words, *meeting.words(), *resumed], num_processes=num_processes(config), meeting=meeting)
    if code in (HaltedError.exit_code, TerminatedError.exit_code, INTERRUPTED):
        warn(f"{'remove .HALT and ' if code == HaltedError.exit_code else ''}go on with: {again.command(again.begun)}")
    return code


def as_sets(overrides: Sequence[str]) -> list[str]:
    """Return `overrides` as words of a command line."""
    return [word for override in overrides for word in ("--set", override)]
