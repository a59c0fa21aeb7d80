"""Files and tables of a run."""

import csv
import io
import json

import pytest
import torch
from attrs import evolve
from rich.console import Console

from nsa_bench.attention.plan import Plan
from nsa_bench.attention.run import run_plan
from nsa_bench.attention.targets import Target, target_jobs
from nsa_bench.cases import SHAPES, Case, head_shape, parse_geometry
from nsa_bench.measurement import Direction, Measurement, Setup, Timing
from nsa_bench.options import ResultFiles
from nsa_bench.reporting import collect, measured_rows, progress_line
from nsa_bench.results import Output, number
from nsa_bench.routes import RouteRecorder

CASE = Case(shape=SHAPES["S"], seq_len=64, dtype=torch.float32)
ONE = Measurement(
    case=CASE,
    operation="nsa",
    direction=Direction.FORWARD,
    implementation="sdpa",
    timing=Timing(median_ms=1.0, min_ms=1.0, max_ms=1.0, count=10),
)


@pytest.fixture
def console():
    return Console(file=io.StringIO(), width=120)


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0.012341, "0.01234"), (-3.0, "-3"), (9999.4, "9999"), (9999.6, "10,000"), (15094.3, "15,090"), (-2.5e6, "-2,500,000")],
)
def test_figures_have_four_digits_and_no_exponent_above_ten_thousand(value, text):
    assert number(value) == text


def test_a_run_that_is_cut_off_leaves_what_it_measured(tmp_path, console):
    def found():
        yield ONE
        yield evolve(ONE, operation="win")
        raise KeyboardInterrupt

    files = ResultFiles(json_file=tmp_path / "a.json", csv_file=tmp_path / "a.csv")
    with pytest.raises(KeyboardInterrupt):
        collect(found(), {"lengths": "64"}, Output(files, screen=console, progress=console), progress_line, measured_rows)
    assert [row["operation"] for row in json.loads((tmp_path / "a.json").read_text())["rows"]] == ["nsa", "win"]
    with (tmp_path / "a.csv").open(newline="") as file:
        assert [row["operation"] for row in csv.DictReader(file)] == ["nsa", "win"]
    assert "win fwd on sdpa: 1 ms" in console.file.getvalue()


def test_a_file_that_cannot_be_written_is_reported_before_anything_runs(tmp_path):
    def found():
        raise AssertionError
        yield ONE

    with pytest.raises(OSError, match="missing"):
        collect(found(), {}, Output(ResultFiles(json_file=tmp_path / "missing" / "a.json")), progress_line, measured_rows)
    with pytest.raises(IsADirectoryError):
        collect(found(), {}, Output(ResultFiles(csv_file=tmp_path)), progress_line, measured_rows)


def test_a_given_commit_stands_for_the_checkouts():
    assert Output(ResultFiles(), "abc").environment["commit"] == "abc"
    assert Output(ResultFiles()).environment["commit"] != "abc"


def test_targets_are_judged_in_table_and_file(tmp_path, console):
    shape = head_shape(4, 2, 16, 16)
    targets = tuple(Target(shape=shape, seq_len=64, direction=direction, must=1e9, aim=1e-9) for direction in Direction)
    memory = Target(shape=shape, seq_len=64, direction=Direction.BOTH, must=2.0, aim=1.4, is_memory=True)
    jobs = tuple(
        evolve(job, case=evolve(job.case, geometry=parse_geometry("8/4/8/4/12"))) for job in target_jobs((*targets, memory), ("flash",))
    )
    plan = Plan(device=torch.device("cpu"), jobs=jobs, targets=(*targets, memory))
    output = Output(ResultFiles(json_file=tmp_path / "t.json"), screen=console, progress=console)
    measurements = run_plan(plan, Setup(device=plan.device, registry=RouteRecorder.of_installed()), {}, output)
    assert {one.operation for one in measurements} == {"nsa", "dense"}
    text = console.file.getvalue()
    assert "targets on one H200" in text
    assert "memory is measured on CUDA devices only" in text
    judged = json.loads((tmp_path / "t.json").read_text())["targets"]
    assert [(one["verdict"], one["unit"]) for one in judged] == [("must", "ms"), ("must", "ms"), ("no figure", "x tensors")]
    assert judged[0]["measured"] > 0
