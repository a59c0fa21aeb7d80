"""`--json`: one object on stdout, for success and failure, with the same exit code as without it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nsa_train.cli import run_command
from nsa_train.run_dir import RunDirectory

Ask = Callable[..., dict[str, Any]]
ENVELOPE = ["command", "exit_code", "errors"]


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Ask:
    """A function that runs a command with `--json`, checks its exit code and returns the one object that it printed."""

    def run(*words: str) -> dict[str, Any]:
        plain = run_command(words)
        capsys.readouterr()
        code = run_command([*words, "--json"])
        out = capsys.readouterr().out
        assert out.count("\n") == 1
        found: dict[str, Any] = json.loads(out, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
        assert list(found)[:3] == ENVELOPE
        assert found["exit_code"] == code == plain
        return found

    return run


def test_ls_lists_checkpoints(ask: Ask, tiny_run: RunDirectory) -> None:
    found = ask("ckpt", "ls", str(tiny_run.root))
    assert (found["command"], found["exit_code"], found["errors"], found["warnings"]) == ("ckpt ls", 0, [], [])
    first, last = found["checkpoints"]
    assert list(first) == ["name", "path", "step", "is_latest", "created", "size_bytes", "problem"]
    assert [(one["name"], one["step"], one["is_latest"]) for one in (first, last)] == [("step-3", 3, False), ("step-5", 5, True)]
    assert first["size_bytes"] > 10_000
    assert first["problem"] is None


def test_verify_tells_whole_ones_from_damaged_ones(ask: Ask, tiny_run: RunDirectory, tmp_path: Path) -> None:
    whole = ask("ckpt", "verify", str(tiny_run.root))
    assert [(one["name"], one["is_whole"], one["problem"]) for one in whole["checkpoints"]] == [
        ("step-3", True, None),
        ("step-5", True, None),
    ]
    (tmp_path / "step-3").mkdir()
    damaged = ask("ckpt", "verify", str(tmp_path))
    assert damaged["exit_code"] == 1
    [one] = damaged["checkpoints"]
    assert (one["is_whole"], one["size_bytes"]) == (False, None)
    assert "manifest.json" in one["problem"]


def test_preflight_gives_what_stands_for_and_against_a_run(ask: Ask, tiny_recipe: Path, tmp_path: Path) -> None:
    words = ["preflight", str(tiny_recipe), "--out", str(tmp_path / "out"), "--set", "train.device=cpu"]
    found = ask(*words)
    assert list(found) == [*ENVELOPE, "out", "passed", "needs", "warned", "failed", "routes", "memory_estimate_gib"]
    assert (found["exit_code"], found["failed"]) == (0, [])
    assert found["routes"]["slc"] == "sdpa"
    assert 0 < found["memory_estimate_gib"] < 100
    refused = ask(*words, "--set", "nsa.backends.slc=nosuch")
    assert refused["exit_code"] == 2
    assert refused["errors"] == []
    assert refused["failed"][0].startswith("nsa.backends.slc='nosuch' is not installed")


def test_loader_check_gives_its_figures(ask: Ask, tiny_recipe: Path) -> None:
    found = ask("loader-check", str(tiny_recipe))
    assert {"first_batch_s", "shape", "sequences", "tokens_per_s", "fetch_p50_ms", "fetch_p95_ms", "first_tokens"} < set(found)
    assert {"data_source", "data_synthetic", "data_bad_records", "data_documents", "data_consumed_hash"} < set(found)
    assert found["shape"] == [1, 64]
    assert "bottles" in found["first_tokens"]


def test_watch_gives_where_a_run_stands(ask: Ask, tiny_run: RunDirectory, tmp_path: Path) -> None:
    found = ask("watch", "--once", str(tiny_run.root))
    assert list(found) == [*ENVELOPE, "step", "num_ranks", "has_ended", "anomalies", "unhealthy", "halts", "lines"]
    assert (found["step"], found["num_ranks"], found["has_ended"], found["anomalies"], found["halts"]) == (5, 1, True, [], [])
    assert found["lines"][-1] == "watch: nothing is wrong; the run ended at step 5"
    event = {"msg": "halt", "ts": 1.0, "step": 7, "rank": 0, "code": 4, "reason": "the loss is not finite"}
    (tmp_path / "heartbeat_rank0.jsonl").write_text(json.dumps(event) + "\n")
    halted = ask("watch", "--once", str(tmp_path))
    assert halted["exit_code"] == 4
    assert halted["halts"] == [{"rank": 0, "exit_code": 4, "reason": "the loss is not finite"}]


def test_watch_gives_what_is_wrong(ask: Ask, tmp_path: Path) -> None:
    steps = [{"msg": "progress", "ts": float(step), "step": step, "rank": 0, "loss": 2.0, "grad_norm": 0.0} for step in (1, 2, 3)]
    (tmp_path / "heartbeat_rank0.jsonl").write_text("".join(json.dumps(event) + "\n" for event in steps))
    found = ask("watch", "--once", str(tmp_path))
    assert found["exit_code"] == 4
    assert ("zero_gradients", 0, 3) in [(one["kind"], one["rank"], one["step"]) for one in found["anomalies"]]
    assert {"kind", "rank", "step", "detail"} == set(found["anomalies"][0])


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["ckpt", "ls", "no/such"], "DIR='no/such' holds no checkpoints"),
        (["ckpt", "verify", "no/such"], "PATH='no/such' holds no checkpoint ("),
        (["watch", "--once", "no/such"], "DIR='no/such' is no run"),
        (["preflight", "demo", "--set", "lr=3"], "did you mean --set train.lr=3?"),
        (["preflight", "no/such"], "RECIPE='no/such' is neither"),
        (["loader-check", "showcase"], "data.path=None does not name a file"),
        (["ckpt", "ls"], "requires an argument"),
        (["preflight", "demo", "--nope"], "Unknown option"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_failure_is_an_object_too(ask: Ask, words: list[str], error: str) -> None:
    found = ask(*words)
    assert found["command"] == " ".join(
        word for word in words[:2] if word in ("ckpt", "ls", "verify", "watch", "preflight", "loader-check")
    )
    assert found["exit_code"] == 2
    assert error in found["errors"][0]


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_stays_help(capsys: pytest.CaptureFixture[str], flag: str) -> None:
    assert run_command(["preflight", flag, "--json"]) == 0
    assert "Usage: nsa-train preflight" in capsys.readouterr().out


def test_a_watch_without_an_end_has_no_object(capsys: pytest.CaptureFixture[str], tiny_run: RunDirectory) -> None:
    assert run_command(["watch", str(tiny_run.root), "--json"]) == 2
    [error] = json.loads(capsys.readouterr().out)["errors"]
    assert error == "--json without --once has no result to print (it prints one object at the end); use --once --json"


def test_a_figure_that_json_cannot_spell_is_null(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tiny_recipe: Path
) -> None:
    monkeypatch.setattr("nsa_train.data.loader_check.LoaderFigures.content", lambda _: {"nested": {"list": [1.5, float("nan")]}})
    assert run_command(["loader-check", str(tiny_recipe), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["nested"] == {"list": [1.5, None]}
