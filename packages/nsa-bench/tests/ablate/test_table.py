"""Means over seeds, their standard errors, and differences seed by seed."""

import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from nsa_bench.ablate.plan import Plan, Trial, Variant
from nsa_bench.ablate.table import Mean, TrialResult, ablation_table, draw, summarize, to_json, to_rows
from nsa_bench.results import TABLE_WIDTH
from nsa_bench.results import to_json as as_text
from nsa_train.settings.recipe import load_config

CONFIG = load_config("demo")
ENVIRONMENT = dict.fromkeys(("time", "cpu", "gpu", "torch", "triton", "commit"), "x")


def plan_of(*variants: Variant, baseline: str | None = "dense", seeds: tuple[int, ...] = (0, 1, 2)) -> Plan:
    return Plan(name="p", baseline=baseline, trials=tuple(Trial(variant, seed, CONFIG) for seed in seeds for variant in variants))


def result_of(variant: Variant, seed: int, loss: float, **fields: Any) -> TrialResult:
    known = {
        "steps": 10,
        "tokens": 100,
        "parameters": 7,
        "best_val_loss": loss - 1,
        "right": 0.5,
        "toks_per_s": 10.0,
        "curve": [(10, loss)],
        "by_position": [],
        "ran_on": {},
    }
    return TrialResult(variant=variant, seed=seed, val_loss=loss, **(known | fields))


def test_a_mean_has_the_standard_error_of_its_seeds() -> None:
    assert Mean.of([]) is None
    assert Mean.of([2.0]) == (2.0, None, 1)
    mean = Mean.of([1.0, 2.0, 6.0])
    assert mean is not None
    # deviations -2, -1, 3: variance 14 / 2, over three seeds
    assert mean == (3.0, pytest.approx(math.sqrt(7 / 3)), 3)


def test_an_arm_named_none_has_its_differences(capsys: pytest.CaptureFixture[str]) -> None:
    none, nsa = Variant("None"), Variant("nsa")
    table = ablation_table(plan_of(none, nsa, baseline="None"), [result_of(none, 0, 2.0), result_of(nsa, 0, 2.5)])
    [column] = [column for column in table.columns if column.header == "against None"]
    assert str([*column.cells][1]) == "+0.5000"
    without = ablation_table(plan_of(none, nsa, baseline=None), [result_of(none, 0, 2.0)])
    assert len(without.columns) == len(table.columns) - 1


def test_differences_are_taken_seed_by_seed_at_the_same_point() -> None:
    dense, other, nsa = Variant("dense", (("train.lr", 1),)), Variant("dense", (("train.lr", 2),)), Variant("nsa", (("train.lr", 1),))
    results = [result_of(dense, 0, 2.0), result_of(dense, 1, 4.0), result_of(nsa, 0, 2.5), result_of(nsa, 1, 4.7), result_of(nsa, 2, 9.0)]
    results += [result_of(other, seed, 1.0) for seed in range(3)]
    summaries = {summary.variant: summary for summary in summarize(plan_of(dense, other, nsa), results)}
    assert summaries[nsa].difference == (pytest.approx(0.6), pytest.approx(0.1), 2)
    assert summaries[nsa].val_loss == (pytest.approx(5.4), pytest.approx(1.90, abs=0.01), 3)
    assert summaries[dense].difference is None
    assert summaries[nsa].best_val_loss is not None
    assert summaries[nsa].best_val_loss.mean == pytest.approx(4.4)


def test_the_best_point_is_that_of_the_arm() -> None:
    variants = [Variant(arm, (("train.lr", rate),)) for arm in ("dense", "nsa") for rate in (1, 2)]
    losses = [3.0, 2.0, 5.0, 6.0]
    results = [result_of(variant, 0, loss) for variant, loss in zip(variants, losses, strict=True)]
    assert [summary.is_best for summary in summarize(plan_of(*variants), results)] == [False, True, True, False]


def test_what_is_not_finished_has_a_line_without_figures() -> None:
    dense, nsa = Variant("dense"), Variant("nsa")
    plan = plan_of(dense, nsa)
    content = to_json(plan, [result_of(dense, 0, 2.0)], ENVIRONMENT)
    assert (content["num_trials"], content["num_finished"]) == (6, 1)
    assert content["variants"][1] == {
        "variant": "nsa", "arm": "nsa", "parameters": None, "tokens": None, "val_loss": None, "val_loss_error": None,
        "best_val_loss": None, "best_val_loss_error": None, "right": None, "right_error": None, "toks_per_s": None,
        "toks_per_s_error": None, "difference": None, "difference_error": None, "is_best": False, "seeds": 0,
    }  # fmt: skip
    rows = to_rows(plan, [result_of(dense, 0, 2.0, ran_on=ENVIRONMENT)])
    assert [(row["variant"], row["val_loss"], row["commit"]) for row in rows] == [("dense", 2.0, "x"), ("nsa", None, None)]


def test_trials_of_several_machines_are_not_said_to_be_of_one() -> None:
    dense, nsa = Variant("dense"), Variant("nsa")
    elsewhere = {**ENVIRONMENT, "gpu": "y", "commit": "z", "time": "y"}
    results = [
        result_of(dense, 0, 2.0, ran_on=ENVIRONMENT),
        result_of(dense, 1, 2.0, ran_on=elsewhere),
        result_of(nsa, 0, 2.0, ran_on=elsewhere),
    ]
    rows = to_rows(plan_of(dense, nsa), results)
    assert [(row["gpu"], row["cpu"], row["commit"], row["time"]) for row in rows] == [
        ("several", "x", "several", "y"),
        ("y", "x", "z", "y"),
    ]
    assert [row["toks_per_s"] for row in rows] == [None, 10.0]
    assert "the trials differ in gpu, commit: see ran_on" in str(ablation_table(plan_of(dense, nsa), results).caption)
    assert ablation_table(plan_of(dense, nsa), results[1:]).caption is None


def test_a_point_of_infinity_is_written() -> None:
    variant = Variant("nsa", (("train.grad_clip", math.inf),))
    content = to_json(plan_of(variant, baseline=None), [result_of(variant, 0, 2.0)], ENVIRONMENT)
    assert json.loads(as_text(content))["variants"][0]["train.grad_clip"] == "inf"


def test_a_plan_without_a_baseline_compares_nothing() -> None:
    plan = plan_of(Variant("a"), Variant("b"), baseline=None)
    results = [result_of(Variant("a"), 0, 1.0), result_of(Variant("b"), 0, 2.0)]
    assert [summary.difference for summary in summarize(plan, results)] == [None, None]
    assert not [column for column in ablation_table(plan, results).columns if "against" in str(column.header)]


def test_a_table_in_a_log_has_every_name_and_figure() -> None:
    variants = [Variant("dense", (("train.lr", 0.001),)), Variant("slc and win, l = 8, d = 4", (("train.lr", 0.001),))]
    figures = {"tokens": 200_015_872, "parameters": 999_999, "right": 0.83, "toks_per_s": 433_294.0}
    results = [result_of(variant, seed, 0.5864 + 0.01 * seed, **figures) for variant in variants for seed in range(3)]
    screen = Console(file=io.StringIO(), width=TABLE_WIDTH)
    screen.print(ablation_table(plan_of(*variants), results))
    shown = screen.file.getvalue()
    assert "…" not in shown
    lines = [line for line in shown.splitlines() if "│" in line]
    assert all(line.endswith("│") for line in lines)
    cells = [[cell.split() for cell in line.split("│")] for line in lines]
    columns = [" ".join(word for cell in column for word in cell) for column in zip(*cells, strict=True)]
    assert columns[1] == "dense, lr=0.001 * slc and win, l = 8, d = 4, lr=0.001 *"
    assert columns[2:6] == ["999,999 999,999", "200.0M 200.0M", "3 3", "0.5964 ± 0.0058 0.5964 ± 0.0058"]
    assert columns[7:10] == ["+0.0000 ± 0.0000", "0.830 ± 0.000 0.830 ± 0.000", "433,294 433,294"]


@pytest.mark.parametrize(("baseline", "drawn"), [("dense", [[0.0, 0.0], [0.5, -0.25]]), (None, [[4.0, 3.0], [7 / 3, 7 / 4]])])
def test_losses_by_position_are_drawn_as_differences_to_the_baseline_of_the_same_seed(
    baseline: str | None, drawn: list[list[float]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    backend = pytest.importorskip("matplotlib.backends.backend_agg")
    figures: list[Any] = []
    monkeypatch.setattr(backend.FigureCanvasAgg, "print_png", lambda canvas, path: figures.append(canvas.figure))
    dense, nsa = Variant("dense"), Variant("nsa")
    # seed 2 of NSA has no dense twin
    losses = {(dense, 0): (2.0, 1.0), (dense, 1): (6.0, 5.0), (nsa, 0): (1.0, 0.75), (nsa, 1): (8.0, 4.75), (nsa, 2): (-2.0, -0.25)}
    results = [
        result_of(
            variant, seed, sum(both), by_position=[{"first": 2 * index, "last": 2 * index, "loss": loss} for index, loss in enumerate(both)]
        )
        for (variant, seed), both in losses.items()
    ]
    draw(plan_of(dense, nsa, baseline=baseline), results, tmp_path / "a.png")
    by_tokens, by_position = figures[0].axes
    assert [list(line.get_ydata()) for line in by_position.lines] == [pytest.approx(one) for one in drawn]
    assert [list(line.get_xdata()) for line in by_position.lines] == [[1.0, 3.0]] * 2
    assert [line.get_label() for line in by_tokens.lines] == ["dense", "nsa"]
    assert ("difference to dense" in by_position.get_title()) == (baseline == "dense")


def test_a_curve_of_a_single_point_is_visible(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    backend = pytest.importorskip("matplotlib.backends.backend_agg")
    figures: list[Any] = []
    monkeypatch.setattr(backend.FigureCanvasAgg, "print_png", lambda canvas, path: figures.append(canvas.figure))
    dense, nsa = Variant("dense"), Variant("nsa")
    # labels at the end of a row alone, as those of needles, lie in one bucket
    results = [
        result_of(variant, seed, loss + seed, by_position=[{"first": 31, "last": 62, "loss": loss + (1 + loss) * seed}])
        for variant, loss in ((dense, 2.0), (nsa, 1.0))
        for seed in (0, 1)
    ]
    draw(plan_of(dense, nsa, baseline="dense"), results, tmp_path / "a.png")
    _, by_position = figures[0].axes
    assert [(list(line.get_ydata()), line.get_marker()) for line in by_position.lines] == [([0.0], "o"), ([-1.5], "o")]
    # nsa minus dense is -1 and -2: a mean of -1.5 with a standard error of 0.5
    assert [bar.get_segments()[0][:, 1].tolist() for bar in by_position.collections] == [[0.0, 0.0], [-2.0, -1.0]]
