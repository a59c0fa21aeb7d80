"""What every result carries: time, machine, versions, commit."""

import json
from datetime import datetime

import torch

import nsa_core
from nsa_bench.environment import _cpu_name, describe_environment, dotted


def test_the_environment_names_machine_and_versions():
    environment = describe_environment()
    assert datetime.fromisoformat(environment["time"]).tzinfo is not None
    assert environment["torch"] == torch.__version__
    assert environment["packages"]["nsa-core"] == nsa_core.__version__
    assert (environment["gpu"] is None) == (environment["num_gpus"] == 0) == (environment["compute_capability"] is None)
    assert json.loads(json.dumps(environment)) == environment


def test_what_is_not_installed_is_not_listed():
    assert None not in describe_environment()["packages"].values()


def test_a_compute_capability_is_written_with_a_point():
    assert dotted((10, 0)) == "10.0"


def test_the_processors_name_is_read_where_linux_keeps_it(tmp_path):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel name\t: Some CPU @ 2.0 GHz\nmodel name\t: another\n")
    assert _cpu_name(cpuinfo) == "Some CPU @ 2.0 GHz"


def test_a_processor_without_a_name_is_none_or_what_python_says(tmp_path):
    assert _cpu_name(tmp_path / "missing") != ""
    (tmp_path / "arm").write_text("processor\t: 0\n")
    assert _cpu_name(tmp_path / "arm") != ""
