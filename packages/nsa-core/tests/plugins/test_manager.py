"""Plug-ins are loaded one by one from entry points; a broken one is listed and breaks nothing else."""

import itertools
import sys
from importlib.metadata import EntryPoint

import pytest

from nsa_core import DuplicateBackendError, Operation, default_plugins, default_registry, load_plugins
from nsa_core.plugins.manager import BUILTIN, GROUP

GOOD = """
from nsa_core import BranchOutput, Capability, Operation
from nsa_core.plugins import hookimpl

class Mine:
    name, operation, capability = "mine", Operation.WIN, Capability()
    def reasons_against(self, request): return ()
    def preference(self, request): return 3
    def __call__(self, queries, keys, *, geometry, scale): return BranchOutput(keys.v, queries.q[..., 0])

@hookimpl
def nsa_branch_backends():
    return [Mine()]
"""
BROKEN = {
    "cannot be parsed": ("def", "SyntaxError: "),
    "import error": ("import no_such_compiler", "ModuleNotFoundError: No module named 'no_such_compiler'"),
    "any error while importing": ("1 / 0", "ZeroDivisionError: division by zero"),
    "leaves while importing": ("raise SystemExit('needs a GPU')", "SystemExit: needs a GPU"),
    "no hook": (
        "def nsa_branch_backends(): return []",
        "implements no hook nsa_branch_backends; decorate it with nsa_core.plugins.hookimpl",
    ),
    "misspelt hook": (GOOD.replace("def nsa_branch", "def nsa_brunch"), "PluginValidationError: unknown hook 'nsa_brunch_backends'"),
    "hook with an argument": (GOOD.replace("backends():", "backends(device):"), "PluginValidationError: "),
    "hook raising": (GOOD.replace("return [Mine()]", "raise OSError('driver too old')"), "OSError: driver too old"),
    "hook raising on the way": (GOOD.replace("return [Mine()]", "yield Mine(); 1 / 0"), "ZeroDivisionError: "),
    "hook returning nothing": (
        GOOD.replace("return [Mine()]", "pass"),
        "returned None (the rule: a sequence of backends); return [] for none",
    ),
    "hook returning one backend": (GOOD.replace("[Mine()]", "Mine()"), "TypeError: 'Mine' object is not iterable"),
    "a wrong object": (GOOD.replace("[Mine()]", "[Mine(), 'mine']"), "InputError: 'mine' is no BranchBackend"),
    "a class": (
        GOOD.replace("[Mine()]", "[Mine]"),
        "InputError: <class 'third_party_0.Mine'> is a class (a backend is an object); use Mine()",
    ),
    "an unknown operation": (
        GOOD.replace("Operation.WIN", "'window'"),
        "operation 'window' (the rule: one of cmp, select, slc, win, nsa, append, choose, rotate)",
    ),
    "a name that is routing's": (GOOD.replace('"mine"', '"auto"'), "has the name 'auto'"),
    "a name that is no word": (GOOD.replace('"mine"', "7"), "has the name 7"),
}


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """Return a function that makes an entry point from a module's source."""
    monkeypatch.syspath_prepend(tmp_path)
    numbers = itertools.count()
    made = []

    def make(source, name="third_party"):
        module = f"third_party_{next(numbers)}"
        (tmp_path / f"{module}.py").write_text(source)
        made.append(module)
        return EntryPoint(name, module, GROUP)

    yield make
    for module in made:
        sys.modules.pop(module, None)


def names(plugins):
    return [(plugin.name, [str(backend.name) for backend in plugin.backends]) for plugin in plugins.loaded]


def test_the_reference_is_there_without_any_entry_point():
    plugins = load_plugins([])
    assert names(plugins) == [("builtin", ["sdpa"] * 7)]
    assert not plugins.broken
    assert {backend.operation for backend in plugins.registry().backends} == set(Operation) - {Operation.NSA}


def test_the_reference_is_registered_once_though_its_package_has_an_entry_point():
    assert names(load_plugins([EntryPoint("builtin", BUILTIN, GROUP)])) == [("builtin", ["sdpa"] * 7)]


def test_a_plug_in_is_loaded_after_the_reference(plugin):
    plugins = load_plugins([plugin(GOOD)])
    assert names(plugins)[1:] == [("third_party", ["mine"])]
    assert plugins.registry().named("win", "mine").preference(None) == 3


def test_plug_ins_are_loaded_by_name_whatever_the_order_found(plugin):
    found = [plugin(GOOD.replace('"mine"', f'"{name}"'), name) for name in ("zeta", "alpha", "midway")]
    assert [plugin.name for plugin in load_plugins(found).loaded] == ["builtin", "alpha", "midway", "zeta"]


def test_a_plug_in_may_offer_nothing(plugin):
    plugins = load_plugins([plugin(GOOD.replace("[Mine()]", "[]"))])
    assert names(plugins)[1:] == [("third_party", [])]
    assert not plugins.broken


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_plug_in_is_listed_with_its_error_beside_the_others(plugin, kind):
    source, error = BROKEN[kind]
    entry_point = plugin(source, "bad")
    plugins = load_plugins([entry_point, plugin(GOOD, "good")])
    assert [name for name, _ in names(plugins)] == ["builtin", "good"]
    [broken] = plugins.broken
    assert (broken.name, broken.origin) == ("bad", entry_point.value)
    assert error in broken.error
    assert plugins.registry().has(Operation.WIN, "mine")


@pytest.mark.parametrize(("value", "error"), [("no_such_package", "ModuleNotFoundError"), ("nsa_core:no_such_hooks", "AttributeError")])
def test_an_entry_point_that_leads_nowhere_is_listed(value, error):
    [broken] = load_plugins([EntryPoint("lost", value, GROUP)]).broken
    assert (broken.name, broken.origin) == ("lost", value)
    assert broken.error.startswith(error)


def test_a_user_who_interrupts_is_obeyed(plugin):
    with pytest.raises(KeyboardInterrupt):
        load_plugins([plugin("raise KeyboardInterrupt")])


def test_two_plug_ins_with_one_backend_are_refused_naming_both(plugin):
    plugins = load_plugins(
        [plugin(GOOD, "first"), plugin(GOOD.replace("class Mine", "class Theirs").replace("Mine()", "Theirs()"), "second")]
    )
    expected = r"plug-in 'second' \(third_party_1\): backend 'mine' .* twice, by third_party_0.Mine and third_party_1.Theirs"
    with pytest.raises(DuplicateBackendError, match=expected):
        plugins.registry()


def test_a_plug_in_cannot_replace_the_reference(plugin):
    with pytest.raises(DuplicateBackendError, match="'sdpa' .* twice, by nsa_core.reference.sdpa.SDPABackend and third_party_0.Mine"):
        load_plugins([plugin(GOOD.replace('"mine"', '"sdpa"'))]).registry()


def test_installed_packages_are_found_by_their_entry_points(tmp_path, monkeypatch):
    (tmp_path / "third_party_installed.py").write_text(GOOD)
    info = tmp_path / "third_party-3.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: third-party\nVersion: 3.1\n")
    (info / "entry_points.txt").write_text("[nsa]\nmine = third_party_installed\n")
    monkeypatch.syspath_prepend(tmp_path)
    try:
        plugins = load_plugins()
    finally:
        sys.modules.pop("third_party_installed", None)
    assert ("mine", ["mine"]) in names(plugins)
    assert {plugin.name: plugin.origin for plugin in plugins.loaded}["mine"] == "third_party_installed of third-party 3.1"


def test_the_process_has_one_registry_made_of_what_it_found():
    assert default_registry() is default_registry()
    offered = [backend for plugin in default_plugins().loaded for backend in plugin.backends]
    assert default_registry().backends == offered
