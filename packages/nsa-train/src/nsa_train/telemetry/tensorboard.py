"""Write tb/ for TensorBoard: scalars, clip events and histograms of document lengths."""

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nsa_core.environment import version_of

FLUSH_SECONDS = 10
WRITER = "tensorboard.summary.writer.event_file_writer"
"""The module of the thread that writes the events."""


class Board:
    """The event file of one run; no file if TensorBoard is not installed.

    The next call raises the error of a failed write in its thread; the error is not printed.
    """

    def __init__(self, folder: Path, *, resumed_at: int | None = None) -> None:
        """Continue in `folder`; events after step `resumed_at` are hidden."""
        self._writer: Any = None
        if version_of("tensorboard") is None:
            return
        from torch.utils.tensorboard.writer import SummaryWriter

        purge = None if resumed_at is None else resumed_at + 1
        self._hook_before = threading.excepthook
        threading.excepthook = self._leave_to_the_next_call
        self._writer = SummaryWriter(str(folder), purge_step=purge, flush_secs=FLUSH_SECONDS)

    def scalars(self, step: int, group: str, figures: Mapping[str, float | None]) -> None:
        """Add the figures that exist as `group/name`."""
        for name, value in figures.items():
            if value is not None and self._writer is not None:
                self._writer.add_scalar(f"{group}/{name}", value, step)

    def lengths(self, step: int, buckets: Mapping[int, int]) -> None:
        """Add a histogram of sequence lengths: upper bound of a bucket -> sequences."""
        if not buckets or self._writer is None:
            return
        limits = sorted(buckets)
        total = sum(buckets.values())
        self._writer.add_histogram_raw(
            "data/sequence_length_tokens",
            min=limits[0] // 2,
            max=limits[-1],
            num=total,
            sum=sum(limit * count for limit, count in buckets.items()),
            sum_squares=sum(limit * limit * count for limit, count in buckets.items()),
            bucket_limits=[float(limit) for limit in limits],
            bucket_counts=[buckets[limit] for limit in limits],
            global_step=step,
        )

    def close(self) -> None:
        """Write out what is pending and close the file."""
        if self._writer is None:
            return
        try:
            # close() alone does not raise the failure of the thread
            self._writer.flush()
        finally:
            if threading.excepthook == self._leave_to_the_next_call:
                threading.excepthook = self._hook_before
            self._writer.close()

    def _leave_to_the_next_call(self, failure: threading.ExceptHookArgs) -> None:
        """Print the traceback of a thread as usual, except for a disk error in TensorBoard's."""
        if not (isinstance(failure.exc_value, OSError) and type(failure.thread).__module__ == WRITER):
            self._hook_before(failure)
