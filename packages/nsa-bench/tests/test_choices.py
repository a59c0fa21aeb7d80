"""`nsa-bench choices`: figures of choices that are known, and those of a trained model."""

import csv
import json
from pathlib import Path

import attrs
import pytest
import torch

from nsa_bench.choices import (
    FIRST_TILE,
    RUNS,
    Choice,
    LayerFigures,
    choosing_layers,
    first_tile_excess,
    free_distances,
    held_out,
    mean_figures,
    mean_union,
    median_bucket,
    noted_choices,
)
from nsa_bench.cli import run_command
from nsa_bench.errors import BenchError
from nsa_bench.recorded import read_recording
from nsa_core import BlockGeometry
from nsa_core.blocks import num_visible_blocks
from nsa_train.checkpoint import load_model, open_checkpoint
from nsa_train.settings.data_table import DataTable

RECIPE = """
[model]
dim = 16
n_layers = 2
n_heads = 2
n_kv_heads = 1
head_dim_qk = 8
head_dim_v = 8

[nsa]
compression_block_size = 4
compression_stride = 2
selection_block_size = 4
num_selected_blocks = 4
window_size = 8
gate_hidden_size = 4

[data]
source = "needle"
needle_pairs = 2
needle_queries = 2

[train]
steps = 1
seq_len = 48
batch_size = 2
lr = 1e-3
eval_batches = 2
samples = false
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from nsa_train.cli import run_command as train

    folder = tmp_path_factory.mktemp("choices")
    (folder / "tiny.toml").write_text(RECIPE)
    assert train(["run", str(folder / "tiny.toml"), "--out", str(folder / "run")]) == 0
    return folder / "run"


def test_a_union_counts_every_block_once() -> None:
    rows = torch.tensor([[0, 1, 2], [0, 1, 3], [0, 4, 5], [0, 4, 5], [9, 9, 9]], dtype=torch.int32).unsqueeze(1)
    assert mean_union(rows, 2) == (4 + 3) / 2
    assert mean_union(rows, 4) == 6
    assert mean_union(torch.cat([rows, torch.full_like(rows, -1)], -1), 4) == 6


def test_distances_are_those_of_free_blocks() -> None:
    geometry = BlockGeometry(4, 2, 4, 5, window_size=8)
    indices = torch.tensor([[[0, 3, 8, 9, 10]], [[0, 1, 8, 9, 10]]], dtype=torch.int32)
    # 0 is initial, 9 and 10 are local; distances 7, 2 and 9, 2
    assert free_distances(indices, torch.tensor([10, 10]), geometry) == {"1": 0, "2-3": 0.5, "4-7": 0.25, "8-15": 0.25}
    assert median_bucket({"1": 0.1, "2-3": 0.3, "4-7": 0.6}) == "4-7"
    assert median_bucket({}) == ""


def test_the_excess_is_that_of_the_largest_score_over_the_first_tile() -> None:
    geometry = BlockGeometry(2, 1, 2, 4, window_size=4)
    q, k_cmp = torch.randn(200, 4, 8), torch.randn(199, 2, 8)
    found = first_tile_excess(Choice(torch.empty(0), q, k_cmp, 2.0, geometry))
    assert found.shape == (200, 4)
    for t in (0, 1, FIRST_TILE, FIRST_TILE + 1, 120, 199):
        for head in range(4):
            scores = [2.0 * float(q[t, head] @ k_cmp[block, head // 2]) for block in range(num_visible_blocks(t, geometry))]
            expected = max(scores) - max(scores[:FIRST_TILE]) if scores else 0.0
            assert float(found[t, head]) == pytest.approx(expected, abs=1e-4)


def test_means_are_weighted_by_rows() -> None:
    def figures(rows: int, share: float, distances: dict[str, float]) -> LayerFigures:
        unions = dict.fromkeys(RUNS, share)
        return LayerFigures(layer=3, rows=rows, overlap=share, unions=unions, distances=distances, exceeded=share, largest_excess=share)

    mean = mean_figures([figures(1, 0.0, {"1": 1.0}), figures(3, 1.0, {"1": 0.5, "2-3": 0.5})])
    assert (mean.rows, mean.overlap, mean.exceeded, mean.largest_excess) == (4, 0.75, 0.75, 1.0)
    assert mean.distances == {"1": 0.625, "2-3": 0.375}
    assert mean.unions == dict.fromkeys(RUNS, 0.75)


def test_noted_choices_are_those_that_the_layers_make(run: Path) -> None:
    from nsa_core.telemetry import LayerTelemetry

    class Kept(LayerTelemetry):
        def record_selection(self, block_indices: torch.Tensor, positions: torch.Tensor, geometry: BlockGeometry) -> None:
            self.kept = block_indices

    model, ids = load_model(open_checkpoint(run)), torch.arange(48) % 40
    found = noted_choices(model, ids, "fp32")
    assert list(found) == [0, 1]
    assert [layer.registry for layer in model.sparse_layers] == [None, None]
    observers = [Kept() for _ in model.sparse_layers]
    for layer, observer in zip(model.sparse_layers, observers, strict=True):
        layer.telemetry = observer
    with torch.no_grad():
        model(ids.unsqueeze(0))
    for index, observer in enumerate(observers):
        assert torch.equal(found[index].block_indices, observer.kept[0])


def test_the_padding_of_a_row_is_no_sequence(run: Path, tmp_path: Path) -> None:
    documents = tmp_path / "short.jsonl"
    documents.write_text("".join(json.dumps({"text": f"{number:03} is a number, and so on"}) + "\n" for number in range(100)))
    config = open_checkpoint(run).config
    data = DataTable(source="jsonl", path=str(documents))
    config = attrs.evolve(config, data=data, train=attrs.evolve(config.train, seq_len=256))
    layers = choosing_layers(load_model(open_checkpoint(run)))
    with pytest.raises(BenchError, match="no held-out sequence has"):
        held_out(config, 3, layers)
    documents.write_text("".join(json.dumps({"text": "a number of numbers " * 5 + str(number)}) + "\n" for number in range(100)))
    assert all(len({*ids.tolist()}) > 5 for ids in held_out(config, 100, layers))


def test_the_figures_of_a_run_are_shown_written_and_recorded(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = ["--json", str(tmp_path / "a.json"), "--csv", str(tmp_path / "a.csv"), "--commit", "abc"]
    assert run_command(["choices", str(run), "--sequences", "3", "--recorded-tokens", "40", *files]) == 0
    content = json.loads((tmp_path / "a.json").read_text())
    assert (content["sequences"], content["step"], content["environment"]["commit"]) == ([48] * 3, 1, "abc")
    first, second = content["layers"]
    # 12 blocks, 4 of which are chosen: 32 queries of each sequence had to choose
    assert (first["layer"], second["layer"], first["rows"]) == (0, 1, 3 * 32)
    assert 4 <= first["unions"]["4"] <= first["unions"]["8"] <= first["unions"]["16"] <= 12
    assert sum(first["distances"].values()) == pytest.approx(1)
    assert [row["union_4"] for row in csv.DictReader((tmp_path / "a.csv").read_text().splitlines())] == [
        str(layer["unions"]["4"]) for layer in content["layers"]
    ]
    assert "choices of 4 blocks of 4 tokens" in capsys.readouterr().out
    recording = read_recording(str(tmp_path / "a.json"))
    assert recording.block_indices.shape == (2, 40, 4)
    assert run_command(["choices", str(run), "--recorded-tokens", "0", *files]) == 0
    assert "recorded" not in json.loads((tmp_path / "a.json").read_text())


def test_what_shows_no_choice_is_refused(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["choices", str(run), "--sequences", "0"]) == 2
    assert "--sequences=0, --recorded-tokens=8192 (at least 1 and 0); use 4 and 8192" in capsys.readouterr().err
    from nsa_train.cli import run_command as train

    for name, sets in {"dense": ["model.attention=dense"], "short": ["train.seq_len=16"]}.items():
        words = [word for override in sets for word in ("--set", override)]
        assert train(["run", str(run.parent / "tiny.toml"), "--out", str(tmp_path / name), *words]) == 0
    capsys.readouterr()
    assert run_command(["choices", str(tmp_path / "dense")]) == 2
    assert "is a model whose layers choose no blocks" in capsys.readouterr().err
    assert run_command(["choices", str(tmp_path / "short")]) == 1
    assert "no held-out sequence has 32 tokens" in capsys.readouterr().err
