"""The progress line on a terminal and elsewhere."""

import errno
import io

import pytest
from attrs import evolve

from nsa_train.telemetry.progress import ProgressDisplay, Screen, StepFigures

FIGURES = StepFigures(step=20, loss=5.6891, lr=1.76e-4, toks_per_s=1043.2, grad_norm=1.5, fetch_ms=3.4)


def test_a_step_reads_as_documented() -> None:
    assert str(FIGURES) == "step 0020 | loss 5.6891 | lr 1.76e-04 | toks/s 1043 | grad_norm 1.500 | fetch 3ms"


def test_elsewhere_only_logged_steps_are_lines() -> None:
    output = io.StringIO()
    with ProgressDisplay(Screen(file=output, force_terminal=False), 100) as display:
        display.show_step(FIGURES, is_logged=False)
        display.show_step(FIGURES, is_logged=True)
        display.note("a note [with brackets]")
    assert output.getvalue().splitlines() == [str(FIGURES), "a note [with brackets]"]


def test_a_line_holds_the_throughput_since_the_last_one() -> None:
    output = io.StringIO()
    with ProgressDisplay(Screen(file=output, force_terminal=False), 100) as display:
        for speeds in ((300.0, 100.0), (50.0,)):
            for place, speed in enumerate(speeds, 1):
                display.show_step(evolve(FIGURES, toks_per_s=speed), is_logged=place == len(speeds))
    # as many tokens at 300 as at 100 to the second: 150
    assert [line.split(" | ")[3] for line in output.getvalue().splitlines()] == ["toks/s 150", "toks/s 50"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Gone(Terminal):
    """The output of a command whose reader is gone."""

    def __init__(self, error: int) -> None:
        super().__init__()
        self.error, self.tries = error, 0

    def write(self, text: str) -> int:
        self.tries += 1
        raise OSError(self.error, "gone")


@pytest.mark.parametrize("variable", [{"TERM": "dumb"}, {"TERM": "unknown"}])
def test_a_terminal_whose_cursor_stays_has_plain_lines(variable: dict[str, str]) -> None:
    output = Terminal()
    with ProgressDisplay(Screen(file=output, _environ=variable), 100) as display:
        display.show_step(FIGURES, is_logged=True)
    assert output.getvalue() == f"{FIGURES}\n"


def test_a_file_has_plain_lines_also_where_colours_are_forced() -> None:
    output = io.StringIO()
    with ProgressDisplay(Screen(file=output, _environ={"FORCE_COLOR": "1", "TERM": "xterm"}), 100) as display:
        display.show_step(FIGURES, is_logged=True)
        display.note("a note")
    assert output.getvalue() == f"{FIGURES}\na note\n"


@pytest.mark.parametrize("term", ["xterm", "dumb"])
@pytest.mark.parametrize("error", [errno.EPIPE, errno.EIO, errno.ENOSPC])
def test_a_reader_that_goes_away_ends_the_display_alone(error: int, term: str) -> None:
    output = Gone(error)
    with ProgressDisplay(Screen(file=output, _environ={"TERM": term}), 100) as display:
        display.note("a note")
        tries = output.tries
        display.show_step(FIGURES, is_logged=True)
        display.note("another")
    assert output.tries == tries > 0


def test_a_terminal_has_a_live_line_of_every_step() -> None:
    output = Terminal()
    with ProgressDisplay(Screen(file=output, force_terminal=True, width=160), 100) as display:
        display.show_step(FIGURES, is_logged=False)
        display.note("a note")
    text = output.getvalue()
    assert "loss 5.6891" in text
    assert "a note\n" in text


def test_steps_count_by_their_tokens() -> None:
    output = io.StringIO()
    display = ProgressDisplay(Screen(file=output, width=200), total_steps=20)
    # 4,096 tokens in 0.4 s, 128 in 0.1 s
    display.show_step(evolve(FIGURES, toks_per_s=4096 / 0.4, lengths=(4000, 96)), is_logged=False)
    display.show_step(evolve(FIGURES, toks_per_s=128 / 0.1, lengths=(128,)), is_logged=True)
    assert "toks/s 8448" in output.getvalue()
