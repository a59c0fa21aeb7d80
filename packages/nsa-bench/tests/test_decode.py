"""`nsa-bench decode`: steps over full caches, compared with float64, timed, and written to files."""

import csv
import json
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from nsa_bench import decode, measurement
from nsa_bench.cli import run_command
from nsa_bench.decode import DecodeResult, DecodeStep, best_of, make_decode_cases, measure_case
from nsa_bench.errors import OptionError
from nsa_bench.options import DecodeOptions
from nsa_core import BackendRegistry, BranchRequest, RoutingDecision, blocks, default_registry
from nsa_core.testing.tolerances import allowed_error

pytestmark = pytest.mark.usefixtures("once")
CPU = torch.device("cpu")
WORDS = ["--device", "cpu", "--shapes", "4/2/16/8", "--geometry", "8/4/16/4/24"]
COLUMNS = ["S", "ms_total", "ms_cmp", "ms_sel", "ms_win"]


@pytest.fixture
def once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time every call once."""
    monkeypatch.setattr(measurement, "MIN_COUNT", 1)
    monkeypatch.setattr(measurement, "MAX_COUNT", 1)


def options_of(**options: Any) -> DecodeOptions:
    return DecodeOptions(device="cpu", shapes="4/2/16/8", geometry="8/4/16/4/24", **options)


def case_of(**options: Any) -> decode.DecodeCase:
    return make_decode_cases(options_of(**options))[0]


def test_steps_are_compared_timed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = ["--json", str(tmp_path / "d.json"), "--csv", str(tmp_path / "d.csv")]
    assert run_command(["decode", *WORDS, "--context", "7,100,129", "--batch", "1,3", "--parts", "all", *files]) == 0
    with (tmp_path / "d.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0])[: len(COLUMNS)] == COLUMNS
    assert [(int(row["batch"]), int(row["S"])) for row in rows] == [(1, 7), (1, 100), (1, 129), (3, 7), (3, 100), (3, 129)]
    geometry = case_of().geometry
    for row in rows:
        expected = blocks.predicted_reads(int(row["S"]), geometry)
        assert int(row["reads_actual_decode"]) == int(row["reads_expected_decode"]) == expected
        assert float(row["error"]) <= float(row["limit"])
        assert all(float(row[name]) > 0 for name in (*COLUMNS[1:], "ms_append", "ms_attend", "ms_dense"))
        # no graph without a GPU
        assert row["graph_ms_total"] == row["reason"] == ""
    result = json.loads((tmp_path / "d.json").read_text())
    assert result["options"]["context"] == "7,100,129"
    assert "commit" in result["environment"]
    printed = capsys.readouterr()
    assert "decode, us a step" in printed.out
    assert "ms a step (compared in " in printed.err


def test_stores_of_fp8_are_checked_and_timed_as_well() -> None:
    options = options_of(context="7,100", batch="3", kv_dtype="fp8")
    for case in make_decode_cases(options):
        step = DecodeStep(case, CPU, "auto")
        assert step.slc.k.dtype == step.win.v.dtype == torch.float8_e4m3fn
        assert step.cmp.k.dtype == torch.float32
        result = measure_case(case, CPU, options)
        assert result.failure is None
        assert result.times["total"] > 0
        assert best_of(result.dense) is not None
        assert decode.to_row(result, {})["kv_dtype"] == "float8_e4m3fn"


def test_a_scale_of_fp8_that_is_wrong_fails_the_check() -> None:
    step = DecodeStep(case_of(context="100", batch="3", kv_dtype="fp8"), CPU, "auto")
    step.append()
    attend = step.attend

    def attend_with_larger_values(*args: Any, **options: Any) -> Tensor:
        assert step.slc.v_scale is not None
        step.slc.v_scale.mul_(2)
        out = attend(*args, **options)
        step.slc.v_scale.div_(2)
        return out

    step.attend = attend_with_larger_values  # type: ignore[method-assign]
    assert "out is off by" in (step.check().failure or "")


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ("total,append,attend", {"total", "append", "attend"}),
        ("win,total", {"total", "win"}),
        ("all", {"total", "append", "attend", "cmp", "sel", "win"}),
    ],
)
def test_the_parts_that_are_asked_for_are_timed_and_the_columns_of_others_are_empty(parts: str, expected: set[str]) -> None:
    options = options_of(context="100", batch="1", baseline=False, parts=parts)
    result = measure_case(make_decode_cases(options)[0], CPU, options)
    assert set(result.times) == expected
    row = decode.to_row(result, {})
    assert {name for name in (*decode.STEP_PARTS, *decode.BRANCH_PARTS) if row[f"ms_{name}"] is not None} == expected


def test_a_step_alone_is_timed_by_default() -> None:
    assert decode.parse_parts(DecodeOptions().parts) == ("total", "append", "attend")


def test_a_step_of_ours_that_cannot_be_timed_is_a_failure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken() -> None:
        raise RuntimeError("the stream is being captured")

    monkeypatch.setattr(DecodeStep, "parts", lambda self: {"total": broken})
    assert run_command(["decode", *WORDS, "--context", "100"]) == 1
    assert "100 tokens, batch 2: total: RuntimeError: the stream is being captured" in capsys.readouterr().err


def test_the_table_shows_what_dense_attention_takes_over_what_a_step_takes() -> None:
    case = case_of(context="100", batch="1")
    times = {"total": 9.0, "graph total": 0.05}
    result = DecodeResult(case=case, times=times, dense={"torch flash": 1.0, "graph torch flash": 0.1, "graph torch cuDNN": 0.2})
    table = decode.decode_table([result, DecodeResult(case=case, times=times)])
    [ratios] = [list(column.cells) for column in table.columns if column.header == "dense / step"]
    assert ratios == ["2.00", "-"]


@pytest.mark.parametrize("context", [7, 8, 30, 100, 129])
def test_the_reference_equals_the_oracle_in_float64(context: int) -> None:
    step = DecodeStep(case_of(context=str(context), batch="3", dtype="fp64"), CPU, "auto")
    step.append()
    result = step.check()
    assert result.failure is None
    assert result.error is not None
    assert result.error < 1e-12


def test_the_reference_reads_the_rows_alone_that_a_step_sees() -> None:
    step = DecodeStep(case_of(context="129", batch="1"), CPU, "auto")
    step.append()
    record = decode._Record()
    step.attend(observers=(record,))
    is_chosen = (record.block_indices[0, 0, :, :, None] == torch.arange(129) // 16).any(1)
    assert not is_chosen.all()
    for store in (step.slc.k, step.slc.v):
        store[0].masked_fill_(~is_chosen.T[:, :, None], float("nan"))
    assert step.check().failure is None


def test_the_limit_counts_the_error_of_torchs_own_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    errors: list[float] = []

    def noted(expected: Tensor, dtype: torch.dtype, torch_error: float) -> float:
        errors.append(torch_error)
        return allowed_error(expected, dtype, torch_error)

    monkeypatch.setattr(decode, "allowed_error", noted)
    options = options_of(context="100", batch="2", dtype="bf16", baseline=False)
    result = measure_case(make_decode_cases(options)[0], CPU, options)
    assert result.failure is None
    # one rounding to bf16, not a wrong reference
    assert 0 < errors[0] < 0.02
    assert result.limit is not None
    assert result.limit > 2 * errors[0]


def test_a_wrong_step_gets_no_time(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    attend = DecodeStep.attend

    def wrong(self: DecodeStep, *arguments: Any, **keywords: Any) -> Tensor:
        return attend(self, *arguments, **keywords) + 0.01

    monkeypatch.setattr(DecodeStep, "attend", wrong)
    assert run_command(["decode", *WORDS, "--context", "100", "--batch", "1"]) == 1
    assert "out is off by" in " ".join(capsys.readouterr().out.split())


def test_a_step_of_nan_is_written_as_wrong(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    attend = DecodeStep.attend
    monkeypatch.setattr(DecodeStep, "attend", lambda self, *arguments, **keywords: attend(self, *arguments, **keywords) * torch.nan)
    assert run_command(["decode", *WORDS, "--context", "100,80", "--batch", "1", "--json", str(tmp_path / "d.json")]) == 1
    rows = json.loads((tmp_path / "d.json").read_text())["rows"]
    assert [(row["S"], row["error"]) for row in rows] == [(100, "inf"), (80, "inf")]


def test_a_wrong_choice_is_no_near_tie(monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted(importance: Tensor, positions: Tensor, geometry: Any) -> Tensor:
        found = torch.tensor([0, 1, 5, 6], dtype=torch.int32)
        return found.expand(*importance.shape[:-1], -1)

    monkeypatch.setattr(decode, "choose_blocks", shifted)
    options = options_of(context="100", batch="1", baseline=False)
    result = measure_case(make_decode_cases(options)[0], CPU, options)
    assert "choices of blocks differ above the near-tie margin" in str(result.failure)
    assert result.times == {}


@pytest.mark.parametrize(("backend", "reason"), [("flash_attn", "it has no select"), ("cuda", "incapable: device cpu (needs cuda)")])
def test_a_backend_that_serves_no_step_is_refused_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], backend: str, reason: str
) -> None:
    files = ["--json", str(tmp_path / "d.json"), "--csv", str(tmp_path / "d.csv")]
    assert run_command(["decode", *WORDS, "--context", "20,40", "--batch", "1", "--backend", backend, *files]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n"), list(tmp_path.iterdir())) == ("", 1, [])
    assert f"--backend={backend!r} cannot serve what is to be measured ({backend}: " in err
    assert reason in err


def test_a_backend_that_serves_some_steps_is_not_refused(install: Any) -> None:
    install("short", SHORT)
    assert len(make_decode_cases(options_of(context="40,20", batch="1", backend="short"))) == 2
    with pytest.raises(OptionError, match="incapable: more than 32 tokens"):
        make_decode_cases(options_of(context="40", batch="1", backend="short"))


@torch.no_grad()
def test_the_check_of_a_named_backend_asks_what_the_step_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: set[BranchRequest] = set()
    asked: set[BranchRequest] = set()
    explain = BackendRegistry.explain

    def note(registry: BackendRegistry, request: BranchRequest, *name: str) -> RoutingDecision:
        checked.add(attrs.evolve(request, num_keys=1))
        return explain(registry, request, *name)

    monkeypatch.setattr(BackendRegistry, "explain", note)
    case = case_of(context="40", batch="3", backend="sdpa", kv_dtype="fp8")
    # the check gives every operation the tokens of the longest store
    monkeypatch.setattr(default_registry(), "observers", [lambda name, request, chosen: asked.add(attrs.evolve(request, num_keys=1))])
    step = DecodeStep(case, CPU, "sdpa")
    step.append()
    step.attend()
    assert checked == asked
    assert {request.operation.value for request in asked} == {"append", "cmp", "select", "slc", "win"}


SHORT = """
from nsa_core import Capability, Operation, Reason
from nsa_core.plugins import hookimpl

class Short:
    name, operation = "short", Operation.NSA
    capability = Capability()
    def reasons_against(self, request): return (Reason.incapable("more than 32 tokens"),) if request.num_keys > 32 else ()
    def preference(self, request): return -1
    def __call__(self, *operands, geometry, scale): raise NotImplementedError

@hookimpl
def nsa_branch_backends():
    return [Short()]
"""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--context", "0"], "--context has '0'"),
        (["--batch", "x"], "--batch has 'x'"),
        (["--shapes", "4/2/15/8"], "D_k is even"),
        (["--geometry", "1/2"], "is not l/d/l'/n/w"),
        (["--parts", "total,slc"], "--parts has 'slc'"),
        (["--backend", "absent"], "--backend='absent' is not installed"),
        (["--context", ""], "--context has ''"),
        (["--batch", ""], "--batch has ''"),
    ],
)
def test_options_that_cannot_be_are_exit_2(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["decode", "--device", "cpu", *words]) == 2
    assert message in capsys.readouterr().err


def test_every_option_and_column_is_on_the_reference_page() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs/reference/nsa-bench.md").read_text()
    options = options_of(context="20", batch="1")
    names = [f"--{field.name.replace('_', '-')}" for field in attrs.fields(DecodeOptions) if field.name not in ("baseline", "peers")]
    columns = list(decode.to_row(measure_case(make_decode_cases(options)[0], CPU, options), {}))
    assert [name for name in (*names, "--no-baseline", "--no-peers", *columns) if f"`{name}" not in page] == []
