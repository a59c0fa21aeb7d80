"""examples/plugin-minimal as a user runs it: installed, found, chosen and right, also next to broken plug-ins.

Its second module, nsa_plugin_fused.py, serves the steps of a cache."""

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
FUSED = EXAMPLE / "nsa_plugin_fused.py"
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

FUSED_PROGRAM = """
import json
import torch
from nsa_core import *

geometry = BlockGeometry(8, 4, 8, 3, 1, 1, 5)
torch.manual_seed(0)
layer = NativeSparseAttention(NSAConfig(32, 4, 2, 8, 6, geometry))
x, served = torch.randn(2, 48, 32), []
steps = [x[:, :30], x[:, 30:33], *x[:, 33:].split(1, 1)]

def run(registry):
    # a prefill of more than max_rollback tokens attends to a window's last tokens, the steps after it to the ring
    layer.registry, cache = registry, layer.new_cache(2, 48, max_rollback=4)
    counts = torch.tensor([30, 17], dtype=torch.int32)
    outs = [layer(part, cache=cache, query_count=None if i else counts) for i, part in enumerate(steps)]
    outs[0] = outs[0][:, :17]
    return torch.cat(outs, 1), cache.total_reads

installed = default_registry()
installed.observers.append(lambda asked_for, facts, backend: served.append([facts.operation, facts.layout, backend]))
ours, reads = run(installed)
reference = BackendRegistry(tuple(b for b in installed.backends if b.name == "sdpa"))
expected, expected_reads = run(reference)
layer.registry = installed
training, trained = len(served), layer(x)
print(json.dumps({
    "served": served[:training],
    "training": served[training:],
    "difference": float((ours - expected).abs().max()),
    "same_reads": all(torch.equal(a, b) for a, b in zip(reads, expected_reads, strict=True)),
    "predicted": bool((reads.predicted > 0).all()),
    "steps": len(steps),
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
    """Install the example with pip, without a network; return the folder."""
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
    """Return what a fresh process finds and computes, with broken plug-ins next to the example."""
    done = run([installed, broken], "-c", PROGRAM)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def routing(installed, broken, tmp_path_factory):
    path = tmp_path_factory.mktemp("routing") / "routing.json"
    done = run([installed, broken], "-m", "nsa_bench", "backends", "--device", "cpu", "--seq-len", "512", "--json", path)
    assert done.returncode == 0, done.stderr
    return json.loads(path.read_text())


def module_at(path):
    """Return the module, imported from its source file."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def example():
    return module_at(EXAMPLE / "nsa_plugin_minimal.py")


@pytest.fixture(scope="module")
def cached(installed):
    """Return the routes and differences of a layer with a cache, in a fresh process with the example installed."""
    done = run([installed], "-c", FUSED_PROGRAM)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


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
    assert all(any(f"layout {layout}" in case for layout in ("cached", "paged", "ragged")) for case in report.declined)
    assert any("packed" in case for case in report.passed)
    assert len(report.passed) == 104


def test_the_conformance_kit_fails_it_with_a_window_of_one_token_more(example):
    class Sabotaged(example.MaskedWindow):
        def __call__(self, queries, keys, /, *, geometry, scale):
            wider = BlockGeometry(*geometry.as_tuple()[:-1], geometry.window_size + 1)
            return super().__call__(queries, keys, geometry=wider, scale=scale)

    with pytest.raises(AssertionError, match="masked / win: .*\n.*: out is off by"):
        check_backend(Sabotaged())


def test_a_plug_in_that_offers_all_branches_in_one_serves_every_step_of_a_cache(cached):
    # ROTATE runs before it; APPEND writes the step before it and, if the ring would overwrite too much, after it
    of_cache = ("append", "rotate")
    assert [entry for entry in cached["served"] if entry[0] not in of_cache] == [["nsa", "cached", "fused_step"]] * cached["steps"]
    assert {tuple(entry) for entry in cached["served"] if entry[0] in of_cache} == {(name, "cached", "sdpa") for name in of_cache}


def test_the_steps_that_it_serves_equal_those_of_the_reference(cached):
    assert cached["difference"] < 1e-6


def test_reads_are_counted_of_its_choice_and_split_nothing(cached):
    assert cached["same_reads"]
    assert cached["predicted"]


def test_whole_sequences_do_not_reach_it(cached):
    assert cached["training"][0] == ["nsa", "dense", None]
    assert [entry[0] for entry in cached["training"][1:]] == ["cmp", "select", "slc", "win"]


def test_it_conforms_over_stores_rings_and_tails():
    report = check_backend(module_at(FUSED).FusedStep())
    steps = {"cached", "cached, ring", "cached, tail", "cached, FP8 stores", "cached, shared k and v"}
    of_one_row = {"one row, whole", "one row, ring", "one row, tail"}
    assert {case.partition(" ")[2] for case in report.passed} == steps | of_one_row


def test_mypy_accepts_both_plug_ins_and_the_class_of_the_page(tmp_path):
    page = (ROOT / "docs/how-to/write-a-backend.md").read_text(encoding="utf-8")
    window = tmp_path / "window.py"
    code = page.split("```python\n")[1].split("```")[0]
    window.write_text(f"{code}\n\nfrom nsa_core.backends.base import AttentionBackend\n\nbackend: AttentionBackend = MaskedWindow()\n")
    plugins = [EXAMPLE / "nsa_plugin_minimal.py", FUSED, window]
    done = run([], "-m", "mypy", "--config-file", ROOT / "pyproject.toml", *plugins)
    assert done.returncode == 0, done.stdout
    window.write_text(f"{window.read_text()}\nfrom nsa_core.backends.base import SelectBackend\n\nother: SelectBackend = MaskedWindow()\n")
    done = run([], "-m", "mypy", "--config-file", ROOT / "pyproject.toml", window)
    assert 'variable has type "SelectBackend"' in done.stdout


def test_installing_leaves_nothing_in_the_example(installed):
    files = {"README.md", "pyproject.toml", "nsa_plugin_minimal.py", "nsa_plugin_fused.py"}
    assert {path.name for path in EXAMPLE.iterdir()} - {"__pycache__"} == files
