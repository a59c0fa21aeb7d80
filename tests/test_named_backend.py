"""A backend that is named and cannot run is refused before anything is written, by both commands, with one sentence."""

import pytest

from nsa_bench.cli import run_command as run_bench
from nsa_core import default_registry
from nsa_train.cli import run_command as run_train

pytestmark = pytest.mark.skipif(
    not any(backend.name == "triton" for backend in default_registry().backends), reason="nsa-kernels-triton is not installed"
)
REASON = "incapable: device cpu without Triton's interpreter (there is no compiler for it); start Python with TRITON_INTERPRET=1"
SETS = ["--set", "train.device=cpu", "--set"]


@pytest.fixture(autouse=True)
def _compiling(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.mark.parametrize("operation", ["cmp", "select", "slc", "win", "nsa"])
def test_a_recipe_that_names_it(operation, tmp_path, capsys):
    files = [tmp_path / "run", tmp_path / "train.json"]
    words = ["demo", *SETS, f'nsa.backends.{operation}="triton"']
    sentence = f"nsa.backends.{operation}='triton' cannot serve this run (triton: {REASON}); use 'auto'\n"
    assert run_train(["preflight", *words]) == 2
    assert capsys.readouterr().err == f"FAIL  {sentence}"
    assert run_train(["run", *words, "--out", str(files[0])]) == 2
    assert capsys.readouterr().err == f"nsa-train: {sentence}"
    assert run_bench(["train", *words, "--json", str(files[1])]) == 2
    assert capsys.readouterr().err == f"nsa-bench: {sentence}"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["attention", "compare"])
def test_an_option_that_names_it(command, tmp_path, capsys):
    case = ["--device", "cpu", "--shapes", "4/2/16/8", "--lengths", "40", "--geometry", "8/8/8/4/12", "--json", str(tmp_path / "b.json")]
    assert run_bench([command, *case, "--backend", "triton"]) == 2
    sentence = f"--backend='triton' cannot serve what is to be measured (triton: {REASON}); use --backend auto"
    assert capsys.readouterr().err == f"nsa-bench: {sentence}\n"
    assert run_bench([command, *case, "--backend", "nosuch"]) == 2
    installed = ", ".join(sorted({backend.name for backend in default_registry().backends}))
    assert f"--backend='nosuch' is not installed (there is {installed}); use --backend auto" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_routing_table_has_the_same_reason(capsys):
    assert run_bench(["backends", "--device", "cpu"]) == 0
    assert "without Triton's interpreter" in " ".join(capsys.readouterr().out.replace("\u2502", " ").split())
