"""The directory of a finished run: every file, every column and field, units in the names."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nsa_train.cli import run_command
from nsa_train.run_dir import RunDirectory


def test_a_run_leaves_the_documented_files(tiny_run: Any) -> None:
    names = {path.relative_to(tiny_run.root).as_posix() for path in tiny_run.root.rglob("*") if path.is_file()}
    assert {name for name in names if not name.startswith(("checkpoints/", "tb/"))} == {
        *("config.toml", "env.json", "training.csv", "val.csv", "metrics.json", "heartbeat_rank0.jsonl"),
        *("k_stats.csv", "fallback_counters.csv", "curves.png", "samples/before.txt", "samples/after.txt", "report.html"),
    }
    assert (tiny_run.checkpoints / "latest").is_dir()
    assert any(name.startswith("tb/events.out.tfevents") for name in names)


def test_training_csv_has_a_header_and_a_real_gradient_norm(tiny_run: Any) -> None:
    assert (
        tiny_run.training.read_text().splitlines()[0]
        == "step,loss,ppl,lr,toks_per_s,grad_norm,fetch_ms,step_ms,tokens,mfu,is_clipped,data_synthetic"
    )
    rows = tiny_run.table(tiny_run.training)
    assert [int(row["step"]) for row in rows] == [1, 2, 3, 4, 5]
    for row in rows:
        # a CPU has no peak that MFU could be a share of
        assert row["mfu"] == ""
        values = {name: float(value) for name, value in row.items() if name != "mfu"}
        assert all(math.isfinite(value) for value in values.values())
        assert values["grad_norm"] > 1e-3
        assert values["toks_per_s"] > 0
        assert values["ppl"] == pytest.approx(math.exp(values["loss"]), rel=1e-4)
    assert len({row["grad_norm"] for row in rows}) == 5


def test_val_csv_starts_at_step_0_and_ends_at_the_last(tiny_run: Any) -> None:
    assert tiny_run.validation.read_text().splitlines()[0] == "step,val_loss,ppl"
    rows = tiny_run.table(tiny_run.validation)
    assert [int(row["step"]) for row in rows] == [0, 3, 5]
    assert float(rows[0]["val_loss"]) == pytest.approx(math.log(258), abs=0.2)
    assert float(rows[-1]["val_loss"]) < float(rows[0]["val_loss"])


def test_metrics_sum_the_run_up(tiny_run: Any) -> None:
    metrics = json.loads(tiny_run.metrics.read_text())
    losses = tiny_run.losses()
    assert (metrics["first_loss"], metrics["last_loss"]) == (losses[0], losses[-1])
    assert metrics["val_loss"] == float(tiny_run.table(tiny_run.validation)[-1]["val_loss"])
    assert metrics["tokens"] == 5 * 2 * 32
    state = json.loads((tiny_run.checkpoints / "latest" / "state.json").read_text())
    assert metrics["data_consumed_hash"] == state["data"]["consumed_hash"]
    assert metrics["parameters_nsa"] > metrics["parameters_dense"] > 0
    # a Python process with torch holds hundreds of MiB, neither KiB nor GiB
    assert 100 < metrics["peak_memory_mib"] < 20_000


def test_the_heartbeat_names_every_event_and_its_units(tiny_run: Any) -> None:
    beats = tiny_run.beats()
    assert {"boot", "progress", "step_end", "val", "save", "finish"} <= {beat["msg"] for beat in beats}
    assert all({"ts", "iso", "pid", "rank", "step", "msg"} <= set(beat) for beat in beats)
    assert [beat["step"] for beat in beats if beat["msg"] == "step_end"] == [1, 2, 3, 4, 5]
    assert [beat["step"] for beat in beats if beat["msg"] == "progress"] == [1, 2, 4, 5]
    assert [beat["step"] for beat in beats if beat["msg"] == "save"] == [3, 5]
    names = {"loss", "lr", "toks_per_s", "grad_norm", "dt_fetch_s", "fetch_p50_ms", "fetch_p95_ms", "data_bad_records"}
    assert all(names <= set(beat) for beat in beats if beat["msg"] in ("step_end", "progress"))


def test_logged_steps_tell_of_gates_selection_reads_and_routes(tiny_run: Any) -> None:
    for beat in (beat for beat in tiny_run.beats() if beat["msg"] == "progress"):
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


def test_k_stats_count_the_chosen_blocks(tiny_run: Any) -> None:
    rows = tiny_run.table(tiny_run.selection)
    assert list(rows[0]) == [
        *("step", "k_mean", "k_max", "rows", "pct_at_max", "free_block_share_mean", "overlap_with_previous_query"),
    ]
    # rows of 32 tokens in blocks of 4: min(4, own + 1) is 1, 2, 3, then 4 for five blocks; no document ends inside
    assert [float(row["k_mean"]) for row in rows] == pytest.approx([(1 + 2 + 3 + 5 * 4) / 8] * 4)
    assert {row["k_max"] for row in rows} == {"4"}
    assert {row["rows"] for row in rows} == {str(2 * 2 * 32)}
    assert [float(row["pct_at_max"]) for row in rows] == pytest.approx([62.5] * 4)


def test_env_json_says_where_and_with_what(tiny_run: Any) -> None:
    environment = json.loads(tiny_run.environment.read_text())
    assert {"time", "python", "torch", "machine", "device", "commit", "packages", "routing"} <= set(environment)
    assert environment["torch"] == torch.__version__
    assert environment["routing"]["slc"].startswith("slc: sdpa (asked for: auto)")


def test_samples_show_prompts_of_held_out_text(tiny_run: Any, tiny_text: Path) -> None:
    before, after = ((tiny_run.samples / f"{name}.txt").read_text() for name in ("before", "after"))
    opening = tiny_text.read_text()[len(tiny_text.read_bytes()) * 90 // 100 :][:32]
    assert before.startswith(f"--- prompt ---\n{opening}\n--- continuation")
    assert after.startswith(f"--- prompt ---\n{opening}\n--- continuation")
    assert before != after


def test_a_run_without_samples_draws_none(
    tmp_path: Path, tiny_recipe: Path, recorded: Callable[[Path], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from nsa_train.cli import run_command

    def draw(*arguments: Any, **named: Any) -> None:
        raise AssertionError

    monkeypatch.setattr("nsa_train.telemetry.recorder.generate", draw)
    assert run_command(["run", str(tiny_recipe), "--set", "train.samples=false", "--out", str(tmp_path / "run")]) == 0
    run = recorded(tmp_path / "run")
    assert not run.samples.exists()
    assert run.report.is_file()


def test_synthetic_data_say_so_in_every_artifact(tmp_path: Path, tiny_recipe: Path, recorded: Callable[[Path], Any]) -> None:
    from nsa_train.cli import run_command

    recipe = tmp_path / "synthetic.toml"
    recipe.write_text("\n".join("source = 'synthetic'" if line.startswith("source") else line for line in _without_path(tiny_recipe)))
    assert run_command(["run", str(recipe), "--out", str(tmp_path / "run")]) == 0
    run = recorded(tmp_path / "run")
    assert json.loads(run.environment.read_text())["data_synthetic"] is True
    assert json.loads(run.metrics.read_text())["data_synthetic"] is True
    assert {row["data_synthetic"] for row in run.table(run.training)} == {"1"}
    assert {beat["data_synthetic"] for beat in run.beats()} == {1}
    assert "synthetic data</span>" in run.report.read_text()
    assert (run.samples / "after.txt").read_text().startswith("--- synthetic data")


def _without_path(recipe: Path) -> list[str]:
    return [line for line in recipe.read_text().splitlines() if not line.startswith("path")]


def test_other_data_do_not(tiny_run: Any) -> None:
    assert {beat["data_synthetic"] for beat in tiny_run.beats()} == {0}
    assert "synthetic" not in (tiny_run.samples / "after.txt").read_text()
    assert "synthetic data</span>" not in tiny_run.report.read_text()


def test_the_first_tokens_and_a_hash_of_what_was_consumed_are_recorded(tiny_run: Any) -> None:
    metrics = json.loads(tiny_run.metrics.read_text())
    [event] = [beat for beat in tiny_run.beats() if beat["msg"] == "data"]
    assert event["data_first_tokens"] == metrics["data_first_tokens"] != []
    assert all(0 <= token < 258 for token in metrics["data_first_tokens"])
    assert metrics["data_consumed_hash"] == [beat for beat in tiny_run.beats() if beat["msg"] == "step_end"][-1]["data_consumed_hash"]


def test_without_the_extra_report_a_run_trains_and_says_what_is_missing(
    tiny_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("nsa_train.host.environment.version_of", lambda package: None)
    monkeypatch.setattr("nsa_train.telemetry.tensorboard.version_of", lambda package: None)
    paths = RunDirectory(tmp_path / "run")
    assert run_command(["run", str(tiny_recipe), "--out", str(paths.root), "--set", "train.steps=2"]) == 0
    said = capsys.readouterr().out
    assert "warn: report: jinja2, matplotlib, tensorboard not installed (the extra nsa-train[report] draws" in said
    assert "report: not drawn: jinja2" in said
    assert paths.metrics.is_file()
    assert not any(path.exists() for path in (paths.report, paths.curves, paths.tensorboard))
    assert run_command(["report", str(paths.root)]) == 2
    assert "use pip install jinja2 matplotlib tensorboard" in capsys.readouterr().err
