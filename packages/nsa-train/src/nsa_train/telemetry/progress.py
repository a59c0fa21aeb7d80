"""Show the progress of a run on the screen: a live line on a terminal, plain lines elsewhere."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self, TextIO, cast

from attrs import evolve, frozen
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from nsa_train.lifecycle.console import discard


@frozen(kw_only=True)
class StepFigures:
    """One optimizer step."""

    step: int
    loss: float
    """Nats per token, before the update."""
    lr: float
    toks_per_s: float
    grad_norm: float
    """Gradient norm before clipping."""
    fetch_ms: float
    """Milliseconds spent waiting for data."""
    is_clipped: bool = False
    """True if the gradient was scaled down to train.grad_clip."""
    lengths: tuple[int, ...] = ()
    """Tokens of each sequence that this rank saw in the step; empty: rows of train.seq_len."""

    def __str__(self) -> str:
        return (
            f"step {self.step:04d} | loss {self.loss:.4f} | lr {self.lr:.2e} | toks/s {self.toks_per_s:.0f} | "
            f"grad_norm {self.grad_norm:.3f} | fetch {self.fetch_ms:.0f}ms"
        )


class Screen(Console):
    """A console whose reader may go away: only later output is lost."""

    def on_broken_pipe(self) -> None:
        """Print no more."""
        self.leave()

    def leave(self) -> None:
        """Print no more, here and to the stream below."""
        self.quiet = True
        discard(cast(TextIO, self.file))


class ProgressDisplay:
    """Shows steps and notes on `console`, as long as it accepts them; use it as a context manager."""

    def __init__(self, console: Screen, total_steps: int) -> None:
        self.console = console
        columns = (BarColumn(bar_width=24), TextColumn("{task.description}"), TimeRemainingColumn())
        # colours may be forced for a file, and some terminals cannot move the cursor
        is_live = console.file.isatty() and console.is_interactive
        self._bar = Progress(*columns, console=console, transient=True) if is_live else None
        self._tokens, self._seconds = 0, 0.0
        self._task: TaskID | None = self._bar.add_task("starting", total=total_steps) if self._bar else None

    def __enter__(self) -> Self:
        if self._bar:
            with self._shown():
                self._bar.start()
            if self.console.quiet:
                # a bar that did not start cannot be stopped
                self._bar = None
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            with self._shown():
                self._bar.stop()

    def show_step(self, figures: StepFigures, *, is_logged: bool) -> None:
        """Show a step: every step on a terminal's live line; elsewhere only logged steps, with the throughput of all steps since the last.

        A logged step is not compiled and computes telemetry, so its own throughput says little about the run's.
        """
        if self._bar and self._task is not None:
            with self._shown():
                self._bar.update(self._task, completed=figures.step, description=str(figures))
            return
        # of this rank, as a weight: steps without packing have different numbers of tokens
        tokens = sum(figures.lengths) or 1
        self._tokens, self._seconds = self._tokens + tokens, self._seconds + tokens / figures.toks_per_s
        if is_logged:
            self.note(str(evolve(figures, toks_per_s=self._tokens / self._seconds)))
            self._tokens, self._seconds = 0, 0.0

    def note(self, text: str) -> None:
        """Print a line that stays."""
        with self._shown():
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def _shown(self) -> Iterator[None]:
        """Continue the run if its terminal was closed, or the disk of its output is full."""
        try:
            yield
        except OSError:
            self.console.leave()
