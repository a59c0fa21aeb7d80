"""The plug-in in nsa_core: found by its entry point, fast to import, loading no compiler before a request for a GPU."""

import io
import json
import subprocess
import sys
from importlib.metadata import entry_points

import pytest
import torch
from attrs import evolve

from nsa_core import (
    BackendRegistry,
    BlockGeometry,
    BranchBackend,
    BranchRequest,
    NativeSparseAttention,
    NSAConfig,
    Operation,
    default_plugins,
    default_registry,
    explain_routing,
    load_plugins,
)
from nsa_core.errors import InputError
from nsa_kernels_cuda import plugin, routing
from nsa_kernels_cuda.choice.op import MOST_BLOCKS, choose

PROGRAM = """
import json, sys

def has_compiler():
    # cuda.bindings may be torch's own import
    return bool({"cuda.core", "flash_attn"} & set(sys.modules))

found = {}
import nsa_kernels_cuda.plugin
found["import"] = has_compiler()
import torch
from nsa_core import *
default_registry()
found["discovery"] = has_compiler()
explain_routing(BranchRequest(operation="choose"))
found["routing on a CPU"] = has_compiler()
explain_routing(BranchRequest(operation="choose", device_type="cuda", compute_capability=(8, 0)))
print(json.dumps({"has_compiler": found, "started": torch.cuda.is_initialized()}))
"""
REQUEST = BranchRequest(operation="choose", device_type="cuda", compute_capability=(9, 0), num_queries=4096, num_keys=4096)


IMPORTED_TWICE = """
import sys
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from nsa_core import BlockGeometry

declared = []
define = torch.library.Library.define
def counted(self, schema, *x, **y):
    declared.append(f"{self.ns}::{schema.partition('(')[0]}")
    return define(self, schema, *x, **y)

torch.library.Library.define = counted

def imported():
    from nsa_kernels_cuda import plugin
    plugin.nsa_branch_backends()
    return sys.modules["nsa_kernels_cuda.choice.op"]

first = imported()
for name in [name for name in sys.modules if name.startswith("nsa_kernels_cuda")]:
    del sys.modules[name]
second = imported()
assert first is not second
with FakeTensorMode():
    for module in (first, second):
        scores, positions = torch.empty(5, 2, 40, device="cuda"), torch.empty(5, dtype=torch.int32, device="cuda")
        assert module.choose(scores, None, positions, 2, geometry=BlockGeometry()).shape == (5, 2, 16)
print(*(name for name in declared if name.startswith(("nsa_cuda::", "nsa_flash_attn::"))))
"""


def test_an_op_is_declared_once_where_the_package_is_imported_twice():
    done = subprocess.run([sys.executable, "-c", IMPORTED_TWICE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    names = done.stdout.split()
    assert {"nsa_cuda::choose", "nsa_cuda::decode", "nsa_flash_attn::cmp_torch"} <= set(names)
    assert len(names) == len(set(names))


@pytest.fixture(scope="module")
def process():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def messages(request):
    """Return the kinds and messages of the reasons against the kernel."""
    return [str(reason) for reason in routing.reasons_against(request)]


def test_the_entry_point_leads_to_the_plug_in():
    [found] = [entry for entry in entry_points(group="nsa") if entry.name == "cuda"]
    assert found.load() is plugin


def test_it_offers_the_choice_the_decode_step_and_flash_attention():
    [loaded] = [each for each in load_plugins().loaded if each.name == "cuda"]
    names = [(backend.operation, backend.name) for backend in loaded.backends]
    flash = ["flash_attn", "flash_attn[fa4]", "flash_attn[fa2]", "flash_attn[torch]", "flash_attn[cudnn]"]
    assert names == [
        (Operation.CHOOSE, "cuda"),
        (Operation.NSA, "cuda"),
        *((operation, name) for operation in (Operation.CMP, Operation.WIN) for name in flash),
    ]
    assert all(isinstance(backend, BranchBackend) for backend in loaded.backends)
    assert "cuda" not in {broken.name for broken in default_plugins().broken}


@pytest.mark.parametrize("step", ["import", "discovery", "routing on a CPU"])
def test_no_compiler_is_imported_by(step, process):
    assert not process["has_compiler"][step]


def test_nothing_of_it_starts_cuda(process):
    assert not process["started"]


def test_it_is_eligible_on_the_gpus_that_it_compiles_for(nvrtc):
    for capability in ((8, 0), (8, 9), (9, 0)):
        assert messages(evolve(REQUEST, compute_capability=capability)) == []


def test_where_it_was_not_measured_it_stands_between_triton_and_the_reference(nvrtc, monkeypatch):
    preferences = {candidate.name: candidate.preference for candidate in explain_routing(REQUEST).candidates}
    assert preferences["sdpa"] < preferences["cuda"] < preferences.get("triton", 100)
    monkeypatch.setattr(routing, "PREFERRED_ON", frozenset({(9, 0)}))
    assert explain_routing(REQUEST).chosen == "cuda"


def test_every_reason_is_given_at_once(nvrtc):
    request = evolve(
        REQUEST,
        compute_capability=(7, 5),
        dtype=torch.float64,
        geometry=BlockGeometry(num_selected_blocks=40),
        num_keys=(MOST_BLOCKS + 1) * 64,
    )
    assert messages(request) == [
        "incapable: compute capability 7.5 (needs 8.0 or newer)",
        "incapable: q of torch.float64 (takes torch.float32, torch.bfloat16, torch.float16)",
        f"incapable: {MOST_BLOCKS + 1} blocks in a sequence (the shared memory of a warp holds {MOST_BLOCKS} scores); use larger selection blocks",
        "policy: 37 blocks chosen by score for a query (above 32, the lanes of a warp, it searches bit by bit)",
    ]


def test_another_device_is_refused():
    assert messages(BranchRequest(operation="choose"))[0] == "incapable: device cpu (needs cuda)"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_kv_heads": 2}, "scores have 4 rows of blocks for num_kv_heads=2"),
        ({"factor": torch.ones(3, 4), "num_kv_heads": 3}, "scores have 4 rows of blocks for num_kv_heads=3"),
        ({"factor": torch.ones(3, 2)}, r"factor has shape \(3, 2\)"),
        ({"positions": torch.zeros(2, dtype=torch.int32)}, r"positions has shape \(2,\)"),
        ({"positions": torch.zeros(3, dtype=torch.int32, device="meta")}, "positions has shape .* on meta"),
        ({"scores": torch.zeros(3, 4, MOST_BLOCKS + 1)}, f"scores have {MOST_BLOCKS + 1} blocks"),
        ({"scores": torch.zeros(3, 4, 8, dtype=torch.float64)}, "scores of torch.float64"),
    ],
)
def test_operands_that_the_kernel_would_misread_are_refused(change, message):
    operands = {"scores": torch.zeros(3, 4, 8), "factor": None, "positions": torch.zeros(3, dtype=torch.int32), "num_kv_heads": 4} | change
    with pytest.raises(InputError, match=message):
        choose(*operands.values(), geometry=BlockGeometry())


def test_a_layer_with_a_registry_of_these_backends_is_saved_and_loaded():
    backends = default_registry().backends
    layer, x, file = (
        NativeSparseAttention(NSAConfig(16, 4, 2, 8, 8), registry=BackendRegistry((*backends,))),
        torch.randn(1, 40, 16),
        io.BytesIO(),
    )
    expected = layer(x)
    torch.save(layer, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert [(one.operation, one.name) for one in loaded.registry.backends] == [(one.operation, one.name) for one in backends]
    assert torch.equal(loaded(x), expected)
