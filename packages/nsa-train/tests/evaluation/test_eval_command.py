"""`nsa-train eval`: files, determinism, and what it refuses before it writes anything."""

import csv
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nsa_train.cli import run_command
from nsa_train.evaluation import report
from nsa_train.evaluation.options import TaskName
from nsa_train.evaluation.tasks import TASKS
from nsa_train.run_dir import RunDirectory

QUICK = ("--samples", "2", "--depths", "2")


@pytest.fixture(scope="module")
def needle_run(tmp_path_factory: pytest.TempPathFactory, tiny_recipe: Path) -> Path:
    """A run that was trained on recall for two steps, meant for 128 positions."""
    out = tmp_path_factory.mktemp("eval") / "needle"
    sets = ["data.path=", "data.source=needle", "data.needle_symbols=16", "data.needle_pairs=4", "data.needle_queries=4"]
    sets += ["train.seq_len=48", "train.steps=2", "train.save_every=0", "train.samples=false", "model.max_position=128"]
    assert run_command(["run", str(tiny_recipe), "--out", str(out), *(word for one in sets for word in ("--set", one))]) == 0
    return out


def test_every_name_has_a_task() -> None:
    assert [*TASKS] == [*TaskName]


def test_a_run_is_evaluated_on_all_tasks(needle_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "found"
    assert run_command(["eval", str(needle_run), "--out", str(out), *QUICK, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    content = json.loads((out / "eval.json").read_text())
    assert printed["figures"] == content["figures"]
    assert {one["task"] for one in content["figures"]} == {*TaskName}
    assert {one["mode"] for one in content["figures"]} == {"trained", "closed", "shuffled", "dense", None}
    assert {one["length"] for one in content["figures"] if one["task"] == "mqar"} == {64, 128}
    assert content["model"]["max_position"] == 128
    assert content["environment"]["torch"]
    with (out / "eval.csv").open(newline="") as file:
        rows = [*csv.DictReader(file)]
    assert [float(row["value"]) for row in rows] == [one["value"] for one in content["figures"]]
    assert (out / "eval.png").read_bytes().startswith(b"\x89PNG")
    assert printed["files"] == [str(out / name) for name in ("eval.json", "eval.csv", "eval.png")]


def test_equal_seeds_give_equal_figures(needle_run: Path, tmp_path: Path) -> None:
    found = []
    for number, seed in enumerate(("1", "1", "2")):
        out = tmp_path / str(number)
        words = ["--tasks", "copy,mqar,block-recall", "--lengths", "100", "--seed", seed]
        assert run_command(["eval", str(needle_run), "--out", str(out), *QUICK, *words]) == 0
        found.append(json.loads((out / "eval.json").read_text())["figures"])
    assert found[0] == found[1] != found[2]


def test_a_text_run_leaves_out_what_its_positions_are_too_few_for(
    tiny_run: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["eval", str(tiny_run.root), "--out", str(tmp_path), *QUICK]) == 0
    captured = capsys.readouterr()
    assert "passkey is left out: it needs sequences of at least" in captured.err
    assert "loss-by-position" in captured.out and "passkey" not in captured.out


def test_a_model_that_can_do_no_task_is_refused_before_anything_is_written(
    tiny_run: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["ckpt", "export", str(tiny_run.root), str(tmp_path / "exported"), "--format", "hf"]) == 0
    # an export has no held-out rows
    assert run_command(["eval", str(tmp_path / "exported"), "--lengths", "4", "--out", str(tmp_path / "out")]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert any("--tasks loss-by-position" in line for line in lines) and any("--tasks copy" in line for line in lines)
    assert not (tmp_path / "out").exists()


def test_without_lengths_a_task_takes_those_of_the_defaults_that_are_long_enough(needle_run: Path, tmp_path: Path) -> None:
    """16 pairs do not fit into half of the 128 positions."""
    pairs = ("--pairs", "16")
    assert run_command(["eval", str(needle_run), "--out", str(tmp_path), *QUICK, "--tasks", "mqar,copy", *pairs]) == 0
    figures = json.loads((tmp_path / "eval.json").read_text())["figures"]
    lengths = {task: {one["length"] for one in figures if one["task"] == task} for task in ("mqar", "copy")}
    assert lengths == {"mqar": {128}, "copy": {64, 128}}


def test_an_export_is_evaluated_on_a_text(tiny_run: RunDirectory, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    export, text = tmp_path / "export", tmp_path / "text.txt"
    assert run_command(["ckpt", "export", str(tiny_run.root), str(export), "--format", "hf"]) == 0
    text.write_text("Two boats wait for a tide.")
    found = {}
    for model in (export, tiny_run.root):
        out = tmp_path / f"eval-{model.name}"
        words = ["--tasks", "loss-by-position,block-recall", "--text", str(text)]
        assert run_command(["eval", str(model), "--out", str(out), *words]) == 0
        found[model] = [one["value"] for one in json.loads((out / "eval.json").read_text())["figures"]]
    assert found[export] == pytest.approx(found[tiny_run.root], rel=1e-4)


def test_an_export_reads_no_text_that_is_not_utf_8(tiny_run: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    export, text = tmp_path / "export", tmp_path / "text.txt"
    assert run_command(["ckpt", "export", str(tiny_run.root), str(export), "--format", "hf"]) == 0
    text.write_bytes(b"A caf\xe9 by the sea.")
    assert run_command(["eval", str(export), "--out", str(tmp_path / "out"), "--tasks", "loss-by-position", "--text", str(text)]) == 2
    said = capsys.readouterr().err
    assert f"--text={str(text)!r} is not UTF-8 at byte 5 (the model's tokenizer reads characters); convert it to UTF-8\n" in said
    assert not (tmp_path / "out").exists()
    # a run on bytes reads any text
    assert (
        run_command(["eval", str(tiny_run.root), "--out", str(tmp_path / "out"), "--tasks", "loss-by-position", "--text", str(text)]) == 0
    )


def test_a_model_without_a_bound_of_positions_needs_lengths(
    tiny_run: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    export = tmp_path / "export"
    assert run_command(["ckpt", "export", str(tiny_run.root), str(export), "--format", "hf"]) == 0
    config = json.loads((export / "config.json").read_text())
    (export / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 10**12}))
    words = ["eval", str(export), "--out", str(tmp_path / "found"), "--tasks", "passkey", *QUICK]
    assert run_command(words) == 2
    assert (
        "--tasks passkey needs --lengths (the model has 1,000,000,000,000 positions, at most 16,777,216); use --lengths 1024"
        in capsys.readouterr().err
    )
    assert not (tmp_path / "found").exists()
    assert run_command([*words, "--lengths", "97"]) == 0


def test_without_the_extra_the_picture_alone_is_missing(
    needle_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "missing_report", lambda: "matplotlib not installed (the extra nsa-train[report])")
    assert run_command(["eval", str(needle_run), "--out", str(tmp_path), *QUICK, "--tasks", "copy"]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["eval.csv", "eval.json"]
    assert "eval.png is not drawn: matplotlib not installed (the extra nsa-train[report])" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (
            ["--tasks", "recall"],
            "--tasks='recall' is none of those that exist; use some of loss-by-position, loss-by-layer, passkey, mqar, copy, block-recall",
        ),
        (["--tasks", ""], "--tasks='' is none of those"),
        (["--mode", "open"], "--mode='open' is none of those that exist; use some of trained, closed, shuffled, dense"),
        (["--lengths", "64,x"], "--lengths='x' is no number of tokens"),
        (["--lengths", "0"], "--lengths='0' is no number of tokens"),
        (["--lengths", "-64"], "--lengths='-64' is no number of tokens"),
        (["--lengths", "64,129"], "--lengths has 129, more than the model's 128 positions"),
        (["--tasks", "mqar", "--lengths", "16"], "--tasks mqar needs sequences of at least 24 tokens (--lengths has 16); use --lengths 24"),
        (["--tasks", "mqar", "--pairs", "17"], "--tasks mqar has no different key for each of 17 pairs"),
        (["--symbols", "86"], "--symbols=86 needs 258 ids (there are 256); use --symbols 85"),
        (["--samples", "0"], "--samples=0 is not a whole number from 1"),
        (["--depths", "-1"], "--depths=-1 is not a whole number from 1"),
        (["--seed", "-1"], "--seed=-1 is not a whole number from 0"),
        (["--tasks", "block-recall", "--mode", "closed"], "--tasks block-recall has figures of --mode trained, shuffled only"),
        (["--tasks", "block-recall", "--mode", "dense"], "--tasks block-recall has figures of --mode trained, shuffled only"),
        (
            ["--tasks", "loss-by-layer", "--mode", "trained"],
            "--tasks loss-by-layer compares other modes with --mode trained; use --mode dense",
        ),
        (["--text", "{nowhere}", "--tasks", "loss-by-position"], "cannot be read"),
        (["--text", "{here}", "--tasks", "loss-by-position"], "cannot be read"),
        (["--text", "{long}", "--tasks", "loss-by-position"], "has 129 tokens (the model has 128 positions"),
        (["--text", "{short}", "--tasks", "loss-by-position"], "short' has 1 of the 2 tokens that a loss needs; name a longer text"),
        (["--text", "{blank}", "--tasks", "loss-by-position"], "blank' has 0 of the 2 tokens that a loss needs; name a longer text"),
        (["--text", "{long}", "--tasks", "mqar"], "--text would be ignored (no task of mqar reads a text)"),
        (["--twin", "{run}", "--tasks", "mqar,copy"], "--twin would be ignored (no task of mqar, copy reads it)"),
        (["--twin", "{nowhere}"], "--twin="),
        (["--twin", "{here}"], "--twin="),
        (["--twin", "{run}"], "is no dense twin of the model (it has 2 NSA layers)"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_is_written(
    needle_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], reason: str
) -> None:
    out, here = tmp_path / "out", tmp_path / "here"
    here.mkdir()
    names = {"nowhere": str(tmp_path / "nowhere"), "here": str(here), "run": str(needle_run)}
    for name, size in (("long", 129), ("short", 1), ("blank", 0)):
        (here / name).write_text("x" * size)
        names[name] = str(here / name)
    assert run_command(["eval", str(needle_run), "--out", str(out), *(word.format(**names) for word in words)]) == 2
    assert reason in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize("path", ["nowhere", "empty"])
def test_a_path_that_is_no_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], path: str) -> None:
    (tmp_path / "empty").mkdir()
    assert run_command(["eval", str(tmp_path / path), "--out", str(tmp_path / "out")]) == 2
    assert path in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_damaged_checkpoint_ends_with_1(needle_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copied = tmp_path / "copied"
    shutil.copytree(needle_run, copied, symlinks=True)
    [weights] = copied.glob("checkpoints/step-*/model*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1])
    assert run_command(["eval", str(copied), "--out", str(tmp_path / "out")]) == 1
    assert "safetensors" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_held_out_rows_of_a_changed_corpus_are_refused(
    tmp_path: Path, tiny_recipe: Path, train: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_bytes(bytes(range(32, 127)) * 40)
    code, run = train(f"data.path={corpus}", "train.steps=2", "train.samples=false")
    assert code == 0
    words = ["eval", str(run.root), "--out", str(tmp_path / "out"), "--tasks", "loss-by-position", "--mode", "trained"]
    assert run_command(words) == 0
    shutil.rmtree(tmp_path / "out")
    corpus.write_bytes(bytes(range(33, 127)) * 40)
    assert run_command(words) == 2
    assert "was trained on other data (content was '" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    # a text has no rows of the run
    assert run_command([*words, "--text", str(corpus)]) == 2
    assert "positions" in capsys.readouterr().err


def test_a_directory_that_cannot_be_is_refused_before_the_model_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert run_command(["eval", str(tmp_path / "nowhere"), "--out", str(tmp_path / "file" / "below")]) == 2
    assert "file' is no directory (eval.json is written there); use another directory" in capsys.readouterr().err


def test_a_dense_model_has_one_mode(
    tmp_path: Path, tiny_recipe: Path, capsys: pytest.CaptureFixture[str], train: Callable[..., Any]
) -> None:
    code, run = train("model.attention=dense", "train.steps=2", "train.samples=false")
    assert code == 0
    assert run_command(["eval", str(run.root), "--out", str(tmp_path / "out"), "--mode", "closed"]) == 2
    assert "--mode='closed' changes nothing (the model has no selected branch); use --mode trained" in capsys.readouterr().err
    assert run_command(["eval", str(run.root), "--out", str(tmp_path / "out"), "--tasks", "block-recall"]) == 2
    assert "--tasks block-recall needs a layer that chooses blocks" in capsys.readouterr().err
    assert run_command(["eval", str(run.root), "--out", str(tmp_path / "out"), "--tasks", "copy", *QUICK]) == 0
    assert {one["mode"] for one in json.loads((tmp_path / "out" / "eval.json").read_text())["figures"]} == {"trained"}
