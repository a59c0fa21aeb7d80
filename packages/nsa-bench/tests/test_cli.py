"""The command line: commands, files and exit codes."""

import csv
import errno
import json
import subprocess
import sys
from pathlib import Path

import pytest

from nsa_bench.__about__ import __version__
from nsa_bench.cli import app, main, run_command
from nsa_train.settings.recipe import shipped_recipes


def test_backends_prints_and_writes_the_routing(install, tmp_path, capsys):
    install("hopper_kernels")
    files = ["--json", str(tmp_path / "routing.json"), "--csv", str(tmp_path / "routing.csv")]
    assert run_command(["backends", "--compute-capability", "9.0", "--layout", "packed", "--no-backward", *files]) == 0
    assert "hopper" in capsys.readouterr().out
    content = json.loads((tmp_path / "routing.json").read_text())
    assert content["device"]["compute_capability"] == "9.0"
    assert content["request"]["layout"] == "packed"
    assert not any(operation["needs_grad"] for operation in content["operations"])
    with (tmp_path / "routing.csv").open(newline="") as file:
        assert {row["device_compute_capability"] for row in csv.DictReader(file)} == {"9.0"}


def test_every_option_reaches_the_request(tmp_path):
    path = tmp_path / "routing.json"
    numbers = {"seq-len": 100, "heads": 6, "kv-heads": 3, "head-dim-qk": 10, "head-dim-v": 7}
    options = [f"--{name}={value}" for name, value in numbers.items()]
    assert run_command(["backends", "--device=cpu", "--dtype=fp64", "--layout=paged", "--backward", f"--json={path}", *options]) == 0
    content = json.loads(path.read_text())
    request = content["request"]
    names = ("num_keys", "num_queries", "num_heads", "num_kv_heads", "head_dim_qk", "head_dim_v", "dtype", "layout")
    assert [request[name] for name in names] == [100, 1, 6, 3, 10, 7, "float64", "paged"]
    assert content["operations"][0]["needs_grad"]


def test_env_prints_and_writes_the_environment(tmp_path, capsys):
    assert run_command(["env", "--json", str(tmp_path / "env.json"), "--csv", str(tmp_path / "env.csv")]) == 0
    assert "nsa-core" in capsys.readouterr().out
    environment = json.loads((tmp_path / "env.json").read_text())
    assert {"time", "python", "torch", "triton", "cuda", "gpu", "compute_capability", "commit", "packages"} <= set(environment)
    with (tmp_path / "env.csv").open(newline="") as file:
        assert {row["name"]: row["value"] for row in csv.DictReader(file)}["python"] == environment["python"]


TINY = ["--device", "cpu", "--shapes", "4/2/16/16", "--lengths", "60", "--geometry", "8/4/8/4/12"]


def test_attention_prints_and_writes_times_errors_and_reasons(tmp_path, capsys):
    files = ["--json", str(tmp_path / "a.json"), "--csv", str(tmp_path / "a.csv")]
    assert run_command(["attention", *TINY, "--commit", "abc123", *files]) == 0
    shown = capsys.readouterr()
    assert "4/2/16/16, 60 tokens, random" in shown.out
    assert "dense on SDPA cuDNN: runs on CUDA devices only" in shown.out
    assert "nsa fwd+bwd on sdpa:" in shown.err
    content = json.loads((tmp_path / "a.json").read_text())
    assert content["environment"]["commit"] == "abc123"
    assert (content["options"]["lengths"], content["options"]["backend"]) == ("60", "auto")
    rows = content["rows"]
    assert {row["commit"] for row in rows} == {"abc123"}
    assert [(row["operation"], row["direction"]) for row in rows[:5]] == [
        ("nsa", "fwd"), ("nsa", "fwd+bwd"), ("cmp", "fwd"), ("cmp", "fwd+bwd"), ("select", "fwd"),
    ]  # fmt: skip
    assert all((row["median_ms"] is None) == bool(row["reason"]) for row in rows)
    with (tmp_path / "a.csv").open(newline="") as file:
        assert list(csv.DictReader(file)) == [{name: "" if value is None else str(value) for name, value in row.items()} for row in rows]


def test_attention_with_a_wrong_backend_is_exit_1_without_a_time(install, tmp_path, capsys):
    install("liar_kernels", LIAR)
    path = tmp_path / "a.json"
    options = ["--operations", "win,cmp", "--baseline", "none", "--no-backward", "--json", str(path)]
    assert run_command(["attention", *TINY, *options]) == 1
    shown = capsys.readouterr()
    assert "win on liar: wrong: out is off" in " ".join(shown.out.split())
    assert "nsa-bench: 1 of 2 results are wrong or failed" in shown.err
    cmp, win = json.loads(path.read_text())["rows"]
    assert (win["implementation"], win["median_ms"]) == ("liar", None)
    assert cmp["median_ms"] > 0
    # by name, the reference is right
    assert run_command(["attention", *TINY, *options, "--backend", "sdpa"]) == 0


LIAR = """
from nsa_core import BranchOutput, Capability, Operation
from nsa_core.plugins import hookimpl

class Liar:
    name, operation = "liar", Operation.WIN
    capability = Capability(gradient=False)
    def reasons_against(self, request): return self.capability.reasons_against(request)
    def preference(self, request): return 10
    def __call__(self, queries, keys, *, geometry, scale):
        q, v = queries.q, keys.v
        return BranchOutput(q.new_ones(*q.shape[:-1], v.shape[-1]), q.new_zeros(q.shape[:-1]))

@hookimpl
def nsa_branch_backends():
    return [Liar()]
"""


def test_attention_sweeps(tmp_path, capsys):
    options = ["--sweep", "--lengths", "12", "--operations", "win", "--no-backward", "--geometry", "8/4/8/4/12"]
    path = tmp_path / "sweep.csv"
    assert run_command(["attention", "--device", "cpu", *options, "--csv", str(path), "--json", str(tmp_path / "sweep.json")]) == 0
    assert "100 sequences" in capsys.readouterr().out
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["variable"] for row in rows] == ["D"] * 6 + ["H/G"] * 8 + ["S"] * 3 + ["packed"] * 2
    assert {row["verdict"] for row in rows} <= {"within", "cliff"}
    assert all(float(row["ratio"]) > 0 and float(row["pair_cost_ps"]) > 0 for row in rows)
    content = json.loads((tmp_path / "sweep.json").read_text())
    assert len(content["sweep"]) == 19
    assert len(content["rows"]) == 18


def test_compare_prints_us_and_why_peers_are_absent(tmp_path, capsys):
    path = tmp_path / "c.json"
    shape = ["--device", "cpu", "--shapes", "4/2/16/8", "--lengths", "70", "--geometry", "8/8/8/4/12"]
    assert run_command(["compare", *shape, "--json", str(path), "--csv", str(tmp_path / "c.csv")]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "flash-linear-attention: " in text
    assert "runs on a GPU only" in text
    assert "takes D_k = D_v only" in text
    rows = json.loads(path.read_text())["rows"]
    assert [row["implementation"] for row in rows] == ["sdpa"] * 2 + ["flash-linear-attention"] * 2 + [
        "native-sparse-attention-pytorch"
    ] * 2
    assert [row["median_ms"] is None for row in rows] == [False] * 2 + [True] * 4


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("attention --device cpu --lengths none", "--lengths has 'none'"),
        ("attention --device cpu --shapes Q", "--shapes has 'Q'"),
        ("attention --device cpu --geometry 32/16", "is not l/d/l'/n/w"),
        ("attention --device cpu --baseline fast", "--baseline='fast'"),
        ("attention --device cpu --selection trained", "--selection has 'trained'"),
        ("attention --device cpu --operations sum", "--operations has 'sum'"),
        ("attention --device cpu --preset targets", "--preset=targets on a CPU"),
        ("attention --device cpu --preset musts", "Invalid value"),
        ("attention --device cpu --sweep --shapes P", "--shapes came with --sweep"),
        ("attention --device cpu --json no/such/folder/a.json", "give a path that can be written"),
        ("compare --device cpu --shapes 3/2/8/8", "--shapes has '3/2/8/8'"),
        ("compare --device cpu --csv no/such/folder/a.csv", "give a path that can be written"),
        ("compare --device tpu", "Invalid value"),
        ("backends --kv-heads 3", "--kv-heads=3 does not divide --heads=64"),
        ("backends --seq-len 0", "--seq-len=0 is too small"),
        ("backends --device cpu --compute-capability 9.0", "came with --device=cpu"),
        ("backends --compute-capability ninety", "--compute-capability='ninety' is not MAJOR.MINOR"),
        ("backends --dtype int8", "Invalid value"),
        ("backends --layout tiled", "Invalid value"),
        ("backends --seq-len many", "Invalid value"),
        ("backends --sequence 7", "Unknown option"),
        ("env --json no/such/folder/env.json", "give a path that can be written"),
        ("measure", "Unknown command"),
    ],
)
def test_a_bad_option_is_exit_2_with_a_message(command, message, capsys):
    assert run_command(command.split()) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("words", ["env", "backends --device cpu", "smoke RUN", "train demo --steps 5"])
@pytest.mark.parametrize("option", ["--json", "--csv"])
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_done(words, option, tmp_path, monkeypatch, capsys):
    for name in ("results.describe", "train.run_twin", "smoke.judge_run", "backends.describe"):
        monkeypatch.setattr(f"nsa_bench.{name}", lambda *_, **__: pytest.fail("something was done"))
    path = tmp_path / "missing" / "found"
    assert run_command([*words.replace("RUN", str(tmp_path)).split(), option, str(path)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert f"nsa-bench: [Errno 2] No such file or directory: '{path}'; give a path that can be written" in printed.err


@pytest.mark.parametrize("words", ["env --json", "ablate", "report"])
def test_a_name_that_is_too_long_is_exit_2_with_what_to_do(words, capsys):
    assert run_command([*words.split(), 300 * "a"]) == 2
    assert capsys.readouterr().err.endswith("aaa'; use a shorter name\n")


@pytest.mark.parametrize("option", ["--json", "--csv"])
def test_a_full_disk_is_exit_1_and_names_the_file(option, tmp_path, monkeypatch, capsys):
    def full(path, text, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    path = tmp_path / "found"
    assert run_command(["env", option, str(path)]) == 1
    message = f"nsa-bench: [Errno {errno.ENOSPC}] No space left on device: '{path}'; make room, or give a path on another disk\n"
    assert capsys.readouterr().err.endswith(message)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_is_named_where_stdout_is_closed_too(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdout", None)
    assert run_command(["env", "--json", "no/such/folder/env.json"]) == 2
    assert "give a path that can be written" in capsys.readouterr().err


def test_two_plug_ins_of_one_name_are_exit_1_with_a_message(install, capsys):
    install("hopper_kernels")
    install("more_kernels")
    assert run_command(["backends"]) == 1
    assert "nsa-bench: plug-in 'more_kernels'" in capsys.readouterr().err


COMMANDS = (
    *("ablate", "attention", "backends", "choices", "compare", "decode", "env", "fa2-sweep", "generate", "layer", "needle"),
    *("prefill", "report", "select", "smoke", "thresholds", "train"),
)


def test_help_names_the_commands_that_exist(capsys):
    assert run_command(["--help"]) == 0
    text = capsys.readouterr().out
    assert {name for name in app if not name.startswith("-")} == set(COMMANDS)
    assert "backends" in text
    assert "Exit codes: 0 done, 1 error, 2 a bad option." in text


def test_main_exits_with_the_code(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["backends", "--heads", "0"])
    assert caught.value.code == 2


ONE_AFTER_ANOTHER = """
import contextlib, io, json, sys
from nsa_bench.cli import run_command
with contextlib.redirect_stdout(io.StringIO()):
    codes = [run_command(words) for words in json.loads(sys.argv[1])]
print(codes, "torch" in sys.modules)
"""


def test_help_version_and_wrong_arguments_need_no_torch(tmp_path):
    done = [["--help"], ["--version"], ["train", "--help"]]
    refused = [
        ["smoke", str(tmp_path)],
        ["choices", str(tmp_path / "nowhere")],
        ["choices", str(tmp_path)],
        ["attention", "--selection", f"random,recorded:{tmp_path}/nowhere"],
        ["attention", "--selection", f"recorded:{tmp_path}"],
        ["train", "no/such"],
        ["train", "demo", "--set", "train.stepz=3"],
        ["train", "demo", "--set", "lr=3"],
        ["report", str(tmp_path / "nowhere")],
        ["ablate", "no/such"],
        ["needle", "no/such"],
        ["needle", "tiny", "--set", "train.stepz=3"],
    ]
    found = subprocess.run(
        [sys.executable, "-c", ONE_AFTER_ANOTHER, json.dumps([*done, *refused])], capture_output=True, text=True, check=True
    )
    assert found.stdout == f"{[0] * len(done) + [2] * len(refused)} False\n"
    assert f"nsa-bench: RUN='{tmp_path}/nowhere' holds no checkpoint (" in found.stderr
    assert any(line.endswith("did you mean --set train.lr=3?") for line in found.stderr.splitlines())


def test_every_argument_and_option_has_a_help_text():
    found = {
        f"{name} {one.name}": one.parameter.help
        for name in app
        if not name.startswith("-")
        for one in app[name].assemble_argument_collection()
        # a group of options has none of its own
        if one.name != "*"
    }
    assert {"smoke RUN_DIR", "train RECIPE", "backends --head-dim-qk"} <= set(found)
    assert [name for name, text in found.items() if not text] == []
    assert all(name in found["train RECIPE"] for name in shipped_recipes())


def test_the_version_names_the_package_and_what_it_runs_on(capsys):
    assert run_command(["--version"]) == 0
    first, *others = capsys.readouterr().out.splitlines()
    assert first == f"nsa-bench {__version__}"
    assert {"nsa-core", "nsa-train", "torch", "triton", "Python"} <= {line.split()[0] for line in others}


@pytest.mark.parametrize(
    ("shell", "script"),
    [
        ("bash", ".local/share/bash-completion/completions/nsa-bench"),
        ("zsh", ".zsh/completions/_cyclopts_nsa-bench"),
        ("fish", ".config/fish/completions/nsa-bench.fish"),
    ],
)
def test_completion_is_installed(shell, script, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("ZSH", "ZSH_CUSTOM"):
        monkeypatch.delenv(name, raising=False)
    assert run_command(["--install-completion", "--shell", shell]) == 0
    text = (tmp_path / script).read_text()
    assert all(word in text for word in ("attention", "backends", "compare", "env", "smoke", "train", "compute-capability"))


def test_a_backend_that_serves_some_of_what_is_wanted_is_measured(install, tmp_path, capsys):
    install("liar_kernels", LIAR)
    path = tmp_path / "a.json"
    options = ["--baseline", "none", "--no-backward", "--json", str(path), "--backend", "liar"]
    assert run_command(["attention", *TINY, "--operations", "win,cmp", *options]) == 1
    cmp, win = json.loads(path.read_text())["rows"]
    assert cmp["reason"].startswith("BackendUnavailableError: no backend 'liar' for operation 'cmp'")
    assert win["implementation"] == "liar"
    path.unlink()
    capsys.readouterr()
    assert run_command(["attention", *TINY, "--operations", "nsa,cmp", *options]) == 2
    assert capsys.readouterr().err.endswith("(liar: it has no cmp, it has no select, it has no slc); use --backend auto\n")
    assert not path.exists()


def test_the_package_runs_as_a_module_and_reports_a_bad_option_without_torch():
    program = "import runpy, sys; sys.argv = ['nsa-bench', 'backends', '--nope']\ntry: runpy.run_module('nsa_bench', run_name='__main__')\n"
    program += "except SystemExit as end: print(end.code, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2", "False"]
    assert "Traceback" not in done.stderr


WITHOUT_TRAINER = """
import json, sys
sys.modules["nsa_train"] = None
from nsa_bench.cli import run_command
print([run_command(words) for words in json.loads(sys.argv[1])])
"""


def test_commands_that_train_say_what_is_missing_and_the_others_need_no_trainer(tmp_path):
    drives = [["train", "demo"], ["ablate", "recall"], ["needle", "tiny"], ["choices", str(tmp_path)], ["smoke", str(tmp_path)]]
    others = [["--help"], ["--version"], ["train", "--help"], ["env"], ["backends", "--device", "cpu"]]
    words = [sys.executable, "-c", WITHOUT_TRAINER, json.dumps([*drives, *others])]
    done = subprocess.run(words, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.splitlines()[-1] == str([2] * len(drives) + [0] * len(others))
    sentence = "nsa-bench: {} drives nsa-train, which is not installed (it is an extra); in a checkout: "
    sentence += "pip install ./packages/nsa-train './packages/nsa-bench[train]'"
    assert done.stderr.splitlines() == [sentence.format(command) for command, *_ in drives]
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("module", ["platform", "cyclopts", "torch"])
def test_ctrl_c_while_modules_load_prints_no_traceback(module, signalled_while_loading):
    assert signalled_while_loading(module, ["-m", "nsa_bench", "backends"]) == (130, "")
