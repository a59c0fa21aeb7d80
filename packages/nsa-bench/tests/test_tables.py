"""The tables of the terminal, at a width where nothing wraps."""

import io

import pytest
from rich.console import Console

from nsa_bench.backends_report import CallShape, Device, make_report
from nsa_bench.tables import environment_table, flatten, routing_tables


@pytest.fixture
def show():
    def show(*tables):
        console = Console(file=io.StringIO(), width=400)
        for table in tables:
            console.print(table)
        return console.file.getvalue()

    return show


def report(capability=(8, 9), **shape):
    device = Device(type="cuda", compute_capability=capability, is_simulated=True)
    return make_report(device, CallShape(**shape))


def test_the_head_names_device_versions_and_request(show):
    text = show(*routing_tables(report(layout="packed", seq_len=4096)))
    assert "cuda, compute capability 8.9 (simulated: not this machine's)" in text
    assert "nsa-core 0." in text
    assert "packed, 4096 queries over 4096 tokens, bfloat16, H=64 G=4 D_k=192 D_v=128, forward and backward" in text
    assert "forward only" in show(*routing_tables(report(backward=False)))


def test_reasons_stand_beside_each_backend_brackets_and_all(install, show):
    install("hopper_kernels")
    text = show(*routing_tables(report()))
    [line] = [line for line in text.splitlines() if "hopper" in line and "policy: " in line]
    assert "slow on SM 8.9 [measured]" in line


def test_notes_stand_below_the_standing(install, show):
    install("hopper_kernels")
    assert "note: an old one [slow]" in show(*routing_tables(report((9, 0))))


def test_every_operation_has_a_line(show):
    text = show(*routing_tables(report()))
    for operation in ("cmp", "select", "slc", "win", "nsa"):
        assert any(line.split("│")[1].strip() == operation for line in text.splitlines() if line.count("│") == 6)


def test_broken_plug_ins_stand_below_the_others(install, show):
    install("rotten_kernels", "raise OSError('no [cuda] driver')")
    text = show(*routing_tables(report()))
    assert "nsa_core.plugins.builtin" in text
    [line] = [line for line in text.splitlines() if "broken: OSError: no [cuda] driver" in line]
    assert "rotten_kernels of rotten_kernels 1.0" in line


def test_tables_inside_the_environment_are_flattened(show):
    environment = {"gpu": None, "packages": {"torch": "2.13.0"}}
    assert list(flatten(environment)) == [("gpu", None), ("packages.torch", "2.13.0")]
    assert [line.split() for line in show(environment_table(environment)).splitlines()] == [["gpu", "none"], ["packages.torch", "2.13.0"]]
