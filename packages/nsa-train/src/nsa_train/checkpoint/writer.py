"""Save checkpoints: rank 0 writes, in the background if requested, and every rank learns whether the write succeeded."""

import shutil
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from nsa_train.checkpoint.claim import claim, release
from nsa_train.checkpoint.layout import LATEST, latest_folder, step_name
from nsa_train.checkpoint.publish import clear_debris, point_latest, prune, publish
from nsa_train.checkpoint.snapshot import Snapshot
from nsa_train.errors import CheckpointError
from nsa_train.parallel.world import here


class CheckpointWriter:
    """Writes the checkpoints of one run to `root`. A context manager; every rank has one, and all call its methods.

    With `is_async`, `save` returns once the snapshot is handed over; the next `save`, `wait` or `close` reports the
    result. One checkpoint is written at a time; a save first waits for the previous one.
    """

    def __init__(self, root: Path, *, keep_last: int = 0, is_async: bool = False) -> None:
        """Claim `root` and remove partial files of a killed run; `keep_last` checkpoints stay (0: all).

        Raises:
            TrainError: on all ranks (`World.on_main`), when `root` cannot be written; a ClaimedError where another run writes there.
        """
        self.root, self.keep_last, self.is_async = root, keep_last, is_async
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._job: Future[None] | None = None
        self._pending = ""
        self._claims = ExitStack()
        self._start(f"{root} cannot be written to", self._tidy)
        self.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.close()
        else:
            # the ranks may have diverged: finish the current write, but do not wait for the other ranks
            self._end()

    def save(self, step: int, snapshot: Snapshot) -> Path:
        """Write `snapshot` as `root`/step-N, move `root`/latest to it and return its path. A collective.

        Raises:
            TrainError: on all ranks, if this write (the previous one, with `is_async`) failed; the previous
                checkpoint stays and no partial file remains.
        """
        self.wait()
        path = self.root / step_name(step)
        self._start(f"{path} was not written", lambda: self._write(step, snapshot))
        if not self.is_async:
            self.wait()
        return path

    def go_on_from(self, step: int) -> None:
        """Point `root`/latest to step-N, because the run continues from there; later checkpoints are an abandoned branch. A collective.

        Raises:
            TrainError: on all ranks, if the disk refuses.
        """
        self._start(f"{self.root / LATEST} was not replaced", lambda: point_latest(self.root, step_name(step)))
        self.wait()

    def wait(self) -> None:
        """Return once nothing is being written. A collective.

        Raises:
            TrainError: on all ranks, if the write in progress failed.
        """
        if not self._pending:
            return
        what, self._pending = self._pending, ""
        here().on_main(lambda: self._require_written(what))

    def close(self) -> None:
        """Wait as `wait` does, and end the thread."""
        try:
            self.wait()
        finally:
            self._end()

    def _end(self) -> None:
        self._pool.shutdown()
        self._claims.close()

    def _tidy(self) -> None:
        # also release the claim if the writer is garbage-collected without `close`
        self._claims.callback(weakref.finalize(self, release, self.root, claim(self.root)))
        clear_debris(self.root)

    def _start(self, what: str, job: Callable[[], None]) -> None:
        self._pending = what
        self._job = self._pool.submit(job) if here().is_main else None

    def _write(self, step: int, snapshot: Snapshot) -> None:
        publish(self.root, step, snapshot.write_to)
        prune(self.root, current=step, keep_last=self.keep_last)

    def _require_written(self, what: str) -> None:
        error = self._job.exception() if self._job is not None else None
        if isinstance(error, CheckpointError):
            raise error
        if error is not None:
            raise CheckpointError(
                refused_by_disk(what, error, self.root) if isinstance(error, OSError) else f"{what}: {error!r}"
            ) from error


def refused_by_disk(what: str, error: OSError, root: Path) -> str:
    """Return the message for a disk `error` that stopped a run whose checkpoints are in `root`."""
    existing = next(path for path in (root, *root.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free / 2**20
    before = latest_folder(root)
    kept = f"{before.name} is still there" if before and before.is_dir() else "there is no checkpoint yet"
    return f"{what} ({error}; {free:.1f} MiB are free); {kept}; fix that and go on with --resume"
