"""Each smoke rule sees its fault in a run's records, and passes a sound run."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nsa_core import Operation
from nsa_train.cli import run_command as run_train
from nsa_train.errors import ConfigError
from nsa_train.loop.trainer import Trainer
from nsa_train.smoke import check_run, judge_run, read_records
from nsa_train.telemetry.layers import chosen_blocks

RECIPE = """
[model]
dim = 16
n_layers = 2
n_heads = 2
n_kv_heads = 1
head_dim_qk = 8
head_dim_v = 8
attention = "nsa"

[nsa]
compression_block_size = 4
compression_stride = 2
selection_block_size = 4
num_selected_blocks = 3
window_size = 8
gate_hidden_size = 4

[data]
source = "text"
path = "{text}"

[train]
steps = 8
seq_len = 32
batch_size = 2
lr = 1e-2
log_every = 4
"""
HEADER = "step,loss,ppl,lr,toks_per_s,grad_norm,fetch_ms,step_ms,mfu,is_clipped"
HEALTHY = {
    "ts": 1.0,
    "msg": "progress",
    "step": 10,
    "gate_entropy_mean": 0.9,
    "gate_max_gate": 0.5,
    "gate_collapse_frac": 0.0,
    "gate_branch_shares": {"cmp": 0.5, "win": 0.5},
    "k_mean": 2.5,
    "k_mean_expected": 2.5,
    "reads_pred": 100,
    "reads_act_total": 100,
    "fallbacks_total": 0,
}
FINISH = {"ts": 2.0, "msg": "finish", "step": 10}
SKIP = {"ts": 1.5, "msg": "skip", "step": 7}
METRICS = {"toks_per_s_median": 1000.0, "mfu": None, "val_loss": 2.0, "last_loss": 2.0, "peak_memory_mib": 100.0}


def _write(
    folder: Path, rows: list[dict[str, Any]], *, event: dict[str, Any] | None = None, attention: str = "nsa", source: str = "text"
) -> None:
    defaults = {"ppl": 1, "lr": 1e-3, "toks_per_s": 1000.0, "grad_norm": 1.0, "fetch_ms": 1.0, "step_ms": 100.0, "mfu": "", "is_clipped": 0}
    lines = [",".join(str({**defaults, **row, "step": step + 1}[name]) for name in HEADER.split(",")) for step, row in enumerate(rows)]
    (folder / "training.csv").write_text("\n".join([HEADER, *lines]) + "\n")
    (folder / "config.toml").write_text(f'[model]\nattention = "{attention}"\n[data]\nsource = "{source}"\n')
    _beats(folder, HEALTHY if event is None else event, FINISH)
    (folder / "metrics.json").write_text(json.dumps(METRICS))


def _beats(folder: Path, *events: dict[str, Any]) -> None:
    (folder / "heartbeat_rank0.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))


def _losses(*values: float) -> list[dict[str, Any]]:
    return [{"loss": value} for value in values]


def _verdicts(folder: Path) -> dict[str, bool | None]:
    return {verdict.rule: verdict.is_passed for verdict in check_run(read_records(folder))}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("smoke")
    (folder / "text.txt").write_text("".join(f"{number} bottles stood on wall {number * 7 % 13}.\n" for number in range(200)))
    (folder / "tiny.toml").write_text(RECIPE.format(text=folder / "text.txt"))
    assert run_train(["run", str(folder / "tiny.toml"), "--out", str(folder / "run")]) == 0
    return folder / "run"


def test_a_trained_run_passes(trained: Path) -> None:
    records, judged = judge_run(trained, baseline=trained / "metrics.json")
    verdicts = {verdict.rule: verdict for verdict in judged}
    assert {
        "no NaN",
        "loss improves",
        "throughput",
        "fetch",
        "gate_entropy_mean",
        "selection repeats",
        "baseline toks_per_s_median",
    } <= set(verdicts)
    # a step of a model this small is shorter than what a busy machine may wait for data
    assert [name for name, one in verdicts.items() if one.is_passed is False and name not in ("fetch", "throughput")] == []
    assert verdicts["selection repeats"].found == "2 of 2 layers chose the same blocks twice"
    assert records.metrics == json.loads((trained / "metrics.json").read_text())


def test_sound_records_pass_every_rule(tmp_path: Path) -> None:
    _write(tmp_path, _losses(*(3 - 0.1 * step for step in range(10))))
    verdicts = _verdicts(tmp_path)
    assert [rule for rule, is_passed in verdicts.items() if is_passed is False] == []
    assert len(verdicts) == 12
    assert verdicts["selection repeats"] is None
    assert not judge_run(tmp_path).has_failed


FAULTS: dict[str, Callable[[Path], None]] = {
    "no NaN": lambda folder: _write(folder, [*_losses(3, 2), {"loss": 1.0, "grad_norm": ""}]),
    "loss improves": lambda folder: _write(folder, _losses(*[2.0] * 9, 2.1)),
    "throughput": lambda folder: _write(folder, [*_losses(*range(20, 10, -1)), *({"loss": 1.0, "toks_per_s": 400} for _ in range(2))]),
    "fetch": lambda folder: _write(folder, [{"loss": 3.0 - step / 10, "fetch_ms": 6.0} for step in range(10)]),
    "gate_entropy_mean": lambda folder: _write(folder, _losses(3, 2), event={**HEALTHY, "gate_entropy_mean": 0.3}),
    "gate_max_gate": lambda folder: _write(folder, _losses(3, 2), event={**HEALTHY, "gate_max_gate": 0.95}),
    "k_mean": lambda folder: _write(folder, _losses(3, 2), event={**HEALTHY, "k_mean": 2.4}),
    "reads_act_total": lambda folder: _write(folder, _losses(3, 2), event={**HEALTHY, "reads_act_total": 99}),
    "fallbacks_total": lambda folder: _write(folder, _losses(3, 2), event={**HEALTHY, "fallbacks_total": 1}),
    "gates": lambda folder: _write(folder, _losses(3, 2), event={"ts": 1.0, "msg": "boot", "step": 0}),
}


@pytest.mark.parametrize("rule", FAULTS)
def test_each_fault_fails_its_rule_alone(rule: str, tmp_path: Path) -> None:
    FAULTS[rule](tmp_path)
    assert [name for name, is_passed in _verdicts(tmp_path).items() if is_passed is False] == [rule]
    assert judge_run(tmp_path).has_failed


GATES = ("gate_entropy_mean", "gate_max_gate", "gate_collapse_frac")


def _without(*names: str) -> dict[str, Any]:
    return {name: value for name, value in HEALTHY.items() if name not in names}


def test_an_nsa_run_without_figures_of_gates_fails(tmp_path: Path) -> None:
    _write(tmp_path, _losses(3, 2), event=_without(*GATES, "gate_branch_shares"))
    assert {rule: is_passed for rule, is_passed in _verdicts(tmp_path).items() if rule in GATES} == dict.fromkeys(GATES, False)
    assert judge_run(tmp_path).has_failed


@pytest.mark.parametrize(
    ("event", "rules", "reason"),
    [
        ({**HEALTHY, **dict.fromkeys(GATES)}, GATES, "no token of step 10 sees a compressed block"),
        ({**HEALTHY, "gate_branch_shares": {"win": 1.0}}, GATES, "a single branch holds every gate"),
        (_without("k_mean", "reads_pred"), ("k_mean", "reads_act_total"), "the last logged step, 10, has no such figure"),
    ],
    ids=["short rows", "one branch", "no selection"],
)
def test_a_health_rule_that_cannot_be_judged_says_so(event: dict[str, Any], rules: tuple[str, ...], reason: str, tmp_path: Path) -> None:
    _write(tmp_path, _losses(3, 2), event=event)
    unjudged = {one.rule: one.found for one in check_run(read_records(tmp_path)) if one.is_passed is None and "not judged" in one.found}
    assert unjudged == dict.fromkeys(rules, f"not judged: {reason}")


@pytest.mark.parametrize(("cause", "is_passed"), [("loss", False), ("gradient", False), ("overflow", True), ("spike", True)])
def test_a_step_skipped_for_its_numbers_is_no_row_and_still_fails(cause: str, is_passed: bool, tmp_path: Path) -> None:
    _write(tmp_path, _losses(3, 2))
    _beats(tmp_path, HEALTHY, {**SKIP, "cause": cause}, FINISH)
    [verdict] = [one for one in check_run(read_records(tmp_path)) if one.rule == "no NaN"]
    assert verdict.is_passed is is_passed
    assert is_passed or verdict.found == "not finite at step 7, 1 in all"


def test_a_skip_that_a_resume_went_back_before_does_not_count(tmp_path: Path) -> None:
    _write(tmp_path, _losses(3, 2))
    again = {"ts": 1.8, "msg": "boot", "step": 6, "resumed_at": 6}
    _beats(tmp_path, HEALTHY, {**SKIP, "cause": "loss"}, again, FINISH)
    assert _verdicts(tmp_path)["no NaN"] is True


BOOT = {"ts": 1.0, "msg": "boot", "step": 10, "pid": 2**22 + 1}


@pytest.mark.parametrize(
    ("events", "is_passed", "found"),
    [
        ([FINISH], True, "the last step was taken"),
        ([BOOT, {**FINISH, "msg": "halt", "code": 4, "reason": "nan"}], False, "stopped with exit code 4: nan"),
        ([BOOT, {**FINISH, "msg": "halt", "code": 1, "reason": "disk"}], False, "stopped with exit code 1: disk"),
        ([BOOT, {**FINISH, "msg": "halt", "code": 75, "reason": "SIGTERM"}], True, "stopped with exit code 75: SIGTERM"),
        ([BOOT, {**FINISH, "msg": "halt", "code": 4}, BOOT, FINISH], True, "the last step was taken"),
        ([BOOT], False, "broke off after step 10: its process is gone"),
        ([{**BOOT, "pid": os.getpid()}], None, "not judged: the run goes on at step 10"),
        ([{**BOOT, "ts": 4e9, "host": "elsewhere"}], None, "not judged: the run goes on at step 10"),
    ],
    ids=["finish", "guard", "crash", "asked", "resumed", "killed", "alive", "a clock ahead"],
)
def test_how_the_last_start_ended_is_judged(events: list[dict[str, Any]], is_passed: bool | None, found: str, tmp_path: Path) -> None:
    _write(tmp_path, _losses(3, 2))
    _beats(tmp_path, HEALTHY, *events)
    [verdict] = [one for one in check_run(read_records(tmp_path)) if one.rule == "ending"]
    assert (verdict.is_passed, verdict.found) == (is_passed, found)


def test_of_a_process_that_cannot_be_seen_only_what_its_records_say_is_told(tmp_path: Path) -> None:
    _write(tmp_path, _losses(3, 2))
    _beats(tmp_path, {**BOOT, "host": "elsewhere"})
    [verdict] = [one for one in check_run(read_records(tmp_path)) if one.rule == "ending"]
    assert (verdict.is_passed, verdict.found.partition(":")[0]) == (False, "records no end after step 10")
    assert verdict.found.endswith("s by its timestamps, its process not seen from here")


def test_a_run_that_its_guard_stopped_fails(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    summed, calls = Trainer._summed_loss, 0

    def spoiled(self: Trainer, forward: Any, batch: Any) -> torch.Tensor:
        nonlocal calls
        calls += self.model.training
        loss = summed(self, forward, batch)
        return loss * float("nan") if self.model.training and calls == 5 else loss

    monkeypatch.setattr(Trainer, "_summed_loss", spoiled)
    words = ["run", str(trained.parent / "tiny.toml"), "--out", str(tmp_path / "run"), "--set", "train.max_skips=0"]
    assert run_train(words) == 4
    verdicts = _verdicts(tmp_path / "run")
    assert (verdicts["no NaN"], verdicts["ending"]) == (False, False)


def test_damaged_records_are_left_out_and_named(tmp_path: Path) -> None:
    _write(tmp_path, _losses(*(3 - 0.1 * step for step in range(10))))
    with (tmp_path / "training.csv").open("ab") as file:
        file.write(b"\0\0\0\n")
    (tmp_path / "metrics.json").write_text('{"val_loss": 2.0, "las')
    found = [one.found for one in check_run(read_records(tmp_path)) if one.rule == "records"]
    assert found[0] == f"{tmp_path}/training.csv: line 12 cannot be read, and is left out"
    assert found[1].startswith(f"{tmp_path}/metrics.json cannot be read as JSON (")
    assert not judge_run(tmp_path).has_failed


def test_a_run_whose_latest_is_gone_is_judged_by_its_newest_checkpoint(trained: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(trained, tmp_path / "run", symlinks=True))
    (run / "checkpoints/latest").unlink()
    (run / "checkpoints/latest").symlink_to("step-99")
    [verdict] = [one for one in check_run(read_records(run)) if one.rule == "selection repeats"]
    assert verdict.is_passed is True


def test_what_does_not_apply_is_no_failure(tmp_path: Path) -> None:
    _write(tmp_path, _losses(5.5, 5.5), attention="dense", source="synthetic")
    verdicts = _verdicts(tmp_path)
    assert (verdicts["loss improves"], verdicts["gates"], verdicts["selection repeats"]) == (None, None, None)
    assert False not in verdicts.values()


def test_a_choice_that_no_backend_can_make_here_is_not_judged(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nsa_train.host.routing.named_backends", lambda _: {Operation.SLC: "nosuch"})
    [verdict] = [one for one in check_run(read_records(trained)) if one.rule == "selection repeats"]
    assert verdict.is_passed is None
    assert verdict.found.startswith("not judged: nsa.backends.slc='nosuch' is not installed (there is sdpa")


def test_a_choice_that_changes_is_seen(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0

    def fickle(model: Any, ids: torch.Tensor) -> list[torch.Tensor]:
        nonlocal calls
        calls += 1
        return [blocks + (calls if layer else 0) for layer, blocks in enumerate(chosen_blocks(model, ids))]

    monkeypatch.setattr("nsa_train.telemetry.layers.chosen_blocks", fickle)
    [verdict] = [one for one in check_run(read_records(trained)) if one.rule == "selection repeats"]
    assert verdict.is_passed is False
    assert verdict.found == "1 of 2 layers chose the same blocks twice"


@pytest.mark.parametrize(
    ("figure", "worse", "better"),
    [("toks_per_s_median", 1100.0, 900.0), ("val_loss", 1.8, 2.2), ("last_loss", 1.8, 2.2), ("peak_memory_mib", 90.0, 110.0)],
)
def test_a_baseline_is_held_within_its_tolerance(figure: str, worse: float, better: float, tmp_path: Path) -> None:
    _write(tmp_path, _losses(3, 2))
    baseline = tmp_path / "baseline.json"
    for before, has_failed in ((worse, True), (better, False)):
        baseline.write_text(json.dumps({**METRICS, figure: before}))
        assert judge_run(tmp_path, baseline=baseline).has_failed is has_failed
    baseline.write_text(json.dumps({**METRICS, figure: worse}))
    assert not judge_run(tmp_path, baseline=baseline, tolerance=15).has_failed
    baseline.write_text(json.dumps({"metrics": {**METRICS, figure: worse}}))
    assert judge_run(tmp_path, baseline=baseline).has_failed


def test_records_alone_are_judged_without_torch(tmp_path: Path) -> None:
    _write(tmp_path, _losses(3, 2))
    program = "import pathlib, sys; from nsa_train.smoke import judge_run; found = judge_run(pathlib.Path(sys.argv[1])); "
    program += "print(found.has_failed, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"


@pytest.mark.timeout(30)
def test_a_baseline_that_is_no_small_regular_file_is_refused(tmp_path: Path) -> None:
    _write(tmp_path, _losses(3, 2))
    baseline = tmp_path / "baseline.json"
    os.mkfifo(baseline)
    with pytest.raises(ConfigError, match=r"it is a named pipe \(FIFO\), and only a regular file of at most 16 MiB is read"):
        judge_run(tmp_path, baseline=baseline)
    baseline.unlink()
    baseline.write_text("[" * 100_000)
    with pytest.raises(ConfigError, match="its values are nested too deep"):
        judge_run(tmp_path, baseline=baseline)


def test_a_baseline_is_refused_before_the_checkpoint_is_read(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nsa_train.checkpoint.store.open_checkpoint", lambda path: pytest.fail("a checkpoint was read"))
    with pytest.raises(ConfigError, match=r"cannot be read as metrics\.json"):
        judge_run(trained, baseline=tmp_path / "absent.json")


def test_a_folder_without_a_run_and_a_file_without_figures_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no run"):
        judge_run(tmp_path)
    _write(tmp_path, _losses(3, 2))
    with pytest.raises(ConfigError, match=r"cannot be read as metrics\.json"):
        judge_run(tmp_path, baseline=tmp_path / "absent.json")
    (tmp_path / "other.json").write_text('{"speed": 1}')
    with pytest.raises(ConfigError, match="shares no figure"):
        judge_run(tmp_path, baseline=tmp_path / "other.json")
    with pytest.raises(ConfigError, match=r"--tolerance=-1\.0 is not a finite percentage"):
        judge_run(tmp_path, tolerance=-1.0)
