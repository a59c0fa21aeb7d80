"""`nsa-bench prefill`: tiles over a cache, compared with the reference, timed beside one pass, with their reads counted."""

import csv
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from nsa_bench import measurement, prefill
from nsa_bench.cases import parse_geometry
from nsa_bench.cli import run_command
from nsa_bench.options import PrefillOptions
from nsa_bench.prefill import Prompt, make_prefill_cases, to_rows
from nsa_core import blocks

pytestmark = pytest.mark.usefixtures("once")
WORDS = ["--device", "cpu", "--shapes", "4/2/16/8", "--geometry", "8/4/16/4/24"]


@pytest.fixture
def once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time every call once."""
    monkeypatch.setattr(measurement, "MIN_COUNT", 1)
    monkeypatch.setattr(measurement, "MAX_COUNT", 1)
    monkeypatch.setattr(prefill, "PASSES", 2)


def prompt_of(context: str) -> Prompt:
    options = PrefillOptions(device="cpu", shapes="4/2/16/8", geometry="8/4/16/4/24", context=context)
    [case], _ = make_prefill_cases(options)
    return Prompt(case, torch.device("cpu"), "auto")


def test_tiles_are_compared_timed_and_their_reads_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "p.csv"
    assert run_command(["prefill", *WORDS, "--context", "90,200", "--tile", "7,80", "--csv", str(file)]) == 0
    with file.open() as opened:
        rows = list(csv.DictReader(opened))
    geometry = parse_geometry("8/4/16/4/24")
    found = {(int(row["S"]), int(row["tile"])): [one for one in rows if (one["S"], one["tile"]) == (row["S"], row["tile"])] for row in rows}
    assert {key: len(tiles) for key, tiles in found.items()} == {(90, 7): 13, (90, 80): 2, (200, 7): 29, (200, 80): 3}
    for (length, tile), tiles in found.items():
        assert [int(row["start"]) for row in tiles] == list(range(0, length, tile))
        assert sum(int(row["tokens"]) for row in tiles) == length
        # every query of the prompt is counted once
        total = sum(blocks.predicted_reads(held, geometry) for held in range(1, length + 1))
        assert sum(int(row["reads_actual"]) for row in tiles) == sum(int(row["reads_expected"]) for row in tiles) == total
        assert all(float(row[name]) > 0 for row in tiles for name in ("ms", "ms_total", "ms_one_pass", "ratio", "cache_bytes"))
        assert all(float(row["limit_used"]) <= 1 and row["routes"] == "sdpa" and row["reason"] == "" for row in tiles)
    assert "prefill, ms" in capsys.readouterr().out


def test_all_tiles_are_one_pass_of_the_same_rows() -> None:
    prompt = prompt_of("150")
    for tile in (1, 23, 150):
        tiles = torch.cat([call() for call in prompt.calls(tile)], 1)
        torch.testing.assert_close(tiles, prompt.whole(), rtol=1e-4, atol=1e-5)


def test_a_wrong_tile_gets_no_time(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    read_tile = Prompt.read_tile

    def wrong(self: Prompt, cache: Any, start: int, *arguments: Any) -> Tensor:
        out = read_tile(self, cache, start, *arguments)
        return out + 0.1 if start == 60 else out

    monkeypatch.setattr(Prompt, "read_tile", wrong)
    file = tmp_path / "p.csv"
    assert run_command(["prefill", *WORDS, "--context", "100", "--tile", "20", "--csv", str(file)]) == 1
    assert "tiles: " in capsys.readouterr().out
    with file.open() as opened:
        assert all(row["ms"] == row["ms_total"] == "" and row["reason"].startswith("tiles: out") for row in csv.DictReader(opened))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--context", "0"], "--context has '0'"),
        (["--tile", "x"], "--tile has 'x'"),
        (["--shapes", "4/2/15/8"], "D_k is even"),
        (["--backend", "absent"], "--backend='absent' is not installed"),
        (["--tile", ""], "--tile has ''"),
    ],
)
def test_options_that_cannot_be_are_exit_2(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["prefill", "--device", "cpu", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_backend_that_serves_no_prompt_is_refused_before_anything_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = ["--json", str(tmp_path / "p.json"), "--csv", str(tmp_path / "p.csv")]
    assert run_command(["prefill", *WORDS, "--context", "20", "--tile", "5", "--backend", "cuda", *files]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n"), list(tmp_path.iterdir())) == ("", 1, [])
    assert "--backend='cuda' cannot serve what is to be measured (cuda: incapable: device cpu (needs cuda)" in err
    # the pass without a cache counts, too
    assert "layout dense (takes cached, paged, ragged)" in err


def test_every_option_and_column_is_on_the_reference_page() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs/reference/nsa-bench.md").read_text(encoding="utf-8")
    names = [f"--{field.name}" for field in attrs.fields(PrefillOptions)]
    columns = to_rows(prompt_of("20").measure(9, 0), {})[0]
    assert [name for name in (*names, *columns) if f"`{name}" not in page] == []
