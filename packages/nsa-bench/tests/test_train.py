"""Training is timed by its own records and compared with the dense twin; a run with a wrong loss gets no time."""

import csv
import json
import math
from pathlib import Path

import pytest

from nsa_bench.cli import run_command
from nsa_bench.train import TrainingResult, ratio_to_dense, read_result, twin_settings, wrong_losses
from nsa_train.run_dir import RunDirectory
from nsa_train.settings.config import RunConfig
from nsa_train.settings.recipe import load_config

RECIPE = """
[model]
dim = 16
n_layers = 1
n_heads = 2
n_kv_heads = 1
head_dim_qk = 8
head_dim_v = 8

[nsa]
compression_block_size = 4
compression_stride = 2
selection_block_size = 4
num_selected_blocks = 3
window_size = 8
gate_hidden_size = 4

[data]
source = "synthetic"

[train]
steps = 100
seq_len = 32
batch_size = 2
lr = 1e-3
warmup_steps = 10
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(RECIPE)
    return path


@pytest.fixture
def config(recipe: Path) -> RunConfig:
    return load_config(str(recipe))


@pytest.mark.parametrize("key", ["train.steps", "model.attention", "train.log_every"])
def test_settings_that_the_command_sets_are_refused(recipe: Path, key: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["train", str(recipe), "--set", f"{key}=7"]) == 2
    assert f"--set {key}=7 is not read (this command sets {key}); leave it out" in " ".join(capsys.readouterr().err.split())


def test_both_twins_are_trained_and_compared(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", str(recipe), "--steps", "6", "--json", str(tmp_path / "t.json"), "--csv", str(tmp_path / "t.csv"), "--commit", "abc"]
    assert run_command(words) == 0
    nsa, dense = json.loads((tmp_path / "t.json").read_text())["rows"]
    assert (nsa["attention"], dense["attention"]) == ("nsa", "dense")
    assert nsa["routes"] == "sdpa"
    for row in (nsa, dense):
        assert row["toks_per_s"] == pytest.approx(1e3 * row["tokens_per_step"] / row["step_ms"], rel=0.5)
        assert row["tokens_per_step"] == 64
        assert row["first_loss"] == pytest.approx(math.log(258), abs=0.3)
        assert row["peak_memory_gib"] > 0
        assert row["mfu"] is None
        assert row["commit"] == "abc"
    assert nsa["parameters"] > dense["parameters"]
    assert nsa["of_dense"] == pytest.approx(nsa["toks_per_s"] / dense["toks_per_s"])
    with (tmp_path / "t.csv").open(newline="") as file:
        assert [row["attention"] for row in csv.DictReader(file)] == ["nsa", "dense"]
    printed = capsys.readouterr()
    assert "of dense" in printed.out
    assert "nsa: " in printed.err


def test_a_twin_spends_no_time_in_evaluation(recipe: Path) -> None:
    sets = twin_settings(["train.eval_batches=9"], "dense", 6)
    config = load_config(str(recipe), sets)
    assert (config.train.eval_every, config.train.eval_batches) == (6, 1)
    assert load_config(str(recipe), sets) == config


def test_the_dense_twin_of_a_recipe_with_layers_is_all_dense(recipe: Path) -> None:
    layers = ['model.layers=["dense", "nsa"]', "model.n_layers=2"]
    twins = [load_config(str(recipe), twin_settings(layers, attention, 3)) for attention in ("nsa", "dense")]
    assert [[layer.attention for layer in twin.pattern()] for twin in twins] == [["dense", "nsa"], ["dense"]]


def test_a_run_that_fails_gets_no_time(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", str(recipe), "--steps", "6", "--twins", "dense", "--set", "data.source=text", "--set", "data.path=absent.txt"]
    assert run_command(words) == 1
    assert "dense: no time, exit code 2: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("losses", "message"),
    [
        ([5.55, 5.5, float("nan")], "a loss is not finite"),
        ([4.0, 4.0], "not near ln V"),
        ([5.55, 5.4, 5.0], "the future leaks"),
        ([5.55, 5.5, 5.56], None),
    ],
)
def test_wrong_losses_are_told(losses: list[float], message: str | None, config: RunConfig) -> None:
    """The earlier system claimed throughput for a path with wrong gradients; and its loss was a leak."""
    found = wrong_losses(losses, config)
    assert found is None if message is None else message in str(found)


def test_a_wrong_loss_leaves_no_time(tmp_path: Path, config: RunConfig) -> None:
    _records(tmp_path, first_loss=2.0)
    result = read_result(RunDirectory(tmp_path), config)
    assert result.toks_per_s is None
    assert "not near ln V" in str(result.failure)
    assert result.parameters == 7


def test_warm_up_and_the_last_step_are_left_out(tmp_path: Path, config: RunConfig) -> None:
    _records(tmp_path, first_loss=5.55)
    result = read_result(RunDirectory(tmp_path), config)
    assert result.toks_per_s == 1000.0
    assert result.mfu == 0.25


def _records(folder: Path, *, first_loss: float) -> None:
    # three steps compile, the last one is eager and logged
    speeds = [1, 1, 1, 1000, 1000, 1000, 1]
    losses = [first_loss, *[5.55] * 6]
    lines = [
        f"{step + 1},{loss},1,1e-3,{speed},1.0,0.1,{1e3 / speed},0.25,0"
        for step, (loss, speed) in enumerate(zip(losses, speeds, strict=True))
    ]
    header = "step,loss,ppl,lr,toks_per_s,grad_norm,fetch_ms,step_ms,mfu,is_clipped"
    (folder / "training.csv").write_text("\n".join([header, *lines]) + "\n")
    (folder / "metrics.json").write_text(json.dumps({"parameters": 7, "tokens": 70, "steps": 7, "peak_memory_gib": 1.0}))


def test_without_a_dense_twin_there_is_no_ratio() -> None:
    nsa = TrainingResult(attention="nsa", toks_per_s=10.0)
    assert ratio_to_dense(nsa, [nsa]) is None
    assert ratio_to_dense(nsa, [nsa, TrainingResult(attention="dense", failure="out of memory")]) is None
    assert ratio_to_dense(nsa, [nsa, TrainingResult(attention="dense", toks_per_s=5.0)]) == 2


def test_bad_options_are_refused_before_anything_runs(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["train", str(recipe), "--steps", "2"]) == 2
    assert "use 5 or more" in capsys.readouterr().err
    assert run_command(["train", str(recipe), "--steps", "5000"]) == 2
    assert "use fewer than 5000" in " ".join(capsys.readouterr().err.split())
    assert run_command(["train", str(recipe), "--json", str(recipe)]) == 2
    assert "is the recipe (it would be lost)" in " ".join(capsys.readouterr().err.split())
    assert run_command(["train", str(recipe), "--set", "train.stepz=2"]) == 2
    assert "did you mean train.steps?" in capsys.readouterr().err
    assert run_command(["train", "no-such-recipe"]) == 2
