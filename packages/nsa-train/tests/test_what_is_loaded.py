"""Modules that a command loads: no torch where it only reads files or refuses its arguments, no compiler where it runs no model."""

import json
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nsa_train.run_dir import RunDirectory

WITHOUT_A_MODEL = """
import sys
from nsa_train.cli import app
try:
    app(sys.argv[1:])
except SystemExit as end:
    assert end.code == 0
assert "torch" in sys.modules
print(sorted({"torch._dynamo", "torch.distributed.tensor", "sympy"} & set(sys.modules)))
"""


def test_what_runs_no_model_loads_no_compiler(tmp_path: Path) -> None:
    words = ["preflight", "demo", "--out", str(tmp_path / "run")]
    run = subprocess.run([sys.executable, "-c", WITHOUT_A_MODEL, *words], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1] == "[]"


SAMPLE = """
import sys, time
from nsa_train.cli import run_command
from nsa_train.model.stream import TextStream
ids, clock, known = TextStream._ids, time.perf_counter, []
def read():
    known.append(set(sys.modules))
    return clock()
def watched(self):
    time.perf_counter = read
    yield from ids(self)
TextStream._ids = watched
assert run_command(["sample", sys.argv[1], "--prompt", "x", "--tokens", "2"]) == 0
print(sorted(name for name in known[1] - known[0] if name.startswith("torch")), "torch._dynamo" in sys.modules)
"""


def sampled(root: Path) -> str:
    """Return the last line of SAMPLE: torch's modules that were imported during the first prompt, and whether the compiler was imported at all."""
    found = subprocess.run([sys.executable, "-c", SAMPLE, str(root)], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    return found.stdout.splitlines()[-1]


def test_the_time_of_the_first_prompt_holds_no_imports_of_torch(tiny_run: RunDirectory) -> None:
    assert sampled(tiny_run.root) == "[] True"


def test_sampling_from_a_dense_model_loads_no_compiler(train: Callable[..., Any]) -> None:
    code, run = train("model.attention=dense")
    assert code == 0
    assert sampled(run.root) == "[] False"


ONE_AFTER_ANOTHER = """
import contextlib, io, json, sys
from nsa_train.cli import run_command
with contextlib.redirect_stdout(io.StringIO()):
    codes = [run_command(words) for words in json.loads(sys.argv[1])]
print(codes, sorted({"torch", "triton", "tensorboard", "matplotlib"} & set(sys.modules)))
"""


def test_commands_that_read_files_or_refuse_their_arguments_load_no_torch(tiny_run: RunDirectory, tmp_path: Path) -> None:
    run, nowhere = str(tiny_run.root), str(tmp_path / "nowhere")
    done = [["--help"], ["--version"], ["run", "--help"], ["ckpt", "--help"], ["watch", "--once", run], ["ckpt", "ls", run, "--json"]]
    done += [["ckpt", "verify", run], ["report", run], ["run", "demo", "--print-config"]]
    refused = [["ckpt", "ls", nowhere], ["ckpt", "verify", nowhere], ["ckpt", "export", nowhere, f"{nowhere}.safetensors"]]
    refused += [["report", nowhere], ["watch", nowhere], ["sample", nowhere, "--prompt", "x"], ["sample", run, "--prompt", ""]]
    refused += [[verb, nowhere] for verb in ("run", "preflight", "loader-check")]
    refused += [["run", "demo", "--set", wrong] for wrong in ("train.stepz=3", "train.steps=abc", "lr=3", "nsa.window_size=abc")]
    refused += [["run", "demo", "--nope"], ["runn"], ["run", "demo", "--resume", "--out", nowhere], ["resume", nowhere]]
    refused += [
        ["run", "demo", "--out", run],
        ["run", "demo", "--resume"],
        ["run", "demo", "--resume", "--out", str(tmp_path)],
        ["run", "demo", "--out", str(tiny_run.config)],
        ["run", "demo", "--out", f"{tiny_run.config}/below"],
        ["run", "demo", "--resume", "auto", "--out", str(tiny_run.config)],
        ["eval", nowhere],
        ["eval", run, "--twin", nowhere],
        ["eval", run, "--text", nowhere],
        ["eval", run, "--text", str(tmp_path)],
    ]
    refused += [["convert", nowhere, "--out", f"{nowhere}2"], ["ckpt", "import", nowhere, f"{nowhere}2"]]
    empty = tmp_path / "empty"
    empty.mkdir()
    refused += [
        ["convert", str(empty), "--out", f"{nowhere}2"],
        ["ckpt", "import", str(empty), f"{nowhere}2"],
        ["ckpt", "verify", str(empty)],
    ]
    refused += [["eval", str(empty)], ["eval", run, "--twin", str(empty)], ["explore", str(empty), "--text", __file__]]
    refused += [["explore", nowhere, "--text", nowhere], ["explore", run, "--text", __file__, "--tokens", "0"]]
    words = json.dumps([*refused, *done])
    found = subprocess.run([sys.executable, "-c", ONE_AFTER_ANOTHER, words], capture_output=True, text=True, check=True)
    assert found.stdout == f"{[2] * len(refused) + [0] * len(done)} []\n"


@pytest.mark.parametrize("words", [["ckpt", "ls"], ["watch", "--once"], ["report"], ["ckpt", "verify"], ["--help"]], ids=" ".join)
def test_a_command_that_reads_files_takes_a_second_of_the_processor_at_most(tiny_run: RunDirectory, words: list[str]) -> None:
    """Measured alone, `report` of a finished run takes 0.5 s and the others 0.3; the rest is for a machine that others use."""
    paths = [] if words == ["--help"] else [str(tiny_run.root)]
    seconds = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "nsa_train", *words, *paths], capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        if seconds[-1] < 2:
            break
    assert min(seconds) < 2
