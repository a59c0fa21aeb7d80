"""The routing report: its device, its call, and every reason."""

import io
import json

import pytest
import torch
from rich.console import Console

from nsa_bench.backends import CallShape, Device, find_device, make_report, make_request, parse_capability, tables_of, to_rows
from nsa_bench.errors import BenchError, OptionError
from nsa_core import BranchRequest, Layout, Operation

CPU = Device(type="cpu", compute_capability=None, is_simulated=False)
ADA = Device(type="cuda", compute_capability=(8, 9), is_simulated=True)


def window(content):
    [found] = [operation for operation in content["operations"] if operation["operation"] == "win"]
    return found


@pytest.mark.parametrize("here", [None, (9, 0)])
def test_a_capability_describes_a_gpu_that_need_not_be_here(here):
    assert find_device(None, "8.9", here) == find_device("cuda", "8.9", here) == ADA


def test_a_capability_that_is_this_machines_simulates_nothing():
    assert find_device("cuda", "9.0", (9, 0)) == find_device(None, None, (9, 0))
    assert not find_device("cuda", "9.0", (9, 0)).is_simulated


@pytest.mark.parametrize(("here", "kind"), [(None, "cpu"), ((9, 0), "cuda")])
def test_without_options_the_device_is_this_machines(here, kind):
    assert find_device(None, None, here) == Device(type=kind, compute_capability=here, is_simulated=False)


def test_a_machine_with_a_gpu_has_a_cpu_too():
    assert find_device("cpu", None, (9, 0)) == CPU


def test_a_gpu_that_is_not_here_needs_its_capability():
    with pytest.raises(OptionError, match=r"--device=cuda came without --compute-capability .*; use --compute-capability 9.0"):
        find_device("cuda", None, None)


def test_a_cpu_has_no_compute_capability():
    with pytest.raises(OptionError, match="--compute-capability=8.9 came with --device=cpu"):
        find_device("cpu", "8.9", None)


@pytest.mark.parametrize("text", ["", "8", "8.", ".9", "sm_89", "8.9.1", "-8.9", "8,9"])
def test_a_capability_is_two_numbers(text):
    with pytest.raises(OptionError, match="is not MAJOR.MINOR"):
        parse_capability(text)


def test_a_capability_of_two_digits_is_read():
    assert parse_capability("10.0") == (10, 0)


def test_every_bad_number_of_a_call_is_named_at_once():
    with pytest.raises(OptionError, match=r"--seq-len=0 is too small .*\n--head-dim-v=-1 is too small"):
        CallShape(seq_len=0, head_dim_v=-1)
    with pytest.raises(OptionError, match="--kv-heads=3 does not divide --heads=64"):
        CallShape(kv_heads=3)


def test_a_request_is_the_call_in_numbers():
    shape = CallShape(dtype="fp16", seq_len=100, heads=6, kv_heads=3, head_dim_qk=10, head_dim_v=7, layout="packed", backward=True)
    assert make_request(Operation.SLC, ADA, shape) == BranchRequest(
        operation=Operation.SLC,
        device_type="cuda",
        compute_capability=(8, 9),
        dtype=torch.float16,
        kv_dtype=torch.float16,
        num_queries=100,
        num_keys=100,
        num_heads=6,
        num_kv_heads=3,
        head_dim_qk=10,
        head_dim_v=7,
        layout=Layout.PACKED,
        needs_grad=True,
    )


@pytest.mark.parametrize("operation", [Operation.SELECT, Operation.CHOOSE])
def test_selection_asks_for_no_gradient_and_has_no_values(operation):
    request = make_request(operation, CPU, CallShape(head_dim_qk=10, head_dim_v=7))
    assert (request.needs_grad, request.head_dim_v) == (False, 10)


@pytest.mark.parametrize("layout", ["cached", "paged", "ragged"])
def test_a_cache_is_asked_for_one_decode_step(layout):
    request = make_request(Operation.WIN, CPU, CallShape(seq_len=100, layout=layout))
    assert (request.num_queries, request.num_keys, request.needs_grad) == (1, 100, False)
    assert make_request(Operation.WIN, CPU, CallShape(layout=layout, backward=True)).needs_grad


@pytest.mark.parametrize(("layout", "expected"), [("dense", ("cached", 100)), ("packed", ("cached", 100)), ("paged", ("paged", 1))])
def test_append_is_asked_for_as_the_step_of_a_cache(layout, expected):
    request = make_request(Operation.APPEND, CPU, CallShape(seq_len=100, heads=6, kv_heads=3, layout=layout))
    assert (request.layout, request.num_queries) == expected
    assert (request.num_heads, request.needs_grad) == (3, False)


def test_append_and_choose_are_listed_with_the_reference():
    chosen = {operation["operation"]: operation["chosen"] for operation in make_report(CPU, CallShape())["operations"]}
    assert (chosen["append"], chosen["choose"]) == ("sdpa", "sdpa")


@pytest.mark.parametrize(("device", "expected"), [(CPU, torch.float32), (ADA, torch.bfloat16)])
def test_the_dtype_goes_by_the_device_unless_given(device, expected):
    assert make_request(Operation.WIN, device, CallShape()).dtype == expected
    assert make_request(Operation.WIN, device, CallShape(dtype="fp64")).dtype == torch.float64


def test_the_json_holds_choice_and_reasons_of_every_operation(install):
    install("hopper_kernels")
    content = make_report(ADA, CallShape())
    assert [operation["operation"] for operation in content["operations"]] == [
        "cmp",
        "select",
        "slc",
        "win",
        "nsa",
        "append",
        "choose",
        "rotate",
    ]
    candidates = {candidate["name"]: candidate for candidate in window(content)["candidates"]}
    assert candidates["hopper"] == {
        "name": "hopper",
        "preference": 10,
        "is_eligible": False,
        "is_capable": True,
        "reasons": [{"kind": "policy", "message": "slow on SM 8.9 [measured]"}],
        "notes": ["an old one [slow]"],
    }
    assert candidates["sdpa"]["is_eligible"]
    assert window(content)["chosen"] != "hopper"
    assert content["device"] == {"type": "cuda", "compute_capability": "8.9", "is_simulated": True}


def test_the_choice_follows_the_device(install):
    install("hopper_kernels")
    on_cpu = window(make_report(CPU, CallShape()))
    [hopper] = [candidate for candidate in on_cpu["candidates"] if candidate["name"] == "hopper"]
    assert [reason["message"] for reason in hopper["reasons"]] == [
        "device cpu (needs cuda)",
        "compute capability none (needs 8.0 or newer)",
    ]
    assert not hopper["is_capable"]
    hopper_gpu = Device(type="cuda", compute_capability=(9, 0), is_simulated=True)
    [first, *_] = [c for c in window(make_report(hopper_gpu, CallShape()))["candidates"] if c["is_eligible"]]
    assert window(make_report(hopper_gpu, CallShape()))["chosen"] == first["name"]


def test_the_json_says_with_what_it_was_made_and_survives_a_round_trip():
    content = make_report(ADA, CallShape(dtype="bf16", layout="packed"))
    assert json.loads(json.dumps(content, allow_nan=False)) == content
    assert {"time", "cpu", "gpu", "torch", "triton", "commit", "packages"} <= set(content["environment"])
    request = content["request"]
    assert (request["dtype"], request["layout"], request["geometry"]["window_size"]) == ("bfloat16", "packed", 512)


def test_plug_ins_are_listed_and_broken_ones_with_their_error(install):
    install("hopper_kernels")
    install("rotten_kernels", "raise OSError('driver too old')")
    plugins = make_report(CPU, CallShape())["plugins"]
    loaded = {plugin["name"]: plugin for plugin in plugins["loaded"]}
    assert loaded["hopper_kernels"] == {
        "name": "hopper_kernels",
        "origin": "hopper_kernels of hopper_kernels 1.0",
        "backends": [{"operation": "win", "name": "hopper"}],
    }
    assert loaded["builtin"]["backends"][0] == {"operation": "cmp", "name": "sdpa"}
    expected = {"name": "rotten_kernels", "origin": "rotten_kernels of rotten_kernels 1.0", "error": "OSError: driver too old"}
    assert expected in plugins["broken"]


def test_two_plug_ins_of_one_name_end_in_an_error_that_names_both(install):
    install("hopper_kernels")
    install("more_kernels")
    with pytest.raises(BenchError, match=r"plug-in 'more_kernels' .* by hopper_kernels.Hopper and more_kernels.Hopper") as caught:
        make_report(CPU, CallShape())
    assert caught.value.exit_code == 1


def test_the_csv_has_a_row_per_operation_and_backend(install):
    install("hopper_kernels")
    rows = to_rows(make_report(ADA, CallShape()))
    assert {tuple(row) for row in rows} == {tuple(rows[0])}
    [hopper] = [row for row in rows if row["backend"] == "hopper"]
    assert (hopper["operation"], hopper["is_chosen"], hopper["is_capable"]) == ("win", False, True)
    assert hopper["reasons"] == "policy: slow on SM 8.9 [measured]"
    assert hopper["notes"] == "an old one [slow]"
    assert (hopper["device_compute_capability"], hopper["needs_grad"]) == ("8.9", True)
    [select] = [row for row in rows if (row["operation"], row["backend"]) == ("select", "sdpa")]
    assert not select["needs_grad"]
    assert {row["operation"] for row in rows} == {operation.value for operation in Operation}


def test_an_operation_that_nobody_implements_keeps_its_row():
    for row in to_rows(make_report(CPU, CallShape())):
        if row["backend"] is None:
            assert (row["operation"], row["is_chosen"], row["reasons"]) == ("nsa", False, "")


@pytest.fixture
def show():
    def show(*tables):
        console = Console(file=io.StringIO(), width=400)
        for table in tables:
            console.print(table)
        return console.file.getvalue()

    return show


def routed(capability=(8, 9), **shape):
    device = Device(type="cuda", compute_capability=capability, is_simulated=True)
    return tables_of(make_report(device, CallShape(**shape)))


def test_the_head_names_device_versions_and_request(show):
    text = show(*routed(layout="packed", seq_len=4096))
    assert "cuda, compute capability 8.9 (simulated: not this machine's)" in text
    assert "nsa-core 0." in text
    assert "packed, 4096 queries over 4096 tokens, bfloat16, H=64 G=4 D_k=192 D_v=128, forward and backward" in text
    assert "forward only" in show(*routed(backward=False))


def test_reasons_stand_beside_each_backend_brackets_and_all(install, show):
    install("hopper_kernels")
    text = show(*routed())
    [line] = [line for line in text.splitlines() if "hopper" in line and "policy: " in line]
    assert "slow on SM 8.9 [measured]" in line


def test_notes_stand_below_the_standing(install, show):
    install("hopper_kernels")
    assert "note: an old one [slow]" in show(*routed((9, 0)))


def test_every_operation_has_a_line(show):
    text = show(*routed())
    for operation in ("cmp", "select", "slc", "win", "nsa"):
        assert any(line.split("│")[1].strip() == operation for line in text.splitlines() if line.count("│") == 6)


def test_broken_plug_ins_stand_below_the_others(install, show):
    install("rotten_kernels", "raise OSError('no [cuda] driver')")
    text = show(*routed())
    assert "nsa_core.plugins.builtin" in text
    [line] = [line for line in text.splitlines() if "broken: OSError: no [cuda] driver" in line]
    assert "rotten_kernels of rotten_kernels 1.0" in line
