"""docs/reference/run-directory.md names every file, column and field, and the runbook every anomaly."""

import re
from pathlib import Path

import attrs
import pytest

from nsa_train.host.chips import CHIPS
from nsa_train.run_dir import RunDirectory
from nsa_train.telemetry.anomalies import KINDS
from nsa_train.telemetry.records import FALLBACK_COLUMNS, SELECTION_COLUMNS, TRAINING_COLUMNS, VALIDATION_COLUMNS, read_events

DOCS = Path(__file__).resolve().parents[4] / "docs"


@pytest.fixture(scope="module")
def page() -> str:
    return (DOCS / "reference/run-directory.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "columns", [TRAINING_COLUMNS, VALIDATION_COLUMNS, SELECTION_COLUMNS, FALLBACK_COLUMNS], ids=lambda columns: columns[-1]
)
def test_every_table_stands_with_its_header(columns: tuple[str, ...], page: str) -> None:
    assert f"`{','.join(columns)}`" in page


def test_every_file_is_named(page: str) -> None:
    run = RunDirectory(Path("/run"))
    names = {name for name, kind in vars(RunDirectory).items() if isinstance(kind, property)} - {
        "heartbeat",
        "heartbeats",
        "samples",
        "checkpoints",
    }
    assert [path.name for path in (getattr(run, name) for name in names) if f"`{path.name}" not in page] == []
    assert attrs.has(RunDirectory)


def _left_by(run: RunDirectory) -> set[str]:
    """Return the names that a finished run leaves at the top of its directory."""
    return {path.name for path in run.root.iterdir()}


def test_the_page_lists_what_a_run_leaves_and_nothing_else(tiny_run: RunDirectory, page: str) -> None:
    table = page.partition("| file | content |")[2].partition("\n\n")[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    names = {name.split("/")[0].replace("{r}", "0") for cell in cells for name in re.findall(r"`([^`]+)`", cell)}
    # further files of a failed run
    assert names - {".HALT", ".anomaly_type", "stackdump_rank0.txt"} == _left_by(tiny_run)


def test_the_tutorial_lists_what_a_run_leaves(tiny_run: RunDirectory) -> None:
    text = (DOCS / "tutorials/first-model.md").read_text(encoding="utf-8")
    listing = text.partition("```\nruns/first/\n")[2].partition("```")[0]
    assert {line.split()[0].rstrip("/") for line in listing.splitlines()} == _left_by(tiny_run)


def test_every_field_of_a_run_is_named(tiny_run: RunDirectory, page: str) -> None:
    import json

    fields = {name for event in read_events(tiny_run.heartbeat) for name in event}
    fields |= set(json.loads(tiny_run.metrics.read_text()))
    # figures by branch are named once
    assert {name for name in fields if f"`{name}`" not in page and not name.endswith(("_slc", "_win"))} == set()


def test_every_anomaly_has_its_row() -> None:
    runbook = (DOCS / "runbooks/stall.md").read_text(encoding="utf-8")
    assert [kind for kind in KINDS if f"| `{kind}` |" not in runbook] == []


def test_every_peak_is_listed(page: str) -> None:
    assert {f"{chip.dense_bf16_tflops:.0f}" for chip in CHIPS.values() if f" {chip.dense_bf16_tflops:.0f}" not in page} == set()
