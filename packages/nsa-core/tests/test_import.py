"""Importing nsa_core in a fresh process: the modules that it loads, before and after a first forward pass."""

import json
import subprocess
import sys

import pytest

import nsa_core

PROGRAM = """
import json, sys

def third_party():
    return {name.split(".")[0] for name in sys.modules} - sys.stdlib_module_names

at_start = third_party()
import nsa_core, nsa_core.config, nsa_core.errors
light = third_party() - at_start

import torch, attrs, cattrs, pluggy
before = third_party()
from nsa_core import *
imported = third_party()
has_testing = "nsa_core.testing" in sys.modules

@torch.library.custom_op("nsa_test::copied", mutates_args=())
def copied(x: torch.Tensor) -> torch.Tensor:
    return x.clone()

# torch's own first custom op loads its compiler, and that loads triton where it is installed
copied(torch.zeros(1))
torchs_own = third_party()
layer = nsa_core.NativeSparseAttention(nsa_core.NSAConfig(8, 2, 1, 4, 4))
layer(torch.zeros(1, 3, 8)).sum().backward()
used = third_party()
print(json.dumps({
    "light": sorted(light),
    "imported": sorted(imported - before),
    "used": sorted(used - torchs_own),
    "has_testing": has_testing,
    "cuda": torch.cuda.is_initialized(),
}))
"""
OPTIONAL = {"datasets", "flash_attn", "hypothesis", "matplotlib", "pytest", "rich", "torchdata", "transformers", "triton"}


@pytest.fixture(scope="module")
def process():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_configuration_and_errors_need_attrs_alone(process):
    assert process["light"] == ["attr", "attrs", "nsa_core"]


def test_the_public_names_add_nothing_to_torch_attrs_cattrs_and_pluggy(process):
    assert process["imported"] == []


def test_no_optional_dependency_is_imported_by_a_forward_and_a_backward_pass(process):
    assert not OPTIONAL & set(process["used"])


def test_the_conformance_kit_is_not_imported(process):
    assert not process["has_testing"]


def test_neither_import_nor_routing_starts_cuda(process):
    assert not process["cuda"]


@pytest.mark.parametrize("name", [name for name in nsa_core.__all__ if name != "__version__"])
def test_every_public_name_exists_and_is_documented(name):
    assert getattr(nsa_core, name).__doc__


def test_a_name_that_is_not_public_is_no_attribute():
    assert set(nsa_core.__all__) <= set(dir(nsa_core))
    with pytest.raises(AttributeError, match="module 'nsa_core' has no attribute 'nsa_atention'"):
        nsa_core.nsa_atention  # noqa: B018
