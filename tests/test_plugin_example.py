"""examples/plugin-minimal as its user meets it: installed, found, chosen, right; and what bad neighbours do to it."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nsa_core import BlockGeometry
from nsa_core.testing.conformance import check_backend

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "plugin-minimal"
HOOK = "from nsa_core.plugins import hookimpl\n@hookimpl\ndef nsa_branch_backends():\n    "
BROKEN = {
    "broken_import": "import a_compiler_that_is_not_here",
    "broken_without_hook": "backends = []",
    "broken_hook": f"{HOOK}raise OSError('driver too old')",
    "broken_objects": f"{HOOK}return ['a backend']",
}
DUPLICATE = f"import nsa_plugin_minimal\nclass Another(nsa_plugin_minimal.MaskedWindow): pass\n{HOOK}return [Another()]"

PROGRAM = """
import json
import torch
from nsa_core import *

geometry = BlockGeometry(4, 2, 8, 3, 1, 1, 5)

def run(backend, cu_seqlens):
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(1, 37, heads, D, requires_grad=True) for heads, D in ((4, 6), (2, 6), (2, 3), (4, 3)))
    out, lse = sliding_window_attention(q, k, v, geometry=geometry, cu_seqlens=cu_seqlens, backend=backend)
    return [out, lse, *torch.autograd.grad([out, lse.sum()], (q, k, v), [dout, torch.ones(())])]

def difference(backend, cu_seqlens=None):
    pairs = zip(run(backend, cu_seqlens), run("sdpa", cu_seqlens), strict=True)
    return [float((one - other).abs().max()) for one, other in pairs]

def explain(**fields):
    decision = explain_routing(BranchRequest(operation="win", geometry=geometry, **fields))
    return {"chosen": decision.chosen, "text": str(decision)}

def refusal():
    q, k, v = torch.randn(3, 2, 1, 2, 4).unbind(0)
    start = torch.zeros(2, dtype=torch.int32)
    try:
        sliding_window_attention(q, k, v, geometry=geometry, query_start=start, backend="masked")
    except BackendUnavailableError as error:
        return str(error)

def routes(cache=None):
    layer = NativeSparseAttention(NSAConfig(8, 4, 2, 2, 2, geometry))
    layer.telemetry = LayerTelemetry()
    layer(torch.randn(1, 1, 8), cache=layer.new_cache(1, 16) if cache else None)
    return layer.telemetry.routes

print(json.dumps({
    "loaded": [[plugin.name, plugin.origin] for plugin in default_plugins().loaded],
    "broken": {plugin.name: plugin.error for plugin in default_plugins().broken},
    "short": explain(num_queries=1024, num_keys=1024),
    "long": explain(num_queries=1025, num_keys=1025),
    "too_long": explain(num_queries=8193, num_keys=8193),
    "cached": explain(layout="cached"),
    "refusal": refusal(),
    "dense": difference("auto"),
    "packed": difference("masked", torch.tensor([0, 1, 1, 17, 37], dtype=torch.int32)),
    "routes": routes(),
    "cached_routes": routes(cache=True),
}))
"""


def write_package(folder, name, source):
    """Install a package of one module with a plug-in of the same name, as pip would leave it."""
    (folder / f"{name}.py").write_text(source)
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[nsa]\n{name} = {name}\n")


def run(folders, *command):
    """Run Python with `folders` among its packages."""
    path = os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Install the example with pip, without a network; give the folder."""
    folder = tmp_path_factory.mktemp("site")
    options = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--target", folder]
    done = run([], "-m", "pip", "install", *options, EXAMPLE)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    folder = tmp_path_factory.mktemp("broken")
    for name, source in BROKEN.items():
        write_package(folder, name, source)
    return folder


@pytest.fixture(scope="module")
def facts(installed, broken):
    """Give what a fresh process finds and computes, broken neighbours beside the example."""
    done = run([installed, broken], "-c", PROGRAM)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def routing(installed, broken, tmp_path_factory):
    path = tmp_path_factory.mktemp("routing") / "routing.json"
    done = run([installed, broken], "-m", "nsa_bench", "backends", "--device", "cpu", "--seq-len", "512", "--json", path)
    assert done.returncode == 0, done.stderr
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def example():
    """Give the example's module, imported from where it is written."""
    spec = importlib.util.spec_from_file_location("nsa_plugin_minimal", EXAMPLE / "nsa_plugin_minimal.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_backend_is_found_through_its_entry_point(facts):
    assert ["minimal", "nsa_plugin_minimal of nsa-plugin-minimal 0.1.0"] in facts["loaded"]


def test_auto_takes_it_where_its_preference_says_so(facts):
    assert facts["short"]["chosen"] == "masked"
    assert facts["long"]["chosen"] == "sdpa"


def test_the_explanation_names_it_and_every_reason_against_it(facts):
    assert "masked (preference 1): eligible" in facts["short"]["text"]
    assert "masked (preference -1): eligible" in facts["long"]["text"]
    assert "masked (preference -1): policy: 8193 tokens would hold that many scores squared" in facts["too_long"]["text"]
    assert "masked (preference 1): incapable: layout cached (takes dense, packed)" in facts["cached"]["text"]


def test_asked_for_by_name_it_never_falls_back(facts):
    assert "backend 'masked' cannot serve this request" in facts["refusal"]
    assert "layout cached (takes dense, packed)" in facts["refusal"]


@pytest.mark.parametrize("layout", ["dense", "packed"])
def test_outputs_and_gradients_equal_those_of_the_reference(facts, layout):
    assert len(facts[layout]) == 5
    assert max(facts[layout]) < 1e-5


def test_a_layer_uses_it_and_its_cache_does_not(facts):
    assert facts["routes"]["win"] == "masked"
    assert facts["cached_routes"]["win"] == "sdpa"


def test_broken_neighbours_are_listed_and_take_nothing_down(facts):
    assert "No module named 'a_compiler_that_is_not_here'" in facts["broken"]["broken_import"]
    assert "implements no hook" in facts["broken"]["broken_without_hook"]
    assert facts["broken"]["broken_hook"] == "OSError: driver too old"
    assert "'a backend' is no BranchBackend" in facts["broken"]["broken_objects"]


def test_the_routing_report_lists_it_and_its_broken_neighbours(routing):
    [window] = [operation for operation in routing["operations"] if operation["operation"] == "win"]
    assert window["chosen"] == "masked"
    assert {"masked", "sdpa"} <= {candidate["name"] for candidate in window["candidates"]}
    [plugin] = [plugin for plugin in routing["plugins"]["loaded"] if plugin["name"] == "minimal"]
    assert plugin["backends"] == [{"operation": "win", "name": "masked"}]
    assert {plugin["name"] for plugin in routing["plugins"]["broken"]} == set(BROKEN)


def test_a_second_backend_of_its_name_is_refused_naming_both(installed, tmp_path):
    write_package(tmp_path, "zz_copycat", DUPLICATE)
    done = run([installed, tmp_path], "-m", "nsa_bench", "backends")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    for said in ("'zz_copycat'", "'masked'", "nsa_plugin_minimal.MaskedWindow", "zz_copycat.Another"):
        assert said in done.stderr


def test_it_conforms(example):
    report = check_backend(example.MaskedWindow())
    assert all("layout cached" in case or "layout paged" in case for case in report.declined)
    assert any("packed" in case for case in report.passed)
    assert len(report.passed) == 100


def test_the_conformance_kit_fails_it_with_a_window_of_one_token_more(example):
    class Sabotaged(example.MaskedWindow):
        def __call__(self, *tensors, geometry, scale, placement):
            wider = BlockGeometry(*geometry.as_tuple()[:-1], geometry.window_size + 1)
            return super().__call__(*tensors, geometry=wider, scale=scale, placement=placement)

    with pytest.raises(AssertionError, match="masked / win: .*\n.*: out is off by"):
        check_backend(Sabotaged())


def test_installing_leaves_nothing_in_the_example(installed):
    assert {path.name for path in EXAMPLE.iterdir()} - {"__pycache__"} == {"README.md", "pyproject.toml", "nsa_plugin_minimal.py"}
