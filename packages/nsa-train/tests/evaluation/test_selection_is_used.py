"""A small model that was trained on needles reads them through its selected branch.

A row holds one pair of a key and a value in noise, and asks for the value at its end. Keys, values and noise are ids of three
alphabets, so that the value is the only id of its kind before the question: the model has to find the block that holds it,
and does not have to compare keys. Rows of four pairs, which ask for that, were not learnt in 0.7 million tokens. A guess is right in 1
of 64 answers.

The first layer has only the window, the second the selected branch too. A needle outside of the window and the forced blocks is
thus read through the free blocks of the asking token, for each KV head two of 62 at 1,024 tokens and two of 126 at 2,048, or not at all.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import pytest

from nsa_train.cli import run_command

SYMBOLS = 64
LENGTHS = (1024, 2048)
LEAST = {1024: 0.9, 2048: 0.8}
"""The least share of right answers of the trained model, by length; no row that it was trained on has more than 256 tokens."""
RECIPE = f"""
[model]
dim = 256
n_layers = 2
n_heads = 4
n_kv_heads = 2
head_dim_qk = 32
head_dim_v = 32
max_position = {max(LENGTHS)}
layers = [{{ branches = ["win"] }}, {{ branches = ["slc", "win"] }}]

[nsa]
kv = "shared"
compressor = "mean"
compressed_rope = "tokens"
compression_block_size = 16
compression_stride = 8
selection_block_size = 16
num_selected_blocks = 4
num_initial_blocks = 1
num_local_blocks = 1
window_size = 16
rope_theta = 1e7

[data]
source = "needle"
needle_symbols = {SYMBOLS}
needle_tokens = 1
needle_pairs = 1
needle_queries = 1

[train]
steps = 150
seq_len = 64
batch_size = 64
lr = 3e-3
warmup_steps = 20
weight_decay = 0.01
samples = false
eval_every = 1000
eval_batches = 4
log_every = 20
"""


class Stage(NamedTuple):
    """A run that begins with the weights of the one before. All steps have 4,096 tokens."""

    seq_len: int
    steps: int
    lr: float


# rows of 64 tokens are four blocks, all of which are chosen; the choice leaves blocks out in the longer ones
STAGES = (Stage(64, 150, 3e-3), Stage(128, 40, 1.5e-3), Stage(256, 30, 1e-3))


def _trained(folder: Path, stages: Sequence[Stage], *more: str) -> Path:
    """Return the run of the last of `stages`."""
    recipe, before = folder / "needle.toml", None
    recipe.write_text(RECIPE)
    for number, stage in enumerate(stages):
        out = folder / f"stage-{number}"
        sets = [f"train.seq_len={stage.seq_len}", f"train.batch_size={4096 // stage.seq_len}", *more]
        sets += [f"train.steps={stage.steps}", f"train.lr={stage.lr}", f"train.warmup_steps={min(20, stage.steps // 5)}"]
        sets += [] if before is None else [f"train.init_from={before}"]
        assert run_command(["run", str(recipe), "--out", str(out), *(word for one in sets for word in ("--set", one))]) == 0
        before = out
    assert before is not None
    return before


def _figures(run: Path, task: str, samples: int) -> list[dict[str, Any]]:
    """Return the figures of one task at `LENGTHS`, as trained and with the selected branch closed or shuffled."""
    out = run.parent / f"eval-{task}"
    modes = [word for mode in ("trained", "closed", "shuffled") for word in ("--mode", mode)]
    words = [*modes, "--tasks", task, "--lengths", ",".join(map(str, LENGTHS)), "--samples", str(samples), "--depths", "5"]
    assert run_command(["eval", str(run), "--out", str(out), *words]) == 0
    return [one for one in json.loads((out / "eval.json").read_text())["figures"] if one["mode"] is not None]


def _assert_selection_is_used(figures: Sequence[dict[str, Any]]) -> None:
    """Fail if recall is low, or remains with the selected branch closed or a random choice."""
    for length in LENGTHS:
        # the first depth lies in the initial block, and the last in the window: no choice is needed there
        ours = [one for one in figures if one["length"] == length and one["depth"] not in (0.0, 1.0)]
        trained, closed, shuffled = (
            fmean(one["value"] for one in ours if one["mode"] == mode) for mode in ("trained", "closed", "shuffled")
        )
        assert trained >= LEAST[length], (length, trained)
        assert closed <= 0.4, (length, closed)
        assert shuffled <= 0.4, (length, shuffled)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_recall_falls_where_the_selected_branch_is_closed_or_its_choice_shuffled(tmp_path: Path) -> None:
    run = _trained(tmp_path, STAGES)
    assert 1e6 < json.loads((run / "metrics.json").read_text())["parameters"] < 3e6
    # 100 and 3 x 20 questions of a mode and length
    _assert_selection_is_used(_figures(run, "mqar", 100))
    _assert_selection_is_used(_figures(run, "passkey", 20))


@pytest.mark.slow
def test_a_model_that_was_not_trained_recalls_nothing(tmp_path: Path) -> None:
    figures = _figures(_trained(tmp_path, [Stage(64, 1, 1e-3)]), "mqar", 10)
    assert max(one["value"] for one in figures) <= 0.3
    with pytest.raises(AssertionError, match=r"1024, 0\."):
        _assert_selection_is_used(figures)


@pytest.mark.parametrize(
    ("trained", "closed", "shuffled"),
    [(0.85, 0.0, 0.1), (1.0, 0.5, 0.1), (1.0, 0.0, 0.5)],
    ids=["not recalled", "recalled without the branch", "recalled with any choice"],
)
def test_recall_without_selection_is_seen(trained: float, closed: float, shuffled: float) -> None:
    """The check itself: the ends of a sequence, which need no choice, change nothing."""

    def figures(**right: float) -> list[dict[str, Any]]:
        modes = [{"mode": mode, "length": length, "depth": 0.5, "value": value} for length in LENGTHS for mode, value in right.items()]
        return [*modes, *({**one, "depth": end, "value": 1.0} for one in modes for end in (0.0, 1.0))]

    _assert_selection_is_used(figures(trained=0.95, closed=0.1, shuffled=0.2))
    with pytest.raises(AssertionError, match="1024"):
        _assert_selection_is_used(figures(trained=trained, closed=closed, shuffled=shuffled))
