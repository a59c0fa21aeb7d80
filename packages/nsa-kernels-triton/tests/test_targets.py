"""Every kernel compiles for absent GPUs, with the tiles of the table and within their shared memory."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from nsa_kernels_triton.device import shared_memory_bytes
from nsa_kernels_triton.pipelines import has_gluon
from nsa_kernels_triton.plugin import nsa_branch_backends

PROGRAM = Path(__file__).parent / "compile_kernels.py"
HEAD_DIMS = [(64, 64), (128, 128), (192, 128), (256, 256)]
KERNELS = {
    "forward_kernel", "dq_kernel", "dkdv_kernel", "delta_kernel", "scores_kernel", "choose_kernel", "backward_kernel", "merge_kernel",
    "merge_dq_kernel", "branch_deltas_kernel", "describe_rows_kernel", "mark_kernel", "count_kernel", "list_kernel", "cut_kernel",
    "add_partials_kernel", "add_splits_kernel", "lower_kernel",
}  # fmt: skip
# dQ is portable on 9.0 where lse has a gradient
REPLACED = {"forward_kernel", "dkdv_kernel", "scores_kernel", "backward_kernel"}
ALONE = {"hopper forward forward_kernel", "hopper dkdv dkdv_kernel", "hopper dq dq_kernel", "hopper scores scores_kernel"}
"""The kernels of compute capability 9.0 that replace them, each program with a multiprocessor to itself."""
HOPPER = ALONE | {"hopper selected forward_kernel", "hopper selected backward_kernel"}
WIDE = HOPPER - {"hopper selected backward_kernel"} | {"hopper wide backward_kernel"}
"""The same for heads of q in two parts, whose selected backward has a multiprocessor to itself as well."""
NARROW_VALUES = {"hopper dkdv dkdv_kernel", "hopper wide backward_kernel"}
"""Those of them that take values in one part alone."""


def compiled(environment, capability, head_dims, operations, *cases):
    """Return what compile_kernels.py reports, without a reduction that Triton 3.6 gets wrong."""
    words = [f"{capability[0]}.{capability[1]}", *map(str, head_dims), ",".join(operations), *cases]
    done = subprocess.run([sys.executable, PROGRAM, *words], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [each for each in found if each["wrong"]] == []
    return found


def test_a_reduction_over_lanes_with_copies_between_them_is_found(compiling):
    program = """#linear = #ttg.linear<{register = [], lane = [[0, 1], [0, 2], [%s], [0, 4], [0, 8]], warp = [[1, 0]], block = []}>
      %%2 = "tt.reduce"(%%1) <{axis = 1 : i32}> ({
      ^bb0(%%a: i32, %%b: i32):
        tt.reduce.return %%a : i32
      }) : (tensor<2x16xi32, #linear>) -> tensor<2xi32, #ttg.slice<{dim = 1, parent = #linear}>>"""
    assert compiling.wrong_reductions(program % "0, 0") == ("2x16xi32 over axis 1",)
    assert compiling.wrong_reductions(program % "1, 0") == ()


def assert_within_shared_memory(found, capability):
    limit = shared_memory_bytes(capability)
    # two programs of the other kernels for 9.0 share a multiprocessor, and each takes 1 KiB more than its own
    shared = HOPPER - ALONE
    assert [each for each in found if each["shared"] > (limit // 2 if each["kernel"] in shared else limit)] == []


@pytest.mark.parametrize(
    ("capability", "head_dims", "case"),
    [
        ((8, 0), (192, 128), "dense"),
        pytest.param((8, 9), (256, 256), "packed", marks=pytest.mark.slow),
        ((9, 0), (128, 128), "group of 16"),
        pytest.param((9, 0), (192, 128), "cached group of 16", marks=pytest.mark.slow),
        pytest.param((9, 0), (192, 192), "cached group of 16", marks=pytest.mark.slow),
    ],
    ids=["sm_80", "sm_89", "sm_90", "sm_90 wide", "sm_90 wide values"],
)
def test_every_kernel_compiles(without_interpreter, capability, head_dims, case):
    # these launch every kernel; the others launch some of them for other constants
    operations = ("slc", "win", "nsa") if capability == (9, 0) else ("slc", "nsa")
    found = compiled(without_interpreter, capability, head_dims, operations, case)
    written = KERNELS - REPLACED | (WIDE if head_dims[0] == 192 else HOPPER)
    if head_dims[1] == 192:
        written = written - NARROW_VALUES | {"dkdv_kernel", "backward_kernel"}
    assert {each["kernel"] for each in found} == (written if capability == (9, 0) and has_gluon() else KERNELS)
    assert_within_shared_memory(found, capability)


@pytest.mark.parametrize(
    "capability",
    # of 8.0 and 9.0, 8.0 has less shared memory
    [(8, 0), pytest.param((8, 9), marks=pytest.mark.slow), pytest.param((9, 0), marks=pytest.mark.slow)],
    ids=["sm_80", "sm_89", "sm_90"],
)
def test_the_choice_fits_whatever_the_group_and_the_blocks(without_interpreter, capability):
    found = compiled(without_interpreter, capability, (256, 256), ("select",), "group of 256", "large blocks")
    assert {each["kernel"] for each in found} == {"scores_kernel", "choose_kernel"}
    assert_within_shared_memory(found, capability)


STEP_KERNELS = {"split_kernel", "choose_kernel", "attend_kernel", "append_kernel", "down_kernel", "rotate_kernel"}


STEPS = ("step", "long step", "step of a group of 16", "step of small blocks")


@pytest.mark.parametrize(
    ("capability", "head_dims", "cases"),
    [
        ((9, 0), (192, 128), STEPS[:1]),
        pytest.param((8, 0), (192, 128), STEPS, marks=pytest.mark.slow),
        pytest.param((8, 9), (256, 256), STEPS, marks=pytest.mark.slow),
        pytest.param((9, 0), (192, 128), STEPS, marks=pytest.mark.slow),
    ],
    ids=["sm_90 one step", "sm_80", "sm_89", "sm_90"],
)
def test_a_steps_kernels_compile(without_interpreter, capability, head_dims, cases):
    found = compiled(without_interpreter, capability, head_dims, ("nsa", "append", "rotate"), *cases)
    assert {each["kernel"] for each in found} == STEP_KERNELS
    assert_within_shared_memory(found, capability)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [(8, 0), (9, 0)], ids=["sm_80", "sm_90"])
def test_a_steps_kernels_compile_in_other_forms(without_interpreter, capability):
    found = compiled(without_interpreter, capability, (192, 128), ("nsa", "append", "rotate"), "step in other forms")
    assert {each["kernel"] for each in found} == STEP_KERNELS
    assert_within_shared_memory(found, capability)


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)], ids=["sm_80", "sm_90"])
def test_a_step_of_the_window_over_a_ring_is_one_portable_kernel(without_interpreter, capability):
    found = compiled(without_interpreter, capability, (192, 128), ("win",), "step over a ring")
    assert [each["kernel"] for each in found] == ["forward_kernel"]
    assert_within_shared_memory(found, capability)


EVERY_CASE = ("1/3", "2/3", "3/3")
"""All cases in thirds, so that processes can share the work."""
MORE = [
    *(((8, 0), head_dims, ("dense",)) for head_dims in HEAD_DIMS),
    ((8, 0), (256, 256), ("float32",)),
    ((8, 9), (64, 64), ("dense",)),
    # the most shared memory, where there is the least of it
    ((8, 9), (256, 256), ("dense", "float32", "packed")),
    *(((9, 0), head_dims, ("dense",)) for head_dims in HEAD_DIMS),
    *((capability, (192, 128), ("dense",)) for capability in ((8, 6), (10, 0), (12, 0))),
    # every case: at the head dimensions that take the most kernels, and for the portable kernels at others
    *(((9, 0), (192, 128), (part,)) for part in EVERY_CASE),
    *(((8, 0), head_dims, (part,)) for head_dims, part in zip(((80, 96), (64, 64), (128, 128)), EVERY_CASE, strict=True)),
]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("capability", "head_dims", "cases"), MORE, ids=str)
def test_every_kernel_compiles_in_more_cases(without_interpreter, capability, head_dims, cases):
    operations = [backend.operation for backend in nsa_branch_backends()]
    assert_within_shared_memory(compiled(without_interpreter, capability, head_dims, operations, *cases), capability)
