"""Preflight judges every rule and writes nothing."""

from pathlib import Path

import pytest

from nsa_train.errors import ConfigError
from nsa_train.preflight import run_preflight


def test_a_good_run_gets_its_corpus(tiny_config, tmp_path: Path) -> None:
    findings = run_preflight(tiny_config(), tmp_path / "new" / "deep")
    assert findings.failed == []
    assert len(findings.require().train) == 1
    assert not (tmp_path / "new").exists()


def test_a_failed_rule_stops_the_run_with_all_of_them(tiny_config, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    findings = run_preflight(tiny_config("data.path=absent.txt", "nsa.backends.slc=nosuch"), tmp_path)
    with pytest.raises(ConfigError) as caught:
        findings.require()
    assert len(str(caught.value).splitlines()) == 3


def test_an_out_directory_below_a_file_is_refused(tiny_config, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    [failure] = run_preflight(tiny_config(), tmp_path / "file" / "out").failed
    assert "cannot be written" in failure
    [failure] = run_preflight(tiny_config(), tmp_path / "file").failed
    assert "cannot be written" in failure


def test_the_dense_twin_needs_no_routes(tiny_config, tmp_path: Path) -> None:
    findings = run_preflight(tiny_config("model.attention=dense"), tmp_path)
    assert not any(line.startswith("route") for line in findings.passed)


def test_a_split_that_fills_no_row_is_named(tiny_config, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("x" * 200)
    findings = run_preflight(tiny_config(f"data.path={tmp_path}/short.txt"), tmp_path / "out")
    assert findings.failed == [
        "train.seq_len=32 is longer than the val split (21 tokens; it must fill one row); use 21 or less, or more text"
    ]
