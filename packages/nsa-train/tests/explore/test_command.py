"""`nsa-train explore`: a page and JSON of a run, a checkpoint or an export; everything else is refused and writes nothing."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nsa_train.checkpoint.models import open_model
from nsa_train.cli import run_command
from nsa_train.explore import command
from nsa_train.explore.collect import collect_layers
from nsa_train.run_dir import RunDirectory

MIXED = 'model.layers=["nsa", "dense", {branches = ["slc", "win"], selection_block_size = 8}, {branches = ["win"]}]'
Explore = Callable[..., tuple[int, str]]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A text of 32 bytes, some of which are one character."""
    path = tmp_path / "text.txt"
    path.write_text("3 bottles </script> 東 on wall.")
    return path


@pytest.fixture
def explore(tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> Explore:
    """A function from a model and options to the exit code and the messages; a failure leaves no file."""

    def run(model: Path, *options: str) -> tuple[int, str]:
        named = dict(zip(options[::2], options[1::2], strict=True))
        usual = {"--text": text, "--out": tmp_path / "out/page.html", "--json": tmp_path / "out/page.json"}
        (tmp_path / "out").mkdir(exist_ok=True)
        code = run_command(["explore", str(model), *(str(word) for pair in (usual | named).items() for word in pair)])
        if code != 0:
            assert list((tmp_path / "out").iterdir()) == []
        return code, capsys.readouterr().err

    return run


def json_of(tmp_path: Path) -> dict:
    return dict(json.loads((tmp_path / "out/page.json").read_text()))


def test_the_files_of_a_run(explore: Explore, tiny_run: RunDirectory, text: Path, tmp_path: Path) -> None:
    assert explore(tiny_run.root)[0] == 0
    whole = json_of(tmp_path)
    assert (whole["model"], whole["step"], whole["num_tokens"]) == ("tiny", 5, 32)
    assert "".join(whole["token_texts"]) == text.read_text()
    opened = open_model(tiny_run.root)
    for record, said in zip(collect_layers(opened.decoder, torch.tensor(list(text.read_bytes()))), whole["layers"], strict=True):
        assert record.block_indices is not None
        assert said["block_indices"] == record.block_indices.tolist()
    assert "<h1>tiny, step 5</h1>" in (tmp_path / "out/page.html").read_text()


def test_a_checkpoint_has_the_name_of_its_run(explore: Explore, saved: Callable[..., Path], tmp_path: Path) -> None:
    assert explore(saved())[0] == 0
    assert (json_of(tmp_path)["model"], json_of(tmp_path)["step"]) == ("saved", 7)


def test_a_mixed_model_with_its_twin(explore: Explore, saved: Callable[..., Path], tmp_path: Path) -> None:
    assert explore(saved(MIXED, "model.n_layers=4"), "--twin", str(saved("model.attention=dense", "model.n_layers=4")))[0] == 0
    layers = json_of(tmp_path)["layers"]
    assert [layer["attention"] for layer in layers] == ["nsa", "dense", "nsa", "nsa"]
    assert [layer["dense_mass"] is None for layer in layers] == [False, True, False, True]
    assert [len(layer["dense_mass"][30][0]) for layer in (layers[0], layers[2])] == [8, 4]


def test_an_export_is_read_as_well(explore: Explore, saved: Callable[..., Path], tmp_path: Path) -> None:
    pytest.importorskip("nsa_transformers")
    pytest.importorskip("transformers")
    assert run_command(["ckpt", "export", str(saved()), str(tmp_path / "folder"), "--format", "hf"]) == 0
    assert explore(tmp_path / "folder")[0] == 0
    exported = json_of(tmp_path)
    assert (exported["model"], exported["step"]) == ("folder", None)
    assert explore(saved())[0] == 0
    assert [layer["block_indices"] for layer in exported["layers"]] == [layer["block_indices"] for layer in json_of(tmp_path)["layers"]]


def test_tokens_takes_the_first_ones(explore: Explore, saved: Callable[..., Path], text: Path, tmp_path: Path) -> None:
    text.write_text("a long text " * 10)
    code, said = explore(saved())
    assert code == 2
    assert "has 120 tokens (the model is meant for 32 at most); use --tokens 32 for the first ones" in said
    assert explore(saved(), "--tokens", "32")[0] == 0
    assert json_of(tmp_path)["num_tokens"] == 32
    assert explore(saved(), "--tokens", "5")[0] == 0
    assert "".join(json_of(tmp_path)["token_texts"]) == "a lon"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tokens", "0"], "--tokens=0 is not an integer from 1 up; use 256"),
        (["--tokens", "33"], "--tokens=33 is above the 32 tokens that the model is meant for; use --tokens 32"),
        (["--out", "."], "--out='.' is a directory"),
        (["--out", "no/page.html"], "--out='no/page.html' is in no existing directory ('no' does not exist)"),
        (["--json", "no/page.json"], "--json='no/page.json' is in no existing directory"),
        (["--text", "nowhere.txt"], "--text='nowhere.txt' does not exist; name a text file"),
        (["--twin", "nowhere"], "--twin='nowhere' does not exist; name a run, a checkpoint or an exported folder"),
    ],
)
def test_options_that_will_not_do(options: list[str], message: str, explore: Explore, saved: Callable[..., Path]) -> None:
    code, said = explore(saved(), *options)
    assert code == 2
    assert message in said


def test_an_output_never_replaces_the_text_or_another_output(
    explore: Explore, saved: Callable[..., Path], text: Path, tmp_path: Path
) -> None:
    before = text.read_bytes()
    code, said = explore(saved(), "--out", str(text))
    assert (code, text.read_bytes()) == (2, before)
    assert "is the path of --text (it would be lost); name another file" in said
    code, said = explore(saved(), "--json", str(tmp_path / "out/../out/page.html"))
    assert code == 2
    assert "is the path of --out" in said


def test_an_output_never_replaces_a_file_of_a_model_or_a_pipe(explore: Explore, saved: Callable[..., Path], tmp_path: Path) -> None:
    model, twin, pipe = saved(), saved("model.attention=dense"), tmp_path / "pipe"
    weights = next(twin.rglob("model.safetensors"))
    before = weights.read_bytes()
    code, said = explore(model, "--twin", str(twin), "--out", str(weights))
    assert (code, weights.read_bytes()) == (2, before)
    assert "is a file of --twin (it would be lost); name another file" in said
    os.mkfifo(pipe)
    code, said = explore(model, "--json", str(pipe))
    assert code == 2
    assert pipe.is_fifo()
    assert "is no regular file (it would be replaced); name another file" in said
    # a page in the model's folder is no part of the model
    assert [explore(model, "--out", str(model / "page.html"))[0] for _ in range(2)] == [0, 0]


def test_an_output_never_replaces_a_file_of_the_checkpoints_run(explore: Explore, tiny_run: RunDirectory) -> None:
    before = tiny_run.config.read_bytes()
    for given in (next(tiny_run.checkpoints.glob("step-*")), tiny_run.checkpoints):
        code, said = explore(given, "--out", str(tiny_run.config))
        assert (code, tiny_run.config.read_bytes()) == (2, before)
        assert "is a file of CHECKPOINT (it would be lost); name another file" in said


def test_an_empty_text_is_refused(explore: Explore, saved: Callable[..., Path], text: Path) -> None:
    text.write_bytes(b"")
    code, said = explore(saved())
    assert code == 2
    assert "is empty (a model needs a first token)" in said


def test_a_dense_model_is_refused(explore: Explore, saved: Callable[..., Path]) -> None:
    code, said = explore(saved("model.attention=dense"))
    assert code == 2
    assert "has 2 dense layers and none of NSA (only those choose blocks); name an NSA model, and this one as --twin" in said


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.attention=dense", "model.dim=48"], "it has width 48, the model 32"),
        (["model.attention=dense", "train.seq_len=16"], "it is meant for 16 tokens, the longest text has 32"),
        ([], "it has 2 NSA layers"),
    ],
)
def test_another_twin_is_refused(overrides: list[str], message: str, explore: Explore, saved: Callable[..., Path]) -> None:
    code, said = explore(saved(), "--twin", str(saved(*overrides)))
    assert code == 2
    assert message in said


def test_a_path_that_is_no_model_is_refused(explore: Explore, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    assert explore(tmp_path / "other")[0] == 2
    assert explore(tmp_path / "nowhere")[0] == 2


def test_a_damaged_checkpoint_is_an_error(explore: Explore, saved: Callable[..., Path], tmp_path: Path) -> None:
    source, damaged = saved(), tmp_path / "checkpoints" / "step-7"
    damaged.mkdir(parents=True)
    for file in source.iterdir():
        content = bytearray(file.read_bytes())
        if file.name == "model.safetensors":
            content[-1] ^= 1
        (damaged / file.name).write_bytes(content)
    code, said = explore(damaged)
    assert code == 1
    assert "model.safetensors" in said


def test_a_page_that_no_browser_should_hold_is_refused(
    explore: Explore, saved: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "MOST_PACKED", 500)
    code, said = explore(saved())
    assert code == 2
    assert "32 tokens would make a page of" in said
    assert explore(saved(), "--tokens", said.rpartition("use --tokens ")[2].strip())[0] == 0


def test_an_existing_page_stays_where_the_command_fails(saved: Callable[..., Path], text: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("mine")
    assert run_command(["explore", str(saved()), "--text", str(text), "-o", str(page), "--tokens", "0"]) == 2
    assert page.read_text() == "mine"
    assert run_command(["explore", str(saved()), "--text", str(text), "-o", str(page)]) == 0
    assert page.read_text() != "mine"
