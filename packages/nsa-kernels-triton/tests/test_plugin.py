"""The plug-in in nsa_core: found by its entry point, fast to import, loading triton only when a kernel is called."""

import json
import subprocess
import sys
from importlib.metadata import entry_points

import pytest

from nsa_core import BranchBackend, Operation, default_plugins, load_plugins
from nsa_kernels_triton import plugin

PROGRAM = """
import json, sys

def has_triton():
    return any(name.partition(".")[0] == "triton" for name in sys.modules)

found = {}
import nsa_kernels_triton.plugin, nsa_kernels_triton.implementations
found["import"] = has_triton()
import torch
from nsa_core import *
default_registry()
found["discovery"] = has_triton()
request = BranchRequest(operation="slc", device_type="cuda", compute_capability=(8, 0), dtype=torch.bfloat16, kv_dtype=torch.bfloat16)
decisions = [explain_routing(request).chosen, explain_routing(BranchRequest(operation="slc")).chosen]
found["routing"] = has_triton()
print(json.dumps({"has_triton": found, "decisions": decisions, "cuda": torch.cuda.is_initialized()}))
"""


@pytest.fixture(scope="module")
def process():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_the_entry_point_leads_to_the_plug_in():
    [found] = [entry for entry in entry_points(group="nsa") if entry.name == "triton"]
    assert found.load() is plugin


def test_it_offers_every_operation_once():
    [loaded] = [each for each in load_plugins().loaded if each.name == "triton"]
    assert [(backend.name, backend.operation) for backend in loaded.backends] == [("triton", operation) for operation in Operation]
    assert all(isinstance(backend, BranchBackend) for backend in loaded.backends)


def test_nothing_of_it_is_broken():
    assert "triton" not in {broken.name for broken in default_plugins().broken}


@pytest.mark.parametrize("step", ["import", "discovery", "routing"])
def test_triton_is_not_imported_by(step, process):
    assert not process["has_triton"][step]


def test_routing_answers_all_the_same(process):
    assert process["decisions"] == ["triton", "sdpa"]


def test_nothing_of_it_starts_cuda(process):
    assert not process["cuda"]
