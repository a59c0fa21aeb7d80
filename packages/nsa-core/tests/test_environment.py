"""Time, machine, versions and commit, which every result carries."""

import json
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import torch

import nsa_core
from nsa_core.environment import cpu_name, describe_environment, dotted, version_lines, version_of

PACKAGES = ("nsa-core", "torch", "nosuch", "nsa-nosuch")


def test_the_environment_names_machine_and_versions():
    environment = describe_environment(PACKAGES, Path(__file__).parent)
    assert datetime.fromisoformat(environment["time"]).tzinfo is not None
    assert environment["torch"] == torch.__version__
    assert environment["packages"]["nsa-core"] == nsa_core.__version__
    assert (environment["gpu"] is None) == (environment["num_gpus"] == 0) == (environment["compute_capability"] is None)
    assert json.loads(json.dumps(environment)) == environment


def test_what_is_not_installed_is_not_listed():
    assert None not in describe_environment(PACKAGES, Path(__file__).parent)["packages"].values()


def test_a_package_that_is_not_installed_has_no_version():
    assert (version_of("nosuch"), version_of("nsa-nosuch")) == (None, None)
    assert version_lines(("nsa-core", "nosuch")).splitlines()[:2] == [f"nsa-core {nsa_core.__version__}", "nosuch not installed"]


def test_versions_are_known_without_torch():
    program = (
        "import sys; from nsa_core.environment import version_lines; version_lines(['nsa-core', 'torch']); print('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "False\n"


def test_a_compute_capability_is_written_with_a_point():
    assert dotted((10, 0)) == "10.0"


def test_the_processors_name_is_read_where_linux_keeps_it(tmp_path):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel name\t: Some CPU @ 2.0 GHz\nmodel name\t: another\n")
    assert cpu_name(cpuinfo) == "Some CPU @ 2.0 GHz"


def test_a_processor_without_a_name_is_none_or_what_python_says(tmp_path):
    assert cpu_name(tmp_path / "missing") != ""
    (tmp_path / "arm").write_text("processor\t: 0\n")
    assert cpu_name(tmp_path / "arm") != ""
