"""The progress line on a terminal and elsewhere."""

import io

from rich.console import Console

from nsa_train.telemetry.progress import ProgressDisplay, StepFigures

FIGURES = StepFigures(step=20, loss=5.6891, lr=1.76e-4, toks_per_s=1043.2, grad_norm=1.5, fetch_ms=3.4)


def test_a_step_reads_as_documented() -> None:
    assert str(FIGURES) == "step 0020 | loss 5.6891 | lr 1.76e-04 | toks/s 1043 | grad_norm 1.500 | fetch 3ms"


def test_elsewhere_only_logged_steps_are_lines() -> None:
    output = io.StringIO()
    with ProgressDisplay(Console(file=output, force_terminal=False), 100) as display:
        display.show_step(FIGURES, is_logged=False)
        display.show_step(FIGURES, is_logged=True)
        display.note("a note [with brackets]")
    assert output.getvalue().splitlines() == [str(FIGURES), "a note [with brackets]"]


def test_a_terminal_has_a_live_line_of_every_step() -> None:
    output = io.StringIO()
    with ProgressDisplay(Console(file=output, force_terminal=True, width=160), 100) as display:
        display.show_step(FIGURES, is_logged=False)
        display.note("a note")
    text = output.getvalue()
    assert "loss 5.6891" in text
    assert "a note\n" in text
