"""`nsa-bench thresholds` and `fa2-sweep`: least lengths and knees, from times."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from nsa_bench import measurement, thresholds
from nsa_bench.cases import SHAPES, Case, parse_geometry
from nsa_bench.cli import run_command
from nsa_bench.fa2_sweep import curves_of, rate_of
from nsa_bench.measurement import Direction, Job, Measurement, Setup, Timing
from nsa_bench.options import SweepOptions, ThresholdOptions
from nsa_bench.routes import RouteRecorder
from nsa_bench.thresholds import Threshold, make_threshold_plan, thresholds_of, to_dict, write_table
from nsa_core import BranchRequest, explain_routing
from nsa_core.backends.thresholds import read_table
from nsa_core.blocks import causal_pairs

WINDOW = """
from nsa_core import Capability, Operation
from nsa_core.plugins import hookimpl
from nsa_core.reference.sdpa import SDPABackend

class Window:
    name, operation, capability = "third", Operation.WIN, Capability()
    def reasons_against(self, request): return ()
    def preference(self, request): return -5
    def __call__(self, *operands, geometry, scale):
        return SDPABackend(operation=Operation.WIN)(*operands, geometry=geometry, scale=scale)

@hookimpl
def nsa_branch_backends():
    return [Window()]
"""


@pytest.fixture
def once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time every call once."""
    monkeypatch.setattr(measurement, "MIN_COUNT", 1)
    monkeypatch.setattr(measurement, "MAX_COUNT", 1)


def measured(implementation: str, length: int, ms: float | None, *, operation: str = "win") -> Measurement:
    timing = None if ms is None else Timing.of([ms])
    case = Case(shape=SHAPES["S"], seq_len=length, dtype=torch.float32)
    return Measurement(case=case, operation=operation, direction=Direction.FORWARD, implementation=implementation, timing=timing)


@pytest.mark.parametrize(
    ("ratios", "least"),
    [
        ({128: 1.3, 256: 1.5}, 128),
        ({128: 1.3, 256: 1.1, 512: 1.25, 1024: 1.2}, 512),
        ({128: 1.3, 256: 1.19}, None),
        ({128: None, 256: float("inf")}, 256),
        ({128: 1.3, 256: None}, None),
    ],
)
def test_a_threshold_holds_at_every_longer_length(ratios: dict[int, float | None], least: int | None) -> None:
    one = Threshold(
        operation="win", direction=Direction.FORWARD, shape=SHAPES["S"], backend="a", against="sdpa", margin=1.2, ratios=ratios
    )  # fmt: skip
    assert one.min_length == least


def test_kernels_are_compared_with_the_reference_and_with_each_other() -> None:
    times = {"sdpa": {128: 1.0, 256: None}, "a": {128: 0.9, 256: 1.0}, "b": {128: 1.0, 256: 0.9}}
    found = thresholds_of([measured(name, length, ms) for name, by_length in times.items() for length, ms in by_length.items()])
    assert {(one.backend, one.against): (one.margin, one.min_length) for one in found} == {
        ("a", "sdpa"): (1.2, 256), ("b", "sdpa"): (1.2, 256), ("a", "b"): (1.05, None), ("b", "a"): (1.05, 256),
    }  # fmt: skip


@pytest.mark.usefixtures("once")
def test_the_table_is_written(install: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install("third", WINDOW)
    words = [
        "--device",
        "cpu",
        "--shapes",
        "4/2/16/8",
        "--geometry",
        "8/4/16/4/24",
        "--lengths",
        "96,48",
        "--operations",
        "win",
        "--backends",
        "sdpa,third",
    ]
    table, whole = tmp_path / "t.json", tmp_path / "w.json"
    assert run_command(["thresholds", *words, "--write", str(table), "--json", str(whole)]) == 0
    # others may route by it
    assert table.stat().st_mode & 0o777 == 0o644
    written = json.loads(table.read_text())
    assert written["margins"] == {"reference": 1.2, "kernel": 1.05}
    assert {(row["backend"], row["against"], row["direction"]) for row in written["rows"]} == {
        ("third", "sdpa", "fwd"),
        ("third", "sdpa", "fwd+bwd"),
    }
    assert all(list(row["ratios"]) == ["48", "96"] for row in written["rows"])
    by_name = {
        (row["seq_len"], row["implementation"]): row for row in json.loads(whole.read_text())["measured"] if row["direction"] == "fwd"
    }
    for row in written["rows"][:1]:
        for length in (48, 96):
            expected = by_name[length, "sdpa"]["median_ms"] / by_name[length, "third"]["median_ms"]
            assert row["ratios"][str(length)] == pytest.approx(expected)
    assert "thresholds" in capsys.readouterr().out


@pytest.mark.usefixtures("once")
def test_a_wrong_kernel_is_exit_1(install: Any, capsys: pytest.CaptureFixture[str]) -> None:
    install("wrong", WINDOW.replace("geometry=geometry, scale=scale)", "geometry=geometry, scale=scale) * 1.5").replace("third", "wrong"))
    words = ["--shapes", "4/2/16/8", "--geometry", "8/4/16/4/24", "--lengths", "48", "--operations", "win", "--backends", "sdpa,wrong"]
    assert run_command(["thresholds", "--device", "cpu", *words]) == 1
    assert "of 4 results are wrong or failed; the output above says why" in " ".join(capsys.readouterr().err.split())


def test_without_a_kernel_there_is_no_threshold(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    code = run_command(["thresholds", "--device", "cpu", "--lengths", "8", "--shapes", "3/3/5/5", "--operations", "slc"])
    assert code == 2
    assert "no installed kernel serves" in capsys.readouterr().err


def test_rates_count_the_causal_pairs_and_knees_the_best_rate() -> None:
    shape = SHAPES["S"]
    one = measured("flash", 256, 2.0, operation="dense")
    work = 2 * shape.num_heads * causal_pairs(256) * 128
    assert rate_of(one) == pytest.approx(work / 2e-3 / 1e12)
    assert rate_of(attrs.evolve(one, direction=Direction.BOTH)) == pytest.approx(3.5 * work / 2e-3 / 1e12)
    # rates 1 : 1.9 : 2 of that length's
    times = {128: causal_pairs(128) / 1.0, 256: causal_pairs(256) / 1.9, 512: causal_pairs(512) / 2.0, 1024: None}
    (curve,) = curves_of([measured("flash", length, ms, operation="dense") for length, ms in times.items()])
    assert curve.knee == 256
    assert list(curve.rates) == [128, 256, 512]


@pytest.mark.usefixtures("once")
def test_dense_attention_is_swept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "s.json"
    assert run_command(["fa2-sweep", "--device", "cpu", "--head-dims", "16,24", "--lengths", "32,64", "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    assert {(knee["kernel"], knee["head_dim"], knee["dtype"]) for knee in found["knees"]} == {
        ("SDPA flash", 16, "float32"),
        ("SDPA flash", 24, "float32"),
    }
    assert all(row["tflops"] > 0 for row in found["rows"] if row["implementation"] == "SDPA flash")
    assert "SDPA cuDNN: runs on CUDA devices only" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["thresholds", "--operations", "x"], "--operations has 'x'"),
        (["thresholds", "--backends", "absent"], "--backends has 'absent'"),
        (["thresholds", "--seconds", "0"], "--seconds=0 is no time"),
        (["thresholds", "--seconds", "-3"], "--seconds=-3 is no time"),
        (["thresholds", "--seconds", "nan"], "--seconds=nan is no time"),
        (["thresholds", "--seconds", "inf"], "--seconds=inf is no time"),
        (["thresholds", "--write", "absent.json", "--json", "absent.json"], "'absent.json' is the file of other results"),
        (["fa2-sweep", "--head-dims", "0"], "--head-dims has '0'"),
        (["fa2-sweep", "--dtypes", "int8"], "--dtypes has 'int8'"),
        (["fa2-sweep", "--baseline", "none"], "--baseline=none leaves nothing to time"),
    ],
)
def test_options_that_cannot_be_are_exit_2(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command([*words, "--device", "cpu"]) == 2
    assert message in capsys.readouterr().err


def test_every_option_is_on_the_reference_page() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs/reference/nsa-bench.md").read_text(encoding="utf-8")
    names = [f"--{field.name.replace('_', '-')}" for kind in (ThresholdOptions, SweepOptions) for field in attrs.fields(kind)]
    assert [name for name in names if f"`{name}" not in page and name != "--backward"] == []


@pytest.fixture
def own_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path of the user's own table, which does not exist."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    return tmp_path / "torch/nsa/thresholds.json"


@pytest.mark.usefixtures("once")
def test_write_without_a_name_adds_to_the_table_that_routing_reads(install: Any, own_table: Path) -> None:
    install("third", WINDOW)
    words = ["thresholds", "--device", "cpu", "--geometry", "8/4/16/4/24", "--operations", "win", "--backends", "sdpa,third"]
    assert run_command([*words, "--shapes", "4/2/16/8", "--lengths", "48", "--write"]) == 0
    assert run_command([*words, "--shapes", "2/2/8/8", "--lengths", "48", "--write", "--no-backward"]) == 0
    assert run_command([*words, "--shapes", "4/2/16/8", "--lengths", "32,64", "--write", "--no-backward"]) == 0
    rows = json.loads(own_table.read_text())["rows"]
    assert [(row["num_heads"], row["direction"], list(row["ratios"])) for row in rows] == [
        (4, "fwd+bwd", ["48"]), (2, "fwd", ["48"]), (4, "fwd", ["32", "64"]),
    ]  # fmt: skip
    assert all(row["torch"] == torch.__version__ and row["compute_capability"] is None for row in rows)
    assert [path.name for path in own_table.parent.iterdir()] == ["thresholds.json"]
    request = BranchRequest(
        operation="win", geometry=parse_geometry("8/4/16/4/24"), num_heads=4, num_kv_heads=2, head_dim_qk=16, head_dim_v=8
    )  # fmt: skip
    [entry] = read_table(own_table).of(request, "third")
    assert (entry.against, entry.max_length) == ("sdpa", 64)


@pytest.mark.parametrize(("length", "chosen"), [(1024, "triton"), (4096, "flash_attn"), (8192, "flash_attn")])
def test_routing_reads_what_the_verb_wrote(length: int, chosen: str, own_table: Path) -> None:
    times = {
        "sdpa": {1024: 9.0, 4096: 90.0}, "triton": {1024: 1.0, 4096: 4.0}, "flash_attn[torch]": {1024: 1.0, 4096: 3.0},
        "flash_attn": {1024: 0.9, 4096: 2.9},
    }  # fmt: skip
    plan = make_threshold_plan(ThresholdOptions(device="cpu", dtype="bf16", shapes="L", lengths="1k,4k"))
    found = thresholds_of(
        [
            attrs.evolve(measured(name, tokens, ms), case=attrs.evolve(plan.cases[0], seq_len=tokens))
            for name, by_length in times.items()
            for tokens, ms in by_length.items()
        ]
    )
    own_table.parent.mkdir(parents=True)
    write_table(own_table, [], [{"compute_capability": "8.0", **to_dict(one, plan)} for one in found])
    request = BranchRequest(
        operation="win", device_type="cuda", compute_capability=(8, 0), dtype=torch.bfloat16, kv_dtype=torch.bfloat16,
        num_queries=length, num_keys=length, num_heads=32, num_kv_heads=8, head_dim_qk=128, head_dim_v=128,
    )  # fmt: skip
    decision = explain_routing(request, registry=RouteRecorder.of_installed())
    assert decision.chosen == chosen, str(decision)


class Clock:
    """Time that passes while a backend is timed, and a list of what was timed."""

    def __init__(self, ms: dict[str, dict[int, float]], seconds: float = 1.0) -> None:
        self.now, self.seconds, self.ms = 100.0, seconds, ms
        self.timed: list[tuple[str, int]] = []
        self.jobs: list[Job] = []

    def run_jobs(self, jobs: tuple[Job, ...], setup: Setup) -> Iterator[Measurement]:
        [job] = jobs
        assert not isinstance(setup.backend, str)
        [(operation, name)] = setup.backend.items()
        self.now += self.seconds
        self.timed.append((name, job.case.seq_len))
        self.jobs.append(job)
        for direction in job.directions:
            timing = Timing.of([self.ms[name][job.case.seq_len]])
            yield Measurement(case=job.case, operation=operation, direction=direction, implementation=name, timing=timing)


LENGTHS = (32, 64, 128, 256, 512)
CLOCKED = ["thresholds", "--device", "cpu", "--operations", "win", "--no-backward", "--lengths", ",".join(map(str, LENGTHS))]


@pytest.fixture
def clocked(install: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[Clock], Clock]:
    """Give a function that makes the command run by a clock; there are the backends `third` and `fourth`."""
    install("third", WINDOW)
    install("fourth", WINDOW.replace('"third"', '"fourth"'))

    def clocked(clock: Clock) -> Clock:
        monkeypatch.setattr(thresholds, "monotonic", lambda: clock.now)
        monkeypatch.setattr(thresholds, "run_jobs", clock.run_jobs)
        return clock

    return clocked


def by_length(*ms: float) -> dict[int, float]:
    return dict(zip(LENGTHS, ms, strict=True))


def test_a_backend_far_behind_is_left_out_at_longer_lengths(
    clocked: Callable[[Clock], Clock], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # the reference is at least 5 times as slow from 64 tokens on; `fourth` starts at 9 times and comes closer
    ms = {"sdpa": by_length(1, 5, 9, 9, 9), "third": by_length(1, 1, 1, 1, 1), "fourth": by_length(9, 8, 6, 5, 0.5)}
    clock, table = clocked(Clock(ms)), tmp_path / "t.json"
    words = [*CLOCKED, "--shapes", "4/2/16/8", "--backends", "sdpa,third,fourth", "--write", str(table)]
    assert run_command(words) == 0
    assert [length for name, length in clock.timed if name == "sdpa"] == [32, 64, 128]
    assert [length for name, length in clock.timed if name == "fourth"] == list(LENGTHS)
    assert "win fwd, 4/2/16/8: sdpa takes 9.0 times the best at 128 tokens" in capsys.readouterr().err
    rows = {(row["backend"], row["against"]): (row["min_length"], row["max_length"]) for row in json.loads(table.read_text())["rows"]}
    assert rows["third", "sdpa"] == (64, 128)
    assert rows["fourth", "third"] == (512, 512)
    # at a length the best one is timed first, and a slow call once
    assert [name for name, length in clock.timed if length == 512] == ["third", "fourth"]
    assert clock.jobs[-1].patience_ms[Direction.FORWARD] == 4.0
    assert {job.max_count for job in clock.jobs} == {10}


def test_one_slow_length_leaves_nothing_out(clocked: Callable[[Clock], Clock]) -> None:
    clock = clocked(Clock({"third": by_length(1, 1, 1, 1, 1), "fourth": by_length(1, 2, 9, 1, 1)}))
    assert run_command([*CLOCKED, "--shapes", "4/2/16/8", "--backends", "third,fourth"]) == 0
    assert [length for name, length in clock.timed if name == "fourth"] == list(LENGTHS)


def test_one_that_is_left_alone_is_not_timed(clocked: Callable[[Clock], Clock]) -> None:
    clock = clocked(Clock({"third": by_length(1, 1, 1, 1, 1), "fourth": by_length(5, 5, 5, 5, 5)}))
    assert run_command([*CLOCKED, "--shapes", "4/2/16/8", "--backends", "third,fourth"]) == 0
    assert clock.timed == [("fourth", 32), ("third", 32), ("third", 64), ("fourth", 64)]


def test_it_stops_in_time_and_keeps_what_it_has(
    clocked: Callable[[Clock], Clock], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ms, table = {"third": by_length(1, 1, 1, 1, 1), "fourth": by_length(2, 2, 2, 2, 2)}, tmp_path / "t.json"
    words = [*CLOCKED, "--shapes", "4/2/16/8,2/2/8/8", "--backends", "third,fourth", "--write", str(table)]
    # ten measurements of each shape
    clock = clocked(Clock(ms))
    assert run_command([*words, "--seconds", "14.5"]) == 0
    assert len(clock.timed) == 15
    assert "stopped after 14.5 s (--seconds)" in capsys.readouterr().err
    # of the third length one backend alone was timed
    assert written(table) == {"4/2/16/8": 512, "2/2/8/8": 64}
    # a part does not replace more than it has, and a whole shape does
    clocked(Clock(ms))
    assert run_command([*words, "--seconds", "5.5"]) == 0
    assert written(table) == {"4/2/16/8": 512, "2/2/8/8": 64}
    shorter = [word.replace("32,64,128,256,512", "32,64") for word in words]
    clocked(Clock(ms))
    # it stops in the second shape, the first is whole
    assert run_command([*shorter, "--seconds", "5.5"]) == 0
    assert written(table) == {"4/2/16/8": 64, "2/2/8/8": 64}
    clocked(Clock(ms))
    assert run_command(shorter) == 0
    assert written(table) == {"4/2/16/8": 64, "2/2/8/8": 64}


def test_the_table_is_written_as_lengths_are_measured(clocked: Callable[[Clock], Clock], tmp_path: Path) -> None:
    clock, table = clocked(Clock({"third": by_length(1, 1, 1, 1, 1), "fourth": {32: 2, 64: 2, 128: 2}})), tmp_path / "t.json"
    # a crash at 256 tokens
    with pytest.raises(KeyError):
        run_command([*CLOCKED, "--shapes", "4/2/16/8", "--backends", "third,fourth", "--write", str(table)])
    assert clock.timed[-1] == ("fourth", 256)
    assert written(table) == {"4/2/16/8": 128}


def written(table: Path) -> dict[str, int]:
    """Return the longest length of each shape."""
    assert read_table(table).problem is None
    return {row["shape"]: row["max_length"] for row in json.loads(table.read_text())["rows"]}


def test_a_file_that_is_no_table_is_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("mine")
    assert run_command(["thresholds", "--device", "cpu", "--write", str(notes)]) == 2
    assert "is damaged or no table of thresholds" in " ".join(capsys.readouterr().err.split())
    assert run_command(["thresholds", "--device", "cpu", "--write", str(notes), "b"]) == 2
    assert "--write has 2 values" in capsys.readouterr().err
    assert notes.read_text() == "mine"
