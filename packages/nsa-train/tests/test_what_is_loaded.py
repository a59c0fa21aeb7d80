"""Commands that run no model start in a few seconds: they load neither torch's compiler nor what shards tensors."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
from nsa_train.cli import app
try:
    app(sys.argv[1:])
except SystemExit as end:
    assert end.code == 0
assert "torch" in sys.modules
print(sorted({"torch._dynamo", "torch.distributed.tensor", "sympy"} & set(sys.modules)))
"""


@pytest.mark.parametrize("command", [["preflight", "demo"], ["run", "demo", "--print-config"]], ids=" ".join)
def test_what_runs_no_model_loads_no_compiler(command: list[str], tmp_path: Path) -> None:
    words = [*command, "--out", str(tmp_path / "run")]
    run = subprocess.run([sys.executable, "-c", PROGRAM, *words], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1] == "[]"
