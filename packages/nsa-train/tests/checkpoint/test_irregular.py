"""A file of a checkpoint that is not regular, or too large, is named at once, and a resume takes the checkpoint before it."""

from pathlib import Path

import pytest

from nsa_train.checkpoint import resume_point
from nsa_train.checkpoint.layout import CONFIG, FILES, MANIFEST, STATE
from nsa_train.cli import run_command

KINDS = ("pipe", "socket", "device", "directory", "holes")
pytestmark = pytest.mark.timeout(30)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [MANIFEST, STATE, CONFIG])
def test_a_small_file_that_is_irregular_is_named_by_every_command(
    root: Path, put_irregular, capsys: pytest.CaptureFixture[str], name: str, kind: str
) -> None:
    path, out = root / "step-2" / name, root.parent / "out"
    put_irregular(kind, path)
    words = [str(path), put_irregular.kinds[kind]]
    assert run_command(["ckpt", "ls", str(root)]) == 0
    listed = capsys.readouterr().out.splitlines()[1]
    assert listed.startswith("step-2")
    assert name != MANIFEST or all(word in listed for word in ["damaged: ", *words])
    for command in (["ckpt", "verify", str(root)], ["ckpt", "export", str(root), str(out)], ["sample", str(root), "--prompt", "a"]):
        assert run_command(command) == 1
        told = capsys.readouterr().err
        assert told.count("\n") == 1, told
        assert all(word in told for word in words), told
    point = resume_point(root)
    assert point is not None
    assert point.step == 1
    [refused] = point.refused
    assert all(word in refused for word in words)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", sorted({*FILES} - {STATE, CONFIG}))
def test_a_file_of_tensors_that_is_irregular_is_named(root: Path, put_irregular, name: str, kind: str) -> None:
    put_irregular(kind, root / "step-2" / name)
    point = resume_point(root)
    assert point is not None
    [refused] = point.refused
    words = "size in bytes expected" if kind == "holes" else put_irregular.kinds[kind]
    assert f"{root / 'step-2' / name} " in refused
    assert words in refused


def test_a_pipe_in_the_place_of_checkpoints_is_no_checkpoint(tmp_path: Path, put_irregular, capsys: pytest.CaptureFixture[str]) -> None:
    put_irregular("pipe", tmp_path / "checkpoints")
    (tmp_path / "config.toml").touch()
    assert run_command(["ckpt", "ls", str(tmp_path)]) == 2
    assert run_command(["run", "demo", "--out", str(tmp_path), "--resume"]) == 1
    assert "checkpoints cannot be written to" in capsys.readouterr().err
