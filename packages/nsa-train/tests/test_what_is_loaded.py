"""Commands that train nothing start in a few seconds: they load neither torch's compiler nor what shards tensors."""

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys
from nsa_train.cli import app
try:
    app(["preflight", "demo", "--out", sys.argv[1]])
except SystemExit as end:
    assert end.code == 0
assert "torch" in sys.modules
print(sorted({"torch._dynamo", "torch.distributed.tensor", "sympy"} & set(sys.modules)))
"""


def test_preflight_loads_no_compiler(tmp_path: Path) -> None:
    run = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path / "run")], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1] == "[]"
