"""Third-party plug-ins as real, installed packages of one module each; what a command writes to its JSON file."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from nsa_bench import measurement, results

HOPPER = """
from nsa_core import BranchOutput, Capability, Operation, Reason
from nsa_core.plugins import hookimpl

class Hopper:
    name, operation = "hopper", Operation.WIN
    capability = Capability(device_types=("cuda",), min_compute_capability=(8, 0))
    def reasons_against(self, request):
        policy = (Reason.policy("slow on SM 8.9 [measured]"),) if request.compute_capability == (8, 9) else ()
        return self.capability.reasons_against(request) + policy
    def preference(self, request): return 10
    def notes_on(self, request): return ("an old one [slow]",) if request.device_type == "cuda" else ()
    def __call__(self, *operands, geometry, scale): raise NotImplementedError

@hookimpl
def nsa_branch_backends():
    return [Hopper()]
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Return a function that installs a package of one module with a plug-in of the same name."""
    monkeypatch.syspath_prepend(tmp_path)
    made = []

    def install(name, source=HOPPER):
        made.append(name)
        (tmp_path / f"{name}.py").write_text(source)
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[nsa]\n{name} = {name}\n")
        # the folder may have been listed before, within the clock's resolution
        monkeypatch.syspath_prepend(tmp_path)

    yield install
    for name in made:
        sys.modules.pop(name, None)


@pytest.fixture
def written(monkeypatch) -> list[dict[str, Any]]:
    """The contents that commands write to their JSON files, in order; the files are written too."""
    contents: list[dict[str, Any]] = []
    write = results.write_json

    def write_and_note(path: Path, content: dict[str, Any]) -> None:
        contents.append(content)
        write(path, content)

    monkeypatch.setattr(results, "write_json", write_and_note)
    return contents


@pytest.fixture(autouse=True)
def short_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let measurements on a machine without a GPU take few repetitions."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(measurement, "BUDGET_MS", 15.0)
