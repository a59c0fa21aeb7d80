"""`nsa-bench smoke`: the verdicts of nsa-train's smoke rules as a table, as files and as an exit code."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from nsa_bench.cli import run_command
from nsa_bench.smoke import smoke_table

HEADER = "step,loss,ppl,lr,toks_per_s,grad_norm,fetch_ms,step_ms,mfu,is_clipped"
FINISH = {"ts": 2.0, "msg": "finish", "step": 2}
METRICS = {"toks_per_s_median": 1000.0, "val_loss": 2.0}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The directory of a dense run of two steps whose records are sound."""
    rows = [f"{step},{loss},1,1e-3,1000.0,1.0,1.0,100.0,,0" for step, loss in ((1, 3.0), (2, 2.0))]
    (tmp_path / "training.csv").write_text("\n".join([HEADER, *rows]) + "\n")
    (tmp_path / "config.toml").write_text('[model]\nattention = "dense"\n[data]\nsource = "text"\n')
    (tmp_path / "heartbeat_rank0.jsonl").write_text(json.dumps(FINISH) + "\n")
    (tmp_path / "metrics.json").write_text(json.dumps(METRICS))
    return tmp_path


def test_verdicts_are_printed_and_written(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = ["--json", str(run / "s.json"), "--csv", str(run / "s.csv")]
    assert run_command(["smoke", str(run), "--compare-baseline", str(run / "metrics.json"), *files]) == 0
    result = json.loads((run / "s.json").read_text())
    verdicts = {verdict["rule"]: verdict["is_passed"] for verdict in result["verdicts"]}
    assert (verdicts["no NaN"], verdicts["gates"], verdicts["baseline val_loss"]) == (True, None, True)
    assert (result["run"], result["metrics"]) == (str(run), METRICS)
    assert "commit" in result["environment"]
    assert (run / "s.csv").read_text().startswith("rule,is_passed,found")
    assert "smoke" in capsys.readouterr().out


def test_a_rule_that_does_not_hold_is_exit_1(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "better.json").write_text(json.dumps({**METRICS, "val_loss": 1.8}))
    words = ["smoke", str(run), "--compare-baseline", str(run / "better.json")]
    assert run_command(words) == 1
    assert "FAIL" in capsys.readouterr().out
    assert run_command([*words, "--tolerance", "15"]) == 0
    # the file of this command carries the figures inside
    assert run_command(["smoke", str(run), "--json", str(run / "s.json")]) == 0
    assert run_command(["smoke", str(run), "--compare-baseline", str(run / "s.json")]) == 0


@pytest.mark.parametrize("name", ["metrics.json", "better.json"])
def test_results_never_replace_what_is_read(run: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    baseline = run / "better.json"
    baseline.write_text(json.dumps(METRICS))
    assert run_command(["smoke", str(run), "--compare-baseline", str(baseline), "--json", str(run / name)]) == 2
    assert "(it would be lost); name another file for results" in " ".join(capsys.readouterr().err.split())
    assert json.loads((run / name).read_text()) == METRICS


def test_a_path_with_brackets_is_shown_whole() -> None:
    assert str(smoke_table(Path("runs/lr=[a]/x[/y]"), []).title) == "smoke runs/lr=[a]/x[/y]"


def test_an_unreadable_record_is_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (run / "training.csv").open("ab") as file:
        file.write(b"\0\0\0\n")
    assert run_command(["smoke", str(run)]) == 0
    assert "line 4" in "".join(capsys.readouterr().out.split("\n"))


@pytest.mark.parametrize(
    ("words", "message"),
    [(["--tolerance", "-1"], "--tolerance=-1.0 is not a finite percentage"), (["--compare-baseline", "absent.json"], "as metrics.json")],
)
def test_a_bad_option_is_exit_2(run: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["smoke", str(run), *words]) == 2
    assert message in capsys.readouterr().err


def test_records_alone_are_judged_without_torch(run: Path) -> None:
    program = "import sys; from nsa_bench.cli import run_command; code = run_command(sys.argv[1:]); print(code, 'torch' in sys.modules)"
    words = ["smoke", str(run), "--compare-baseline", str(run / "metrics.json"), "--csv", str(run / "s.csv")]
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 False"
