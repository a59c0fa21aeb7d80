"""A run that is killed before it has recorded anything can be started again in its directory, with and without --resume auto."""

import subprocess
import sys
from pathlib import Path

import pytest

from nsa_train.cli import run_command
from nsa_train.run_dir import RunDirectory

HANGING = """
import sys, time
import nsa_train.loop.trainer
from nsa_train.cli import run_command

def hang(*args, **kwargs):
    print("here", flush=True)
    time.sleep(600)

setattr(nsa_train.loop.trainer, sys.argv[1], hang)
run_command(sys.argv[2:])
"""


def _kill_in(place: str, words: list[str]) -> None:
    """Start a run and kill it when the trainer calls `place`."""
    run = subprocess.Popen([sys.executable, "-c", HANGING, place, *words], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    with run:
        try:
            assert any(line == "here\n" for line in run.stdout)
        finally:
            run.kill()


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("open_dataset", []),
        ("Recorder", ["--resume", "auto"]),
        pytest.param("open_dataset", ["--resume", "auto"], marks=pytest.mark.slow),
        pytest.param("Recorder", [], marks=pytest.mark.slow),
    ],
)
def test_a_run_killed_before_its_first_record_starts_again(
    tmp_path: Path, tiny_recipe: Path, monkeypatch: pytest.MonkeyPatch, place: str, words: list[str]
) -> None:
    monkeypatch.setattr("nsa_train.telemetry.recorder.SAMPLE_TOKENS", 8)
    monkeypatch.setattr("nsa_train.telemetry.recorder.write_report", lambda paths: None)
    out = tmp_path / "run"
    command = ["run", str(tiny_recipe), "--out", str(out), "--set", "train.steps=2"]
    _kill_in(place, command)
    assert out.exists() == (place == "Recorder")
    assert run_command([*command, *words]) == 0
    assert RunDirectory(out).metrics.is_file()
