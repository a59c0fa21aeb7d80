"""Preflight's disk rule: the bytes that a run will write, compared with free space and that of its own checkpoints."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from nsa_train.cli import run_command
from nsa_train.model.decoder import count_parameters
from nsa_train.preflight.directories import in_units
from nsa_train.preflight.judge import run_preflight
from nsa_train.settings.config import RunConfig


class Resumed(NamedTuple):
    failures: Callable[..., list[str]]
    """From overrides, free bytes and what lies in `checkpoints` to the failed rules of a resume."""
    size: int
    """Bytes of a checkpoint, as preflight takes it."""


@pytest.fixture
def resumed(tiny_config: Callable[..., RunConfig], tmp_path: Path, set_free_disk: Callable[[int], None]) -> Resumed:
    """A run that goes on where checkpoints of the estimated size lie already."""
    size = 12 * count_parameters(tiny_config()).nsa

    def failures(*overrides: str, free: int, names: list[str]) -> list[str]:
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "config.toml").touch()
        for name in names:
            folder = tmp_path / "run" / "checkpoints" / name
            folder.mkdir(parents=True)
            (folder / "model.safetensors").write_bytes(b"x" * (size - 1))
            (folder / "state.json").write_bytes(b"x")
        set_free_disk(free)
        config = tiny_config("train.steps=60", "train.save_every=10", *overrides)
        return run_preflight(config, tmp_path / "run", resuming=True).failed

    return Resumed(failures, size)


def test_a_run_that_fitted_fits_when_it_is_resumed(resumed: Resumed) -> None:
    kept = ["step-30", "step-40", "step-50"]
    assert resumed.failures("train.keep_last=3", free=resumed.size, names=kept) == []
    # fewer are there, more are to come
    assert resumed.failures("train.keep_last=3", free=2 * resumed.size, names=["step-40", "step-50"]) == []
    [failure] = resumed.failures("train.keep_last=3", free=2 * resumed.size - 1, names=["step-20", "step-30"])
    assert failure.startswith("disk: 4 checkpoints of ")
    assert failure.endswith("use --set train.keep_last=2, or another disk")


def test_checkpoints_that_stay_beside_those_to_come_take_their_room(resumed: Resumed) -> None:
    """A signal saved step 25; with keep_last = 0 nothing goes, and 30, 40, 50, 60 and one aside are still to come."""
    kept = ["step-10", "step-20", "step-25"]
    assert resumed.failures(free=5 * resumed.size, names=kept) == []
    [failure] = resumed.failures(free=5 * resumed.size - 1, names=kept)
    assert failure.startswith("disk: 8 checkpoints of ")
    # of these the newest stay
    assert resumed.failures("train.keep_last=5", free=3 * resumed.size, names=kept) == []
    [failure] = resumed.failures("train.keep_last=5", free=3 * resumed.size - 1, names=kept)
    assert failure.startswith("disk: 6 checkpoints of ")


def test_checkpoints_beyond_the_last_step_go_only_with_keep_last(resumed: Resumed) -> None:
    """They belong to a branch that was left."""
    kept = ["step-50", "step-70", "step-80"]
    assert resumed.failures(free=2 * resumed.size, names=kept) == []
    assert resumed.failures(free=2 * resumed.size - 1, names=kept) != []
    assert resumed.failures("train.keep_last=9", free=resumed.size, names=kept) == []


def test_what_a_killed_save_left_is_room(resumed: Resumed) -> None:
    kept = ["step-40", "step-50", ".aside-step-60", ".aside-removed-step-30"]
    assert resumed.failures("train.keep_last=2", free=0, names=kept) == []


def test_the_next_checkpoint_needs_room_before_an_old_one_goes(resumed: Resumed) -> None:
    kept = [f"step-{step}" for step in (10, 20, 30, 40, 50)]
    assert resumed.failures("train.keep_last=2", free=resumed.size, names=kept) == []
    [failure] = resumed.failures("train.keep_last=2", free=resumed.size - 1, names=kept)
    assert failure.startswith("disk: the next checkpoint, of ")
    assert "older ones are removed only after it is written" in failure
    assert failure.endswith("make room there, or move the run to another disk")


def test_what_is_no_checkpoint_is_no_room(resumed: Resumed) -> None:
    assert resumed.failures("train.keep_last=2", free=resumed.size, names=["step-50", "notes"]) != []
    assert resumed.failures("train.keep_last=2", free=resumed.size, names=["step-40", "step-50", "notes"]) == []


def test_a_small_size_is_told_from_a_smaller_one(resumed: Resumed) -> None:
    [failure] = resumed.failures("train.keep_last=3", free=2 * resumed.size, names=[])
    assert f"4 checkpoints of {resumed.size / 2**10:.2f} KiB" in failure
    assert f"do not fit in the {2 * resumed.size / 2**20:.2f} MiB free" in failure
    assert "0.00" not in failure


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0.00 KiB"),
        (1536, "1.50 KiB"),
        (2**20, "1.00 MiB"),
        (2**30 - 1, "1,024.00 MiB"),
        (2**30, "1.00 GiB"),
        (2**50, "1,048,576.00 GiB"),
    ],
)
def test_a_size_has_the_largest_unit_that_it_fills(size_bytes: int, text: str) -> None:
    assert in_units(size_bytes) == text


def test_a_finished_run_goes_on_where_as_many_checkpoints_fit(
    tiny_recipe: Path, tiny_config: Callable[..., RunConfig], tmp_path: Path, set_free_disk: Callable[[int], None]
) -> None:
    """The checkpoints are those that a run writes: a disk that just holds them takes the resume, too."""
    words = ["run", str(tiny_recipe), "--out", str(tmp_path / "run"), "--set", "train.save_every=1", "--set", "train.keep_last=2"]
    assert run_command(words) == 0
    saved = sum(path.stat().st_size for path in (tmp_path / "run" / "checkpoints").glob("step-*/*"))
    set_free_disk(saved // 2)
    assert run_command([*words, "--set", "train.steps=8", "--resume", "--dry-run"]) == 0
