"""Start torchrun from `nsa-train run` if a recipe needs several processes, and return their common exit code.

Torchrun's agent runs in this process. Signals go to the workers, which save and end by themselves. The workers report their ends
through a directory, because torchrun knows only success and failure. Imports no torch until then.
"""

import os
import re
import signal
import tempfile
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

from attrs import frozen
from cyclopts import Parameter

from nsa_train.errors import INTERRUPTED, ConfigError, SignalledError, TerminatedError, TrainError
from nsa_train.host.environment import ENVIRONMENT, is_under_torchrun
from nsa_train.lifecycle.console import warn
from nsa_train.lifecycle.outcomes import FOLDER, LAUNCHER, SIGNALLED, STOP, handled, joint_code, worker_pids
from nsa_train.lifecycle.stopping import SIGNALS, TERMINATING
from nsa_train.settings.config import RunConfig

if TYPE_CHECKING:
    from nsa_train.host.machine import Machine

CODES: dict[int, int] = {**dict.fromkeys(TERMINATING, TerminatedError.exit_code), signal.SIGINT: INTERRUPTED}
"""Signal that ends a run -> its exit code."""
PATIENCE_S = 2
"""Seconds from a second Ctrl-C until processes that have not ended are killed."""
RDZV_ID = "nsa-train"
MOST_HOSTS = 1024
MOST_RESTARTS = 1000


@Parameter(name="*")
@frozen(kw_only=True)
class Meeting:
    """Options of a command: the number of processes of a run, and their rendezvous. The default is this host only."""

    nproc: Annotated[int | None, Parameter(help="Processes of this host: train.nproc_per_node.")] = None
    nnodes: Annotated[str | None, Parameter(help="Hosts, or MIN:MAX; start the same command on each. Default: 1.")] = None
    rdzv_endpoint: Annotated[str, Parameter(help="HOST:PORT of the rendezvous.")] = ""
    rdzv_id: Annotated[str, Parameter(help="Rendezvous id, equal on all hosts.")] = RDZV_ID
    max_restarts: Annotated[int, Parameter(help="How often to restart the processes, from the newest checkpoint.")] = 0

    @property
    def hosts(self) -> str:
        """The number of hosts, or minimum:maximum."""
        return "1" if self.nnodes is None else self.nnodes

    def counts(self) -> range:
        """Return the numbers of hosts that the run may have.

        Raises:
            ConfigError: if `nnodes` is not such a number or range.
        """
        least, _, most = self.hosts.partition(":")
        bounds = [int(text) for text in (least, most or least) if re.fullmatch("[0-9]{1,9}", text)]
        if len(bounds) < 2 or not 1 <= bounds[0] <= bounds[1] <= MOST_HOSTS:
            raise ConfigError(f"--nnodes={self.hosts!r} is neither a number of hosts nor MIN:MAX (from 1 to {MOST_HOSTS:,}); use 2, or 2:4")
        return range(bounds[0], bounds[1] + 1)

    def check(self) -> None:
        """Check that the hosts can meet.

        Raises:
            ConfigError: with a line for each option that breaks a rule.
        """
        problems = []
        try:
            self.counts()
        except ConfigError as error:
            problems.append(str(error))
        host, _, port = self.rdzv_endpoint.rpartition(":")
        if self.hosts != "1" and not self.rdzv_endpoint:
            problems.append(f"--nnodes={self.hosts} needs a rendezvous; use --rdzv-endpoint HOST:29400, equal on each")
        elif self.rdzv_endpoint and not (host and re.fullmatch("[0-9]{1,5}", port) and int(port) < 2**16):
            problems.append(f"--rdzv-endpoint={self.rdzv_endpoint!r} is not HOST:PORT (a port from 0 to 65,535); use HOST:29400")
        if not 0 <= self.max_restarts <= MOST_RESTARTS:
            problems.append(f"--max-restarts={self.max_restarts} is not an integer from 0 to {MOST_RESTARTS:,}; use 3")
        if problems:
            raise ConfigError.of(problems)

    def world_sizes(self, config: RunConfig, machine: "Machine") -> list[int]:
        """Return the numbers of processes that the run may have, on hosts like `machine`."""
        from nsa_train.host.machine import processes_of

        return [count * processes_of(config, machine) for count in self.counts()]

    def overrides(self) -> list[str]:
        """Return the option that is a key of the recipe, as an override."""
        return [] if self.nproc is None else [f"train.nproc_per_node={self.nproc}"]

    def words(self) -> list[str]:
        """Return the other options as words of a command line."""
        said = {"--nnodes": self.nnodes, "--rdzv-endpoint": self.rdzv_endpoint, "--max-restarts": self.max_restarts or None}
        said["--rdzv-id"] = None if self.rdzv_id == RDZV_ID else self.rdzv_id
        return [word for name, value in said.items() if value for word in (name, str(value))]

    def torchrun_words(self) -> list[str]:
        """Return the options as words of torchrun's command line."""
        # a single host uses a free local port
        endpoint, name = (self.rdzv_endpoint, self.rdzv_id) if self.hosts != "1" else ("localhost:0", str(uuid.uuid4()))
        meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", name]
        return ["--nnodes", self.hosts, *meeting, "--max-restarts", str(self.max_restarts)]


ALONE = Meeting()


def num_processes(config: RunConfig) -> int:
    """Return the number of processes of this host: train.nproc_per_node, or one per GPU if that is 0."""
    if config.train.strategy == "single":
        return 1
    import torch

    gpus = 0 if config.train.device == "cpu" else torch.cuda.device_count()
    return config.train.nproc_per_node or gpus or 1


def must_launch(config: RunConfig, meeting: Meeting) -> bool:
    """Return True if this process must start the processes of the run, and is not one of them itself."""
    if is_under_torchrun():
        return False
    meeting.check()
    return num_processes(config) > 1 or meeting.hosts != "1" or meeting.max_restarts > 0


def launch(words: Sequence[str], *, num_processes: int, meeting: Meeting) -> int:
    """Run `nsa-train` with `words` in several processes and return their common exit code."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch
    from torch.distributed.run import config_from_args, parse_args

    # torchrun must handle at least one signal itself; the signals that end a run are forwarded below
    options = ["--nproc-per-node", str(num_processes), *meeting.torchrun_words(), "--signals-to-handle", "SIGQUIT"]
    config, command, arguments = config_from_args(parse_args([*options, "-m", "nsa_train", *words]))
    with tempfile.TemporaryDirectory(prefix="nsa-train-") as folder, _forwarding(Path(folder)) as heard:
        ENVIRONMENT.update({FOLDER: folder, LAUNCHER: str(os.getpid())})
        # the processes of each start get their own store. Torchrun's store would keep addresses of dead processes, and would end with this
        # process while the workers still save
        ENVIRONMENT["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        failed = 0
        try:
            elastic_launch(config, entrypoint=command)(*arguments)
        except ChildFailedError as error:
            failed = TrainError.exit_code
            # each worker has reported its error, unless a signal ended it
            rank, first = error.get_first_failure()
            if not heard and (name := _signal_of(first.exitcode)):
                warn(
                    f"rank {rank} (process {first.pid}) was ended by {name}, and the run with it (it needs all ranks); go on with --resume auto"
                )
        finally:
            del ENVIRONMENT[FOLDER], ENVIRONMENT[LAUNCHER]
        code = joint_code(Path(folder)) or failed
        # a worker that had not started, or that torchrun ended, cannot report the signal
        return max(heard) if heard and code in (TrainError.exit_code, *CODES.values()) else code


def _signal_of(code: int) -> str:
    """Return the name of the signal that ended a worker with exit code `code`; empty if none did."""
    number = -code if code < 0 else code - SIGNALLED
    return next((one.name for one in signal.Signals if one == number), "")


@contextmanager
def _forwarding(folder: Path) -> Iterator[list[int]]:
    """Pass SIGTERM, SIGHUP, Ctrl-C and SIGUSR1 on to the workers while the block runs; yield the exit codes of the signals so far."""
    heard: list[int] = []

    def send(pids: list[int], number: int) -> None:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def forward(number: int, frame: FrameType | None) -> None:
        pids = worker_pids(folder)
        if number == signal.SIGINT and INTERRUPTED in heard:
            # the workers end by themselves, but torchrun would wait forever for one that hangs
            timer = threading.Timer(PATIENCE_S, send, (pids, signal.SIGKILL))
            timer.daemon = True
            timer.start()
        if number in CODES:
            heard.append(CODES[number])
            # workers that have not started yet find this file and stop
            (folder / STOP).touch()
            if not pids:
                message = f"stopped by {signal.Signals(number).name} before the processes were up; nothing was done"
                raise SignalledError(f"{message}; start again with --resume auto", exit_code=CODES[number])
        send(pids, number)

    with handled(dict.fromkeys(SIGNALS, forward)):
        yield heard
