"""Loss and right answers by position: buckets, and the model's own loss as their sum."""

from pathlib import Path

import pytest
import torch

from nsa_bench.ablate.plan import load_plan
from nsa_bench.ablate.trial import judge_run
from nsa_train.cli import run_command
from nsa_train.evaluation import positions
from nsa_train.run_dir import RunDirectory
from nsa_train.settings.recipe import to_toml
from nsa_train.telemetry.records import read_rows


@pytest.mark.parametrize("source", ["needle", "text"])
def test_the_buckets_add_up_to_the_loss_that_the_run_recorded(plan_file: Path, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(positions, "CHUNK", 7)
    if source == "text":
        recipe, text = plan_file.parent / "tiny.toml", plan_file.parent / "a.txt"
        text.write_text(" ".join(map(str, range(400))))
        recipe.write_text(
            recipe.read_text().replace('source = "needle"\nneedle_pairs = 2\nneedle_queries = 2', f'source = "text"\npath = "{text}"')
        )
    config = load_plan(str(plan_file)).trials[2].config
    (plan_file.parent / "trial.toml").write_text(to_toml(config))
    out = RunDirectory(plan_file.parent / "run")
    assert run_command(["run", str(plan_file.parent / "trial.toml"), "--out", str(out.root)]) == 0
    buckets = judge_run(out, config, torch.device("cpu"))
    assert all((bucket.first + 1, bucket.last + 2) == (size := bucket.first + 1, 2 * size) for bucket in buckets)
    targets = sum(bucket.targets for bucket in buckets)
    mean = sum(bucket.targets * bucket.loss for bucket in buckets) / targets
    *_, last = read_rows(out.validation)
    assert mean == pytest.approx(last["val_loss"], rel=1e-5)
    assert all(0 <= bucket.right <= 1 for bucket in buckets)
    if source == "needle":
        # three batches of two rows, two answers each, all of them in the last 16 ids
        assert targets == 12
        assert min(bucket.first for bucket in buckets) >= 15
