"""`nsa-train ckpt ls | verify | export`."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors
import torch

from nsa_train.checkpoint import load_model, open_checkpoint
from nsa_train.checkpoint.commands import export
from nsa_train.checkpoint.layout import locate_folder
from nsa_train.checkpoint.tensors import read_tensors
from nsa_train.cli import run_command
from nsa_train.settings.recipe import to_toml


def test_ls_has_a_line_per_checkpoint_and_marks_latest(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for place in (root, root.parent):
        assert run_command(["ckpt", "ls", str(place)]) == 0
        first, second = capsys.readouterr().out.splitlines()
        assert first.startswith("step-1 ")
        assert "MiB" in first
        assert "latest" not in first
        assert second.endswith("<- latest")


def test_ls_names_a_damaged_manifest(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "step-1/manifest.json").write_text("{")
    assert run_command(["ckpt", "ls", str(root)]) == 0
    assert "damaged: " in capsys.readouterr().out.splitlines()[0]


def test_verify_reads_one_checkpoint_or_all(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for place, count in ((root / "step-1", 1), (root / "latest", 1), (root, 2), (root.parent, 2)):
        assert run_command(["ckpt", "verify", str(place)]) == 0
        assert capsys.readouterr().out.count("ok    step-") == count


def test_verify_names_the_damaged_one_and_exits_1(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "step-2/model.safetensors").write_bytes(b"")
    assert run_command(["ckpt", "verify", str(root)]) == 1
    printed = capsys.readouterr()
    assert printed.out.startswith("ok    step-1")
    assert printed.err.startswith(f"FAIL  {root / 'step-2/model.safetensors'} is damaged: size in bytes expected")
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize("verb", ["ls", "verify"])
def test_a_latest_that_names_no_checkpoint_is_told(root: Path, capsys: pytest.CaptureFixture[str], verb: str) -> None:
    (root / "latest").unlink()
    (root / "latest").symlink_to("step-9")
    for place in (root, root.parent):
        assert run_command(["ckpt", verb, str(place)]) == 0
        assert (
            capsys.readouterr().err
            == f"nsa-train: {root / 'latest'} names step-9, which is not there; a resume takes the newest complete one\n"
        )


@pytest.mark.parametrize("verb", ["ls", "verify"])
def test_a_place_without_checkpoints_exits_2(tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: str) -> None:
    for place in (tmp_path, tmp_path / "absent"):
        assert run_command(["ckpt", verb, str(place)]) == 2
        assert "holds no checkpoint" in capsys.readouterr().err


def test_export_to_safetensors_holds_the_weights_and_the_recipe(root: Path, tmp_path: Path) -> None:
    out = tmp_path / "deep/model.safetensors"
    assert run_command(["ckpt", "export", str(root.parent), str(out)]) == 0
    expected = load_model(open_checkpoint(root)).state_dict()
    found = read_tensors(out)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    with safetensors.safe_open(out, "pt") as file:
        assert file.metadata() == {"format": "pt", "step": "2", "config": to_toml(open_checkpoint(root).config)}
    assert [path.name for path in out.parent.iterdir()] == ["model.safetensors"]


def test_an_export_overwrites_nothing_and_knows_its_formats(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").write_text("kept")
    assert run_command(["ckpt", "export", str(root), str(tmp_path / "mine")]) == 2
    assert "never overwrites" in capsys.readouterr().err
    assert run_command(["ckpt", "export", str(root), str(tmp_path / "new"), "--format", "gguf"]) == 2
    assert "use --format hf" in capsys.readouterr().err
    assert (tmp_path / "mine").read_text() == "kept"


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["ckpt", "export", "CKPT", "OUT"], "OUT"),
        (["ckpt", "import", "FOLDER", "OUT"], "OUT"),
        (["convert", "FOLDER", "--out", "OUT"], "--out"),
        (["explore", "CKPT", "--text", "TEXT", "--out", "OUT"], "--out"),
        (["explore", "CKPT", "--text", "TEXT", "--json", "OUT"], "--json"),
    ],
)
def test_a_folder_that_cannot_be_written_to_is_refused_before_the_model_is_read(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], option: str
) -> None:
    (tmp_path / "config.json").write_text("{}")
    out = tmp_path / "out"
    places = {"CKPT": root, "FOLDER": tmp_path, "TEXT": tmp_path / "config.json", "OUT": out}
    # root may write to any folder, except on a read-only file system
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    assert run_command([str(places.get(word, word)) for word in words]) == 2
    message = f"nsa-train: {option}={str(out)!r}: {str(tmp_path)!r} cannot be written to; use another directory\n"
    assert capsys.readouterr().err == message
    assert not out.exists()


def test_an_export_below_a_file_is_refused(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("kept")
    assert run_command(["ckpt", "export", str(root), str(tmp_path / "file/deep/new")]) == 2
    assert f"OUT={str(tmp_path / 'file/deep/new')!r}: {str(tmp_path / 'file')!r} is no directory" in capsys.readouterr().err


def test_a_damaged_checkpoint_is_not_exported(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "step-2/optimizer.safetensors").write_bytes(b"")
    assert run_command(["ckpt", "export", str(root), str(tmp_path / "out")]) == 1
    assert "optimizer.safetensors is damaged" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


TERMINATED = """
import os, signal, sys
from nsa_train.checkpoint import tensors
from nsa_train.cli import run_command

def write(path, *_, **__):
    path.write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGTERM)

tensors.write_tensors = write
sys.exit(run_command(sys.argv[1:]))
"""


def test_an_export_that_sigterm_ends_leaves_no_debris(root: Path, tmp_path: Path) -> None:
    before = sorted(tmp_path.iterdir())
    words = [sys.executable, "-c", TERMINATED, "ckpt", "export", str(root), str(tmp_path / "out/model")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 75, done.stderr
    assert done.stderr.endswith("before the end; nothing was written; start again\n")
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("kind", ["safetensors", "hf"])
def test_a_failed_export_leaves_no_debris(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    def full(path: Path, *_: object, **__: object) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    if kind == "hf":
        pytest.importorskip("nsa_transformers", reason="nsa-transformers is not installed (an extra, nsa-train[hf])")
        monkeypatch.setattr("nsa_train.checkpoint.hugging_face.write_tensors", full)
    monkeypatch.setattr("nsa_train.checkpoint.tensors.write_tensors", full)
    with pytest.raises(OSError, match="No space left") as caught:
        export(root, tmp_path / "out/model", kind)
    assert caught.value.filename == str(tmp_path / "out/model")
    # nor the folder that it made
    assert not (tmp_path / "out").exists()


def test_a_run_may_be_called_as_a_checkpoint_is(root: Path, tmp_path: Path) -> None:
    run = tmp_path / "step-2"
    shutil.copytree(root, run / "checkpoints", symlinks=True)
    assert locate_folder(run).parent == run / "checkpoints"
