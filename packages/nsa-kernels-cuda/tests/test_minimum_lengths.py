"""Routing of `flash_attn` by tables of minimum lengths, which the tests write."""

import json
import subprocess
import sys

import pytest
import torch
from attrs import evolve, frozen

from nsa_core import BackendRegistry, BranchRequest, Capability, Operation
from nsa_core.backends.thresholds import read_table, table_of
from nsa_kernels_cuda.flash_attention import minimum, providers
from nsa_kernels_cuda.flash_attention.backend import flash_attention_backends

REQUEST = BranchRequest(
    operation="win", device_type="cuda", compute_capability=(8, 0), dtype=torch.bfloat16, kv_dtype=torch.bfloat16,
    num_queries=4096, num_keys=4096, num_heads=32, num_kv_heads=8, head_dim_qk=128, head_dim_v=128,
)  # fmt: skip
UNMEASURED = "policy: no length is measured from which it is faster than the kernels of this project; name it to take it"


@frozen(kw_only=True)
class Kernel:
    """A backend with the preference of Triton's, or of the reference."""

    name: str = "triton"
    operation: Operation = Operation.WIN
    capability: Capability = Capability()
    level: int = 100

    def reasons_against(self, request):
        return ()

    def preference(self, request):
        return self.level

    def __call__(self, *operands, **keywords):
        raise NotImplementedError


KERNELS = (Kernel(), Kernel(name="sdpa", level=0))


def row(min_length, *, against="triton", **changes):
    return {
        "compute_capability": "8.0", "operation": "win", "direction": "fwd", "num_heads": 32, "num_kv_heads": 8, "head_dim_qk": 128,
        "head_dim_v": 128, "dtype": "bfloat16", "geometry": "32/16/64/16/512", "backend": "flash_attn[torch]", "against": against,
        "min_length": min_length, "max_length": 16384,
    } | changes  # fmt: skip


@pytest.fixture
def routed(tmp_path):
    """Give a function that writes the tables, the user's and the shipped one, and routes a request by them."""

    def routed(request, *tables):
        paths = []
        for index, rows in enumerate(tables):
            paths.append(tmp_path / f"{index}.json")
            content = json.dumps({"format": "nsa-thresholds", "schema": 1, "rows": rows}) if isinstance(rows, list) else rows
            paths[-1].write_text(content)
        table_of.cache_clear()
        backends = flash_attention_backends((providers.TorchFlash(),), files=lambda: tuple(paths))
        return BackendRegistry((*KERNELS, *backends)).explain(request)

    yield routed
    table_of.cache_clear()


def reasons_of(decision, name="flash_attn[torch]"):
    [found] = [candidate for candidate in decision.candidates if candidate.name == name]
    return [str(reason) for reason in found.reasons]


@pytest.mark.parametrize("name", ["flash_attn", "flash_attn[torch]"])
def test_a_call_below_the_minimum_is_told_the_measured_length(name, routed):
    decision = routed(evolve(REQUEST, num_keys=4095), [row(4096)])
    assert decision.chosen == "triton"
    assert reasons_of(decision, name) == [
        "policy: measured faster than triton from 4,096 tokens on; this call has 4,095; name it to take it"
    ]


@pytest.mark.parametrize("length", [4096, 4097, 10**6])
def test_from_the_minimum_on_auto_takes_it(length, routed):
    decision = routed(evolve(REQUEST, num_keys=length), [row(4096), row(256, against="sdpa")])
    assert decision.chosen == "flash_attn"
    assert [each.name for each in decision.candidates] == ["flash_attn", "flash_attn[torch]", "triton", "sdpa"]
    assert reasons_of(decision) == reasons_of(decision, "flash_attn") == []


def test_every_kernel_has_to_be_beaten(routed):
    decision = routed(REQUEST, [row(1024), row(8192, against="sdpa")])
    assert decision.chosen == "triton"
    assert reasons_of(decision) == ["policy: measured faster than sdpa from 8,192 tokens on; this call has 4,096; name it to take it"]


def test_another_provider_is_no_kernel_to_beat(routed):
    assert routed(REQUEST, [row(1024), row(None, against="flash_attn[fa4]"), row(None, against="flash_attn")]).chosen == "flash_attn"


def test_one_that_beats_the_reference_alone_stays_below_tritons_kernels(routed):
    decision = routed(REQUEST, [row(1024, against="sdpa")])
    assert decision.chosen == "triton"
    assert [each.name for each in decision.candidates] == ["triton", "flash_attn", "flash_attn[torch]", "sdpa"]


def test_one_that_was_never_faster_says_so(routed):
    decision = routed(REQUEST, [row(None)])
    assert decision.chosen == "triton"
    assert reasons_of(decision) == [
        "policy: measured up to 16,384 tokens: there is no length from which it stays enough faster than triton; name it to take it"
    ]


@pytest.mark.parametrize(
    "change", [{"compute_capability": (9, 0)}, {"needs_grad": True}, {"num_kv_heads": 4}, {"head_dim_qk": 64, "head_dim_v": 64}]
)
def test_another_gpu_pass_or_shape_is_unmeasured(change, routed):
    decision = routed(evolve(REQUEST, **change), [row(1024)])
    assert decision.chosen == "triton"
    assert reasons_of(decision) == [UNMEASURED]


def test_the_users_table_decides_alone_where_it_has_an_entry(routed):
    assert routed(REQUEST, [row(8192)], [row(1024)]).chosen == "triton"
    assert routed(REQUEST, [row(1024)], [row(8192)]).chosen == "flash_attn"
    assert routed(REQUEST, [row(8192, direction="fwd+bwd")], [row(1024)]).chosen == "flash_attn"


@pytest.mark.parametrize("text", ["", "{", '{"format": "nsa-thresholds", "schema": 2, "rows": []}', "\x00"])
def test_a_table_that_cannot_be_used_is_a_reason(text, routed):
    decision = routed(REQUEST, text, [row(1024)])
    assert decision.chosen == "triton"
    [reason] = reasons_of(decision)
    assert reason.startswith("policy: ")
    assert "0.json" in reason
    assert "remove it" in reason


def test_the_shipped_table_can_be_read_and_has_no_entry_for_8_0():
    table = read_table(minimum.SHIPPED)
    assert table.problem is None
    assert minimum.SHIPPED.is_file()
    assert [entry for entry in table.entries if entry.compute_capability != (9, 0)] == []


def test_the_users_table_comes_before_the_shipped_one(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    assert minimum.threshold_files() == (tmp_path / "nsa" / "thresholds.json", minimum.SHIPPED)


def test_no_table_is_read_when_the_plug_in_is_imported_or_a_call_runs_on_a_cpu():
    source = """
import pathlib
read, names = pathlib.Path.read_text, []
pathlib.Path.read_text = lambda self, *x, **y: names.append(self.name) or read(self, *x, **y)
from nsa_core import BranchRequest, explain_routing
import nsa_kernels_cuda.plugin
explain_routing(BranchRequest(operation="win"))
assert "thresholds.json" not in names, names
explain_routing(BranchRequest(operation="win", device_type="cuda", compute_capability=(8, 0)))
assert "thresholds.json" in names, names
"""
    subprocess.run([sys.executable, "-c", source], check=True)
