"""The report is one file that needs no other."""

import re
from pathlib import Path

from nsa_train.run_dir import RunDirectory
from nsa_train.telemetry.report import write_report


def test_the_report_is_self_contained(tiny_run: RunDirectory) -> None:
    page = tiny_run.report.read_text()
    assert "data:image/png;base64," in page
    assert not re.findall(r"""(?:src|href)=["'](?!data:)""", page)
    assert "http://" not in page
    assert "https://" not in page


def test_the_report_has_every_part(tiny_run: RunDirectory) -> None:
    page = tiny_run.report.read_text()
    for heading in ("Curves", "Throughput and memory", "Health", "Gates and selection", "Samples", "Settings", "Environment", "Routing"):
        assert heading in page
    assert "gate_entropy_mean" in page
    assert "healthy" in page
    assert "none: no peak is defined for device cpu" in page
    assert "blocks that a query reads" in page
    assert "compression_stride" in page
    assert "after training" in page


def test_samples_are_escaped(tiny_run: RunDirectory, tmp_path: Path) -> None:
    import shutil

    run = RunDirectory(Path(shutil.copytree(tiny_run.root, tmp_path / "run", symlinks=True)))
    (run.samples / "after.txt").write_text("<script>alert(1)</script>")
    write_report(run)
    assert "<script>" not in run.report.read_text()
    assert "&lt;script&gt;" in run.report.read_text()


def test_curves_are_a_png(tiny_run: RunDirectory) -> None:
    assert tiny_run.curves.read_bytes().startswith(b"\x89PNG")
