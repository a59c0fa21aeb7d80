"""A run from end to end: what it writes, that it repeats, and that its switches change only what they say."""

import csv
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nsa_train.errors import GuardError
from nsa_train.run_dir import RunDirectory
from nsa_train.trainer import Trainer


def _table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def _beats(run: RunDirectory) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.heartbeat.read_text().splitlines()]


def _losses(run: RunDirectory) -> list[float]:
    return [float(row["loss"]) for row in _table(run.training)]


def test_a_run_leaves_the_documented_files(tiny_run: RunDirectory) -> None:
    names = {path.relative_to(tiny_run.root).as_posix() for path in tiny_run.root.rglob("*") if path.is_file()}
    steps = {f"checkpoints/{step}/{name}" for step in ("latest", "step-3", "step-5") for name in _CHECKPOINT_FILES}
    assert names - steps == {
        *("config.toml", "env.json", "training.csv", "val.csv", "metrics.json", "heartbeat_rank0.jsonl"),
        *("k_stats.csv", "curves.png", "samples/before.txt", "samples/after.txt", "report.html"),
    }


_CHECKPOINT_FILES = ("config.toml", "manifest.json", "model.safetensors", "optimizer.safetensors")


def test_training_csv_has_a_header_and_a_real_gradient_norm(tiny_run: RunDirectory) -> None:
    assert tiny_run.training.read_text().splitlines()[0] == "step,loss,ppl,lr,toks_per_s,grad_norm,fetch_ms"
    rows = _table(tiny_run.training)
    assert [int(row["step"]) for row in rows] == [1, 2, 3, 4, 5]
    for row in rows:
        values = {name: float(value) for name, value in row.items()}
        assert all(math.isfinite(value) for value in values.values())
        assert values["grad_norm"] > 1e-3
        assert values["toks_per_s"] > 0
        assert values["ppl"] == pytest.approx(math.exp(values["loss"]), rel=1e-4)
    assert len({row["grad_norm"] for row in rows}) == 5


def test_val_csv_starts_at_step_0_and_ends_at_the_last(tiny_run: RunDirectory) -> None:
    assert tiny_run.validation.read_text().splitlines()[0] == "step,val_loss,ppl"
    rows = _table(tiny_run.validation)
    assert [int(row["step"]) for row in rows] == [0, 3, 5]
    assert float(rows[0]["val_loss"]) == pytest.approx(math.log(258), abs=0.2)
    assert float(rows[-1]["val_loss"]) < float(rows[0]["val_loss"])


def test_metrics_sum_the_run_up(tiny_run: RunDirectory) -> None:
    metrics = json.loads(tiny_run.metrics.read_text())
    losses = _losses(tiny_run)
    assert (metrics["first_loss"], metrics["last_loss"]) == (losses[0], losses[-1])
    assert metrics["val_loss"] == float(_table(tiny_run.validation)[-1]["val_loss"])
    assert metrics["tokens"] == 5 * 2 * 32
    assert metrics["parameters_nsa"] > metrics["parameters_dense"] > 0
    # a Python process with torch holds hundreds of MiB, neither KiB nor GiB
    assert 100 < metrics["peak_memory_mib"] < 20_000


def test_the_heartbeat_names_every_event_and_its_units(tiny_run: RunDirectory) -> None:
    beats = _beats(tiny_run)
    assert {"boot", "progress", "step_end", "val", "save"} == {beat["msg"] for beat in beats}
    assert all({"ts", "iso", "pid", "rank", "step", "msg"} <= set(beat) for beat in beats)
    assert [beat["step"] for beat in beats if beat["msg"] == "step_end"] == [1, 2, 3, 4, 5]
    assert [beat["step"] for beat in beats if beat["msg"] == "progress"] == [1, 2, 4, 5]
    assert [beat["step"] for beat in beats if beat["msg"] == "save"] == [3, 5]
    names = {"loss", "lr", "toks_per_s", "grad_norm", "dt_fetch_s", "fetch_p50_ms", "fetch_p95_ms"}
    assert all(names <= set(beat) for beat in beats if beat["msg"] in ("step_end", "progress"))


def test_logged_steps_tell_of_gates_selection_reads_and_routes(tiny_run: RunDirectory) -> None:
    for beat in (beat for beat in _beats(tiny_run) if beat["msg"] == "progress"):
        shares = beat["gate_branch_shares"]
        assert set(shares) == {"cmp", "slc", "win"}
        assert sum(shares.values()) == pytest.approx(1, abs=1e-4)
        assert 0.5 < beat["gate_entropy_mean"] <= math.log(3) + 1e-6
        assert beat["gate_entropy_min"] <= beat["gate_entropy_mean"] + 1e-6
        assert beat["gate_collapse_frac"] == 0
        for branch in shares:
            assert 0 < beat[f"gate_mean_{branch}"] < 1
            assert beat[f"contribution_{branch}"] > 0
        # two layers, two rows of 32 tokens, one KV head
        assert beat["reads_pred"] == beat["reads_act_total"] > 0
        assert beat["routes"] == {"cmp": "sdpa", "select": "sdpa", "slc": "sdpa", "win": "sdpa"}


def test_k_stats_count_the_chosen_blocks(tiny_run: RunDirectory) -> None:
    rows = _table(tiny_run.selection)
    assert list(rows[0]) == [
        *("step", "k_mean", "k_max", "rows", "pct_at_max", "free_block_share_mean", "overlap_with_previous_query"),
    ]
    # rows of 32 tokens in blocks of 4: min(4, own + 1) is 1, 2, 3, then 4 for five blocks; no document ends inside
    assert [float(row["k_mean"]) for row in rows] == pytest.approx([(1 + 2 + 3 + 5 * 4) / 8] * 4)
    assert {row["k_max"] for row in rows} == {"4"}
    assert {row["rows"] for row in rows} == {str(2 * 2 * 32)}
    assert [float(row["pct_at_max"]) for row in rows] == pytest.approx([62.5] * 4)


def test_env_json_says_where_and_with_what(tiny_run: RunDirectory) -> None:
    environment = json.loads(tiny_run.environment.read_text())
    assert {"time", "python", "torch", "machine", "device", "commit", "packages", "routing"} <= set(environment)
    assert environment["torch"] == torch.__version__
    assert environment["routing"]["slc"].startswith("slc: sdpa (asked for: auto)")


def test_samples_show_prompts_of_held_out_text(tiny_run: RunDirectory, tiny_text: Path) -> None:
    before, after = ((tiny_run.samples / f"{name}.txt").read_text() for name in ("before", "after"))
    opening = tiny_text.read_text()[len(tiny_text.read_bytes()) * 90 // 100 :][:32]
    assert before.startswith(f"--- prompt ---\n{opening}\n--- continuation")
    assert after.startswith(f"--- prompt ---\n{opening}\n--- continuation")
    assert before != after


def test_the_dense_twin_runs_by_one_key(train: Callable[..., Any]) -> None:
    code, run = train("model.attention=dense")
    assert code == 0
    assert not run.selection.exists()
    assert all("gate_branch_shares" not in beat for beat in _beats(run))
    assert _losses(run)[-1] < _losses(run)[0]


def test_equal_seeds_repeat_a_run_exactly(train: Callable[..., Any], tiny_run: RunDirectory) -> None:
    _, again = train("train.deterministic=true")
    _, other = train("train.seed=1")
    assert _losses(again) == _losses(tiny_run)
    assert _losses(other) != _losses(tiny_run)
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("attention", ["nsa", "dense"])
def test_accumulation_is_one_larger_batch(train: Callable[..., Any], attention: str) -> None:
    _, whole = train("train.batch_size=4", f"model.attention={attention}")
    _, halves = train("train.batch_size=2", "train.accumulate=2", f"model.attention={attention}")
    assert _losses(halves) == pytest.approx(_losses(whole), rel=1e-4)
    assert [float(row["grad_norm"]) for row in _table(halves.training)] == pytest.approx(
        [float(row["grad_norm"]) for row in _table(whole.training)], rel=1e-3
    )


def test_activation_checkpointing_changes_no_loss(train: Callable[..., Any], tiny_run: RunDirectory) -> None:
    _, run = train("train.activation_checkpointing=full")
    assert _losses(run) == _losses(tiny_run)


def test_bf16_is_autocast_over_float32_weights(train: Callable[..., Any], tiny_run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    from nsa_train.checkpoint import load_model, open_checkpoint

    code, run = train("train.precision=bf16")
    assert code == 0
    assert _losses(run) != _losses(tiny_run)
    assert _losses(run) == pytest.approx(_losses(tiny_run), rel=0.02)
    assert {weight.dtype for weight in load_model(open_checkpoint(run.root)).parameters()} == {torch.float32}


def test_a_loss_that_is_not_finite_stops_before_the_weights(
    train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original, calls = Trainer._summed_loss, 0

    def spoiled(self: Trainer, forward: Any, batch: Any) -> torch.Tensor:
        nonlocal calls
        calls += torch.is_grad_enabled()
        loss = original(self, forward, batch)
        return loss * float("nan") if calls == 3 and torch.is_grad_enabled() else loss

    monkeypatch.setattr(Trainer, "_summed_loss", spoiled)
    code, run = train()
    assert code == 1
    assert "step 3: loss=nan is not finite" in capsys.readouterr().err
    assert len(_losses(run)) == 2
    assert _beats(run)[-1]["msg"] == "halt"
    assert "step 3" in _beats(run)[-1]["reason"]


def test_a_parameter_without_a_gradient_stops_the_run(
    train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The earlier system's compressed branch was a constant: its weights never got a gradient."""
    from nsa_core import NativeSparseAttention

    original = NativeSparseAttention._compress_whole

    def detached(self: NativeSparseAttention, *args: Any) -> Any:
        return tuple(None if part is None else part.detach() for part in original(self, *args))

    monkeypatch.setattr(NativeSparseAttention, "_compress_whole", detached)
    code, _ = train()
    assert code == 1
    message = capsys.readouterr().err
    assert "step 1: no gradient reaches blocks.0.attention." in message
    assert "cmp" in message or "compress" in message


def test_a_report_can_be_drawn_of_a_run_that_stopped(train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from nsa_train.cli import run_command

    def stop(self: Trainer, step: int) -> None:
        if step == 3:
            raise GuardError("enough")

    monkeypatch.setattr(Trainer, "_after_step", stop)
    code, run = train()
    assert code == 1
    assert not run.report.exists()
    assert run_command(["report", str(run.root)]) == 0
    assert "did not reach its last step" in run.report.read_text()


def test_plain_lines_elsewhere_than_on_a_terminal(train: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    train()
    lines = capsys.readouterr().out.splitlines()
    steps = [line for line in lines if line.startswith("step 000") and "loss" in line and "val_loss" not in line]
    assert len(steps) == 4
    for part in ("| loss ", "| lr 1.00e-02 |", "| toks/s ", "| grad_norm ", "| fetch ", "ms"):
        assert part in steps[0]
    model = next(line for line in lines if line.startswith("model:"))
    assert "parameters with nsa" in model
    assert "with dense" in model


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch 2.13 imports its own deprecated parts
def test_a_compiled_run_has_the_losses_of_an_eager_one(train: Callable[..., Any], tiny_run: RunDirectory) -> None:
    code, run = train("train.compile=true", "train.log_every=100")
    assert code == 0
    assert _losses(run) == pytest.approx(_losses(tiny_run), rel=1e-4)
