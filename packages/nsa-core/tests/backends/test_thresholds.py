"""Tables of minimum lengths: which files are read, and to which calls an entry applies."""

import json

import pytest
import torch
from attrs import evolve

from nsa_core import BlockGeometry, BranchRequest
from nsa_core.backends import thresholds
from nsa_core.backends.thresholds import read_table, table_of, user_file

ROW = {
    "compute_capability": "9.0", "operation": "win", "direction": "fwd+bwd", "num_heads": 32, "num_kv_heads": 8, "head_dim_qk": 128,
    "head_dim_v": 64, "dtype": "bfloat16", "geometry": "32/16/64/16/512", "backend": "a", "against": "b", "min_length": 4096,
    "max_length": 8192,
}  # fmt: skip
REQUEST = BranchRequest(
    operation="win", device_type="cuda", compute_capability=(9, 0), dtype=torch.bfloat16, kv_dtype=torch.bfloat16, num_queries=100,
    num_keys=100, num_heads=16, num_kv_heads=4, head_dim_qk=128, head_dim_v=64, needs_grad=True,
)  # fmt: skip


def text_of(*rows, **head):
    return json.dumps({"format": "nsa-thresholds", "schema": 1, "rows": rows} | head)


def test_an_entry_is_of_calls_that_differ_in_length_batch_and_kv_heads_alone(tmp_path):
    (tmp_path / "t.json").write_text(text_of(ROW))
    table = read_table(tmp_path / "t.json")
    assert table.problem is None
    for request in (REQUEST, evolve(REQUEST, batch=3, num_keys=9999), evolve(REQUEST, geometry=BlockGeometry(window_size=512))):
        assert [entry.min_length for entry in table.of(request, "a")] == [4096]
    assert table.of(REQUEST, "b") == ()
    others = [
        {"compute_capability": (8, 0)}, {"operation": "cmp"}, {"needs_grad": False}, {"num_heads": 32}, {"head_dim_qk": 64},
        {"head_dim_v": 128}, {"dtype": torch.float16}, {"geometry": BlockGeometry(window_size=256)},
    ]  # fmt: skip
    for other in others:
        assert table.of(evolve(REQUEST, **other), "a") == (), other


def test_compressed_attention_is_measured_for_its_own_sizes(tmp_path):
    (tmp_path / "t.json").write_text(text_of(ROW | {"operation": "cmp"}))
    table, request = read_table(tmp_path / "t.json"), evolve(REQUEST, operation="cmp")
    assert table.of(evolve(request, geometry=BlockGeometry(window_size=77)), "a")
    assert not table.of(evolve(request, geometry=BlockGeometry(64, 16, 64)), "a")


def test_a_file_that_does_not_exist_is_an_empty_table(tmp_path):
    assert read_table(tmp_path / "t.json") == thresholds.ThresholdTable()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "is damaged or no table of thresholds"),
        (text_of(ROW)[:-9], "is damaged or no table of thresholds"),
        ("[" * 100_000, "is damaged or no table of thresholds"),
        ("\x00\ud800", "is damaged or no table of thresholds"),
        ("[]", "its format is not 'nsa-thresholds'"),
        ('{"rows": []}', "its format is not 'nsa-thresholds'"),
        (text_of(ROW, schema=2), "its schema is 2; this version reads 1"),
        (text_of(rows=None), "has a damaged row"),
        (text_of([]), "has a damaged row"),
        (text_of({}), "has a damaged row (KeyError: 'compute_capability')"),
        (text_of(ROW | {"min_length": "4096"}), "'4096' is not a positive whole number"),
        (text_of(ROW | {"min_length": True}), "True is not a positive whole number"),
        (text_of(ROW | {"max_length": -1}), "-1 is not a positive whole number"),
        (text_of(ROW | {"num_kv_heads": 5}), "num_heads 32 is not a multiple of num_kv_heads 5"),
        (text_of(ROW | {"geometry": "32/16"}), "geometry '32/16' is not l/d/l'/n/w"),
        (text_of(ROW | {"compute_capability": 9}), "has a damaged row"),
        (text_of(ROW | {"operation": "fly"}), "'fly' is not a valid Operation"),
        (text_of(ROW | {"direction": "bwd"}), "has a damaged row (KeyError: 'bwd')"),
        (text_of(ROW | {"backend": None}), "None is not text"),
    ],
)
def test_a_file_that_cannot_be_used_is_a_problem_and_no_error(text, problem, tmp_path):
    path = tmp_path / "t.json"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    table = read_table(path)
    assert table.entries == ()
    assert problem in table.problem
    assert table.problem.startswith(str(path))
    assert table.problem.endswith("remove it, and write it again by `nsa-bench thresholds --write`")


def test_a_folder_in_its_place_is_a_problem(tmp_path):
    assert "cannot be read" in read_table(tmp_path).problem


def test_a_process_reads_a_file_once(tmp_path):
    path = tmp_path / "t.json"
    path.write_text(text_of(ROW))
    first = table_of(path)
    path.write_text("")
    assert table_of(path) is first


def test_the_users_table_lies_in_the_cache_of_torch(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    assert user_file() == tmp_path / "nsa" / "thresholds.json"
