"""The command line: verbs, exit codes, messages without tracebacks."""

import io
import json
import os
import platform
import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
from cyclopts import App

from nsa_core import Operation
from nsa_core.errors import BackendUnavailableError, DuplicateBackendError, InputError, NSAError
from nsa_core.errors import ConfigError as CoreConfigError
from nsa_train import cli
from nsa_train.__about__ import __version__
from nsa_train.checkpoint.claim import claim, release
from nsa_train.cli import app, run_command
from nsa_train.errors import ConfigError
from nsa_train.run_dir import RunDirectory
from nsa_train.settings.config import structure
from nsa_train.settings.options import AUTO
from nsa_train.settings.recipe import load_config, shipped_recipes


def test_the_module_is_the_command() -> None:
    result = subprocess.run([sys.executable, "-m", "nsa_train", "--help"], capture_output=True, text=True, check=True)
    assert all(verb in result.stdout for verb in ("run", "preflight", "sample", "report"))


def _arguments(command: App) -> dict[str, str]:
    """Return the help text of each argument and option of the commands of `command`."""
    found = {}
    for name in command:
        if name.startswith("-"):
            continue
        if all(word.startswith("-") for word in command[name]):
            # a group of options has a name that no help shows
            arguments = (one for one in command[name].assemble_argument_collection() if one.name != "*")
            found |= {f"{name} {one.name}": one.parameter.help or "" for one in arguments}
        else:
            found |= _arguments(command[name])
    return found


def test_every_argument_and_option_has_a_help_text() -> None:
    found = _arguments(app)
    assert {"run RECIPE", "preflight RECIPE", "watch DIR", "report DIR", "sample CKPT", "verify PATH", "export CKPT", "export OUT"} <= set(
        found
    )
    assert [name for name, text in found.items() if not text] == []


@pytest.mark.parametrize("command", ["run", "preflight", "loader-check"])
def test_the_help_names_every_shipped_recipe(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert len(shipped_recipes()) >= 5
    assert all(name in text for name in shipped_recipes())


def test_the_version_names_the_package_and_what_it_runs_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["--version"]) == 0
    first, *others, python, system = capsys.readouterr().out.splitlines()
    assert first == f"nsa-train {__version__}"
    # torch's own version may name the CUDA that it was built for as well
    assert f"torch {version('torch')}" in others
    assert {line.split()[0] for line in others} == {"nsa-core", "nsa-kernels-triton", "torch", "triton"}
    assert (python, system) == (f"Python {platform.python_version()}", platform.platform())


@pytest.mark.parametrize(
    ("shell", "script"),
    [
        ("bash", ".local/share/bash-completion/completions/nsa-train"),
        ("zsh", ".zsh/completions/_cyclopts_nsa-train"),
        ("fish", ".config/fish/completions/nsa-train.fish"),
    ],
)
def test_completion_is_installed(shell: str, script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("ZSH", "ZSH_CUSTOM"):
        monkeypatch.delenv(name, raising=False)
    assert run_command(["--install-completion", "--shell", shell]) == 0
    text = (tmp_path / script).read_text()
    words = ("run", "preflight", "loader-check", "watch", "sample", "report", "ckpt", "ls", "verify", "export", "synthetic-on-fail")
    assert all(word in text for word in words)


def without_torch(*words: str) -> tuple[int, str]:
    """Return the exit code and stderr of a command line that must not import torch."""
    program = (
        "import sys, nsa_train.cli as cli\n"
        "code = cli.run_command(sys.argv[1:])\n"
        "sys.exit(f'torch was imported, {code}' if 'torch' in sys.modules else code)"
    )
    result = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=False)
    return result.returncode, result.stderr


def test_a_mistyped_key_is_reported_without_importing_torch() -> None:
    code, told = without_torch("run", "demo", "--set", "train.stepz=3")
    assert code == 2
    assert told == "nsa-train: train.stepz is unknown (every key is read or refused); did you mean train.steps?\n"


@pytest.mark.parametrize("steps", [[], [2, 4]])
def test_a_resume_from_a_step_that_was_not_saved_is_refused_without_importing_torch(tmp_path: Path, steps: list[int]) -> None:
    (tmp_path / "config.toml").touch()
    (tmp_path / "checkpoints").mkdir()
    for step in steps:
        (tmp_path / f"checkpoints/step-{step}").mkdir()
    for words in ([], ["--dry-run"]):
        code, told = without_torch("run", "demo", "--out", str(tmp_path), "--resume", "7", *words)
        assert code == 2
        there = ", ".join(map(str, steps)) or "none"
        assert told.endswith(f"checkpoints has no step-7 (there are: {there}); use --resume for the latest\n")


def test_print_config_round_trips(tiny_recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["run", str(tiny_recipe), "--set", "train.steps=7", "--print-config"]) == 0
    printed = structure(tomllib.loads(capsys.readouterr().out))
    assert printed == load_config(str(tiny_recipe), ["train.steps=7"])


def test_a_directory_that_is_not_empty_is_refused(tiny_recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "old.txt").write_text("keep me")
    assert run_command(["run", str(tiny_recipe), "--out", str(tmp_path)]) == 2
    message = capsys.readouterr().err
    assert "is not empty" in message
    assert "name a new directory" in message
    assert [path.name for path in tmp_path.iterdir()] == ["old.txt"]


def test_a_recipe_whose_data_are_still_to_be_named_is_judged_and_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failure = "data.path=None does not name a file (data.source='text' reads local files); use --set data.path=FILE"
    assert run_command(["run", "showcase", "--out", str(tmp_path / "run")]) == 2
    assert failure in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert run_command(["preflight", "showcase"]) == 2
    printed = capsys.readouterr()
    [line] = printed.err.splitlines()
    assert line.startswith(f"FAIL  {failure}")
    assert "parameters with nsa" in printed.out
    assert "route: slc -> " in printed.out
    assert "needs data: text, the files that data.path names" in printed.out
    assert run_command(["loader-check", "showcase"]) == 2
    assert failure in capsys.readouterr().err


def test_a_recipe_whose_data_are_still_to_be_named_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["run", "showcase", "--print-config"]) == 0
    assert structure(tomllib.loads(capsys.readouterr().out)) == load_config("showcase")


NOT_UTF_8 = "bad\udcff"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--out", NOT_UTF_8], "--out='bad\\udcff' is not UTF-8 (no record could name it); name another directory"),
        (
            ["--out", "out", "--set", f"data.path={NOT_UTF_8}"],
            "--set 'data.path=bad\\udcff' is not UTF-8 (config.toml could not hold it); rename the file, or use a glob",
        ),
    ],
)
def test_what_cannot_be_recorded_is_refused_before_anything_is_made(
    tiny_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_command(["run", str(tiny_recipe), *words]) == 2
    assert capsys.readouterr().err == f"nsa-train: {message}\n"
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["convert", NOT_UTF_8, "--out", "out"], "SOURCE"),
        (["convert", "model", "--out", NOT_UTF_8], "--out"),
        (["ckpt", "import", NOT_UTF_8, "out"], "SOURCE"),
        (["ckpt", "import", "model", NOT_UTF_8], "OUT"),
        (["ckpt", "export", NOT_UTF_8, "out"], "CKPT"),
        (["ckpt", "export", "model", NOT_UTF_8], "OUT"),
        (["sample", NOT_UTF_8, "--prompt", "a"], "CKPT"),
        (["eval", NOT_UTF_8, "--text", "model/config.json"], "RUN_OR_EXPORT"),
        (["explore", "model", "--text", "model/config.json", "--twin", NOT_UTF_8], "--twin"),
    ],
)
def test_paths_that_safetensors_cannot_open_are_refused_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ["model"] if name in ("--out", "OUT") else ["model", NOT_UTF_8]:
        Path(folder).mkdir()
        Path(folder, "config.json").write_text("{}")
    before = sorted(tmp_path.rglob("*"))
    assert run_command(words) == 2
    assert capsys.readouterr().err == f"nsa-train: {name}='bad\\udcff' is not UTF-8 (safetensors opens no such path); rename it\n"
    assert sorted(tmp_path.rglob("*")) == before


def test_what_the_output_cannot_spell_is_replaced(tiny_run: RunDirectory) -> None:
    words = ["sample", str(tiny_run.root), "--prompt", "caf\u00e9 \u4e1c", "--tokens", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "nsa_train", *words], env={**os.environ, "PYTHONIOENCODING": "ascii"}, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(b"caf? ?")


def test_a_missing_file_exits_2_and_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    arguments = ["run", "showcase", "--set", f"data.path={tmp_path}/absent.txt", "--out", str(out)]
    assert run_command(arguments) == 2
    assert "absent.txt cannot be read (No such file or directory)" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize("words", [["rnu", "demo"], ["run"], ["run", "demo", "--stpes", "3"], ["sample", "x"]])
def test_a_malformed_command_line_exits_2(words: list[str]) -> None:
    assert run_command(words) == 2


def test_preflight_says_what_holds(tiny_recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["preflight", str(tiny_recipe), "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in printed} <= {"ok", "needs", "warn"}
    assert {"out:", "data:", "route:", "schedule:"} <= {line.split()[1] for line in printed}
    assert not (tmp_path / "out").exists()


def test_preflight_fails_with_one_line_per_rule(tiny_recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x").touch()
    words = ["preflight", str(tiny_recipe), "--out", str(tmp_path), "--set", "nsa.backends.win=nosuch"]
    assert run_command([*words, "--set", "train.seq_len=100000"]) == 2
    failures = capsys.readouterr().err.splitlines()
    assert all(line.startswith("FAIL  ") for line in failures)
    for parts in (("is not empty",), ("train.seq_len=100000 is longer than the train split",), ("nsa.backends.win='nosuch'", "use 'auto'")):
        assert sum(all(part in line for part in parts) for line in failures) == 1, failures


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
def test_a_recipe_for_a_gpu_says_so_where_there_is_none(
    tiny_recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    """Our own words, before torchrun or a process group could have theirs."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    words = ["run", str(tiny_recipe), "--out", str(tmp_path / "out"), "--set", "train.device=cuda", "--set", f"train.strategy={strategy}"]
    for more in ([], ["--nproc", "2"]):
        if strategy != "single" or not more:
            assert run_command([*words, *more]) == 2
            assert "train.device='cuda' finds no CUDA GPU here" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_sample_is_seeded(tiny_run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["sample", str(tiny_run.root), "--prompt", "12 bot", "--tokens", "30"]
    texts = []
    for seed in ("0", "0", "1"):
        assert run_command([*words, "--seed", seed]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0].startswith("12 bot")
    assert texts[0] == texts[1] != texts[2]


def test_sample_reads_prompts_from_a_file_or_standard_input(
    tiny_run: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["sample", str(tiny_run.root), "--tokens", "6", "--temperature", "0"]
    alone = []
    for prompt in ("12 bot", "on wall"):
        assert run_command([*words, "--prompt", prompt]) == 0
        alone.append(capsys.readouterr().out)
    (tmp_path / "prompts.txt").write_text("12 bot\n \non wall\r\n", newline="")
    assert run_command([*words, "--prompts", str(tmp_path / "prompts.txt")]) == 0
    printed = capsys.readouterr()
    assert printed.out == "".join(alone)
    assert len(re.findall(r"^nsa-train: \d+ tokens, [\d.]+ tokens/s after a prompt of [\d.]+ s$", printed.err, re.MULTILINE)) == 2
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"12 bot\n")))
    assert run_command([*words, "--prompts", "-"]) == 0
    assert capsys.readouterr().out == alone[0]


def test_sample_stops_before_a_text_and_draws_among_the_likeliest(tiny_run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["sample", str(tiny_run.root), "--prompt", "12 bot", "--tokens", "30"]
    greedy, narrow, wide = ([*words, *more] for more in (["--temperature", "0"], ["--top-p", "1e-9"], ["--temperature", "5"]))
    texts = []
    for line in (greedy, narrow, wide):
        assert run_command(line) == 0
        texts.append(capsys.readouterr().out.removeprefix("12 bot").removesuffix("\n"))
    assert texts[0] == texts[1] != texts[2]
    stop = texts[2][9:12]
    assert run_command([*wide, "--stop", "no such text", "--stop", stop]) == 0
    assert capsys.readouterr().out == f"12 bot{texts[2][: texts[2].index(stop)]}\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--prompt and --prompts came together or not at all"),
        (["--prompt", "x", "--prompts", "y"], "--prompt and --prompts came together or not at all"),
        (["--prompts", "no/such/file"], "--prompts='no/such/file' cannot be read"),
        (["--prompt", "x", "--top-p", "0"], "--top-p=0.0 is not a number above 0, up to 1; use 0.95"),
        (["--prompt", "x", "--top-p", "1.5"], "--top-p=1.5 is not"),
        (["--prompt", "x", "--stop", ""], "--stop='' is empty"),
        (["--prompt", "x", "--device", "tpu"], "--device"),
    ],
)
def test_sample_refuses_options_that_do_not_fit(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["sample", "no/such/run", *words]) == 2
    assert message in capsys.readouterr().err


def test_sample_without_a_gpu_says_so(tiny_run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert run_command(["sample", str(tiny_run.root), "--prompt", "x", "--device", "cuda"]) == 2
    assert "--device='cuda' finds no CUDA GPU here; use --device cpu" in capsys.readouterr().err


@pytest.mark.hardware(capability=(8, 0))
def test_sample_on_a_gpu_writes_what_the_cpu_does(tiny_run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    texts = set()
    for device in ("cpu", "cuda"):
        words = ["sample", str(tiny_run.root), "--prompt", "12 bot", "--tokens", "8", "--temperature", "0", "--device", device]
        assert run_command(words) == 0
        texts.add(capsys.readouterr().out)
    assert len(texts) == 1


def test_a_file_without_a_prompt_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for content, message in ((b"\n \n", "holds no prompt"), (b"\xff\n", "cannot be read"), (b"", "holds no prompt")):
        (tmp_path / "prompts.txt").write_bytes(content)
        assert run_command(["sample", "no/such/run", "--prompts", str(tmp_path / "prompts.txt")]) == 2
        assert message in capsys.readouterr().err


def test_sample_takes_a_run_a_step_or_latest(tiny_run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    texts = set()
    for path in (tiny_run.root, tiny_run.checkpoints / "latest", tiny_run.checkpoints / "step-5"):
        assert run_command(["sample", str(path), "--prompt", "1", "--tokens", "10"]) == 0
        texts.add(capsys.readouterr().out)
    assert len(texts) == 1


def test_a_prompt_that_is_not_utf_8_is_refused(tiny_run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["sample", str(tiny_run.root), "--prompt", NOT_UTF_8]) == 2
    assert capsys.readouterr().err == "nsa-train: --prompt='bad\\udcff' is not UTF-8 (the tokenizer reads that); use --prompt 'def '\n"


def test_sample_refuses_what_it_cannot_use(tiny_run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(tiny_run.root)
    assert run_command(["sample", run, "--prompt", "", "--tokens", "0", "--temperature", "-1"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 3
    assert run_command(["sample", "no/such/run", "--prompt", "x"]) == 2
    assert "CKPT='no/such/run' holds no checkpoint" in capsys.readouterr().err


def test_a_backend_that_cannot_serve_a_sample_is_one_line(tiny_run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["sample", str(tiny_run.root), "--prompt", "1", "--tokens", "3"]
    assert run_command([*words, "--backend", "nosuch"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("nsa-train: --backend='nosuch': nsa.backends.cmp='nosuch' is not installed (there is sdpa")
    assert line.endswith("); use --backend auto")
    texts = set()
    for backend in ("sdpa", "auto"):
        assert run_command([*words, "--backend", backend]) == 0
        texts.add(capsys.readouterr().out)
    assert len(texts) == 1


def test_a_sample_asks_a_named_backend_of_all_branches_in_one_as_any_other(
    tiny_run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run of a GPU that named one is sampled on a CPU with `--backend auto`."""
    words = ["sample", str(tiny_run.root), "--prompt", "1", "--tokens", "3"]
    monkeypatch.setattr("nsa_train.host.routing.named_backends", lambda _: {Operation.NSA: "nosuch"})
    assert run_command(words) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "nsa.backends.nsa='nosuch' is not installed" in line
    assert line.endswith("); use --backend auto")


def test_preflight_marks_what_nsa_core_refuses(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise DuplicateBackendError("two plug-ins offer slc:\n  mine\n  yours")

    monkeypatch.setattr("nsa_train.preflight.judge.check_routes", refuse)
    assert run_command(["preflight", "demo"]) == 2
    assert capsys.readouterr().err == "FAIL  two plug-ins offer slc: mine; yours\n"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (BackendUnavailableError("no backend:\nslc: none\n  mine: incapable: gone"), 2),
        (DuplicateBackendError("no backend:\nslc: none\n  mine: incapable: gone"), 2),
        (CoreConfigError("no backend:\nslc: none\n  mine: incapable: gone"), 2),
        (InputError("no backend:\nslc: none\n  mine: incapable: gone"), 1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_whatever_nsa_core_refuses_is_one_line(
    tiny_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: NSAError, code: int
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("nsa_train.loop.trainer.Trainer._step", refuse)
    out = tmp_path / "out"
    assert run_command(["run", str(tiny_recipe), "--out", str(out), "--set", "data.source=synthetic", "--set", "data.path="]) == code
    assert capsys.readouterr().err == "nsa-train: no backend: slc: none; mine: incapable: gone\n"
    assert json.loads((out / "heartbeat_rank0.jsonl").read_text().splitlines()[-1])["code"] == code


def test_report_refuses_a_directory_without_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["report", str(tmp_path)]) == 2
    assert "is no run" in capsys.readouterr().err


def test_a_dry_run_judges_and_trains_nothing(tiny_recipe, tmp_path, capsys):
    out = tmp_path / "out"
    assert run_command(["run", str(tiny_recipe), "--out", str(out), "--dry-run"]) == 0
    assert "route: win -> " in capsys.readouterr().out
    assert run_command(["run", str(tiny_recipe), "--out", str(out), "--dry-run", "--set", "train.seq_len=1000000"]) == 2
    assert "train.seq_len=1000000" in capsys.readouterr().err
    assert not out.exists()


def test_the_trainer_loads_no_compiler() -> None:
    """Triton takes seconds to import, and its interpreter must be asked for before that."""
    program = "import sys, nsa_train.loop.run; print('triton' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


def test_a_command_without_a_stdout_has_no_traceback(tiny_run: RunDirectory) -> None:
    words = f"{sys.executable} -m nsa_train ckpt ls {tiny_run.root} >&-"
    done = subprocess.run(["sh", "-c", words], stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_run_whose_reader_went_away_goes_on(tiny_recipe: Path, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "nsa_train", "run", str(tiny_recipe), "--out", str(tmp_path / "run")]
    words += ["--set", "data.source=synthetic", "--set", "data.path="]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline().startswith("warn: data: synthetic ids")
        process.stdout.close()
        err = process.stderr.read()
    assert (process.returncode, err) == (0, "")
    assert (tmp_path / "run" / "checkpoints" / "latest").is_dir()


@pytest.mark.parametrize("words", [["ckpt", "ls"], ["ckpt", "verify"]])
def test_a_reader_that_went_away_is_no_error_to_speak_of(tiny_run: RunDirectory, words: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "nsa_train", *words, str(tiny_run.root)]
    done = [
        subprocess.run(command, env={**os.environ, **variables}, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
        for variables in ({"PYTHONUNBUFFERED": "1"}, {"PYTHONUNBUFFERED": ""})
    ]
    os.close(writer)
    assert [(one.returncode, one.stderr) for one in done] == [(1, "")] * 2


def test_a_host_that_joins_a_run_may_find_it_claimed(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    run.checkpoints.mkdir(parents=True)
    descriptor = claim(run.checkpoints)
    cli._check_directory(run, AUTO, dry_run=False)
    with pytest.raises(ConfigError, match="belongs to"):
        cli._check_directory(run, None, dry_run=False)
    release(run.checkpoints, descriptor)
