"""Result files."""

import csv
import json

import pytest

from nsa_bench.results import write_csv, write_json


def test_json_is_indented_and_ends_with_a_newline(tmp_path):
    write_json(tmp_path / "a.json", {"é": [1, None]})
    text = (tmp_path / "a.json").read_text(encoding="utf-8")
    assert json.loads(text) == {"é": [1, None]}
    assert text.endswith("}\n")


def test_what_json_has_no_word_for_is_refused(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "a.json", {"ms": float("nan")})


def test_csv_has_a_header_and_quotes_what_needs_it(tmp_path):
    write_csv(tmp_path / "a.csv", [{"name": "a,b", "value": None}, {"name": 'say "x"', "value": 2}])
    with (tmp_path / "a.csv").open(newline="") as file:
        assert list(csv.DictReader(file)) == [{"name": "a,b", "value": ""}, {"name": 'say "x"', "value": "2"}]
