"""The command line: verbs, files and exit codes."""

import csv
import json
import subprocess
import sys

import pytest

from nsa_bench.cli import app, main, run_command


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


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("backends --kv-heads 3", "--kv-heads=3 does not divide --heads=64"),
        ("backends --seq-len 0", "--seq-len=0 is too small"),
        ("backends --device cpu --compute-capability 9.0", "came with --device=cpu"),
        ("backends --compute-capability ninety", "--compute-capability='ninety' is not MAJOR.MINOR"),
        ("backends --dtype int8", "Invalid value"),
        ("backends --layout ragged", "Invalid value"),
        ("backends --seq-len many", "Invalid value"),
        ("backends --sequence 7", "Unknown option"),
        ("env --json no/such/folder/env.json", "give a path that can be written"),
        ("measure", "Unknown command"),
    ],
)
def test_a_bad_option_is_exit_2_with_a_message(command, message, capsys):
    assert run_command(command.split()) == 2
    assert message in capsys.readouterr().err


def test_two_plug_ins_of_one_name_are_exit_1_with_a_message(install, capsys):
    install("hopper_kernels")
    install("more_kernels")
    assert run_command(["backends"]) == 1
    assert "nsa-bench: plug-in 'more_kernels'" in capsys.readouterr().err


def test_help_names_the_verbs_that_exist(capsys):
    assert run_command(["--help"]) == 0
    text = capsys.readouterr().out
    assert {name for name in app if not name.startswith("-")} == {"backends", "env"}
    assert "backends" in text
    assert "Exit codes: 0 done, 1 error, 2 a bad option." in text


def test_main_exits_with_the_code(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["backends", "--heads", "0"])
    assert caught.value.code == 2


def test_the_package_runs_as_a_module_and_reports_a_bad_option_without_torch():
    program = "import runpy, sys; sys.argv = ['nsa-bench', 'backends', '--nope']\ntry: runpy.run_module('nsa_bench', run_name='__main__')\n"
    program += "except SystemExit as end: print(end.code, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2", "False"]
    assert "Traceback" not in done.stderr
