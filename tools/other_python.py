"""Test the packages with another Python: `python tools/other_python.py PYTHON FOLDER [--between] [ARGUMENTS OF PYTEST]`.

Makes a virtual environment of PYTHON in FOLDER, installs the packages of this checkout there (not editable, as a user would)
with the dependencies of the test environment, and runs a part of the fast tests. `--between` runs fewer of them, for a version
between two that run all.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("nsa-core[testing]", "nsa-kernels-triton", "nsa-kernels-cuda", "nsa-train", "nsa-bench[train]")
TESTS = (
    "packages/nsa-core",
    "packages/nsa-kernels-triton/tests/test_ops.py",
    "packages/nsa-kernels-cuda/tests/test_plugin.py",
    "packages/nsa-train/tests/test_cli.py",
    "packages/nsa-train/tests/loop/test_trainer.py",
    "packages/nsa-bench/tests/test_layer.py",
    "tests/test_import.py",
)
"""The fast tests that also run with another Python."""
TESTS_BETWEEN = (
    "packages/nsa-core/tests/backends",
    "packages/nsa-core/tests/kv_cache/test_compiled_steps.py",
    "packages/nsa-core/tests/plugins",
    "packages/nsa-core/tests/test_config.py",
    "packages/nsa-core/tests/test_import.py",
    "packages/nsa-core/tests/test_module.py",
    "packages/nsa-core/tests/test_serialization.py",
    *TESTS[1:],
)
"""Those that can differ between Pythons although an older and a newer one pass: compiled graphs, imports, plug-ins, commands, files."""

OTHERS = ("accelerate", "lm-eval", "peft")
"""Packages that only the tests of nsa-transformers need; some are not built for the newest Python."""


def dependencies() -> list[str]:
    """Return the packages that hatch.toml installs for these tests, in addition to ours."""
    environments = tomllib.loads((ROOT / "hatch.toml").read_text(encoding="utf-8"))["envs"]
    return [line for line in environments["hatch-test"]["dependencies"] if not line.startswith(OTHERS)]


def main(arguments: Sequence[str]) -> int:
    """Make the environment and return pytest's exit code, or pip's if it could not be made; 2 for wrong arguments."""
    if len(arguments) < 2 or arguments[0].startswith("-"):
        print((__doc__ or "").strip(), file=sys.stderr)
        return 2
    python, folder, *rest = arguments
    if any(Path(folder).glob("*")) and not (Path(folder) / "pyvenv.cfg").is_file():
        print(f"{folder} would be cleared, and is no virtual environment; name another folder", file=sys.stderr)
        return 2
    is_between = rest[:1] == ["--between"]
    tests = (*TESTS_BETWEEN, *rest[1:]) if is_between else (*TESTS, *rest)
    subprocess.run([python, "-m", "venv", "--clear", folder], check=True)
    environment_python = str(Path(folder) / "bin" / "python")
    settings = {"PIP_CONSTRAINT": (ROOT / "constraints/default.txt").as_uri(), "OMP_WAIT_POLICY": "PASSIVE"}
    packages = [str(ROOT / "packages" / name) for name in PACKAGES]
    install = [environment_python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages, *dependencies()]
    code = subprocess.run(install, env={**os.environ, **settings}, check=False).returncode
    if code:
        return code
    workers = ("--numprocesses=logical", "--maxprocesses=8", "--dist=worksteal")
    test = [environment_python, "-m", "pytest", "-q", *workers, *tests]
    return subprocess.run(test, cwd=ROOT, env={**os.environ, **settings}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
