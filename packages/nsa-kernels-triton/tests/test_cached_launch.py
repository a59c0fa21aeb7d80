"""Launches by the short key pass a GPU's driver what Triton's own launches do."""

import json
import subprocess
import sys

import pytest
import torch

PROGRAM = """
import hashlib, json, sys
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from nsa_kernels_triton.interval import kernels

launches = []

class Utils:
    def load_binary(self, name, binary, *_):
        return 1, hashlib.sha256(binary).hexdigest(), 32, 0, 1024
    def get_device_properties(self, device):
        return {"max_shared_mem": 232448}

class Launcher:
    def __init__(self, source, metadata): pass
    def __call__(self, x, y, z, stream, function, packed, metadata, enter, leave, *arguments):
        global takes_tensors
        takes_tensors = any(isinstance(a, torch.Tensor) for a in arguments)
        launches.append([x, y, z, stream, function, *[a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments]])

class Driver:
    utils, launcher_cls = Utils(), Launcher
    def get_current_target(self): return GPUTarget("cuda", 90, 32)
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 7
    def get_active_torch_device(self): return torch.device("cpu")

class OnGPU(torch.Tensor):
    is_cuda = property(lambda self: True)

driver.set_active(Driver())

def tensor(offset=0, dtype=torch.float32):
    return torch.zeros(64, dtype=dtype)[offset:].as_subclass(OnGPU)

def launch_three_times(kernel, grid, *arguments, **constants):
    tensors = []
    for way in (kernel, kernel.kernel, kernel):
        way[grid](*arguments, **constants)
        tensors.append(takes_tensors)
    ours_first, theirs, ours_again = launches[-3:]
    return ours_first[4], ours_first == theirs == ours_again, tensors

SUM, BLOCK = kernels.add_splits_kernel, dict(BLOCK=1024)
DELTA, ROWS = kernels.delta_kernel, dict(D_V=16, WIDTH=16, EXACT=True, BLOCK_ROWS=16)
ATTEND, TILE = kernels.forward_kernel, dict(
    H=1, G=1, D_K=16, D_V=16, K1=16, K2=0, V1=16, V2=0, IS_WINDOW=True, SIZE=1, STRIDE=1, WINDOW=16,
    PACKED=False, CACHED=False, RING=False, EXACT=True, BLOCK_ROWS=16, BLOCK_KEYS=16,
)

def attend(factor):
    return ATTEND, ((1,), *(tensor() for _ in range(6)), *[None] * 5, 1, 4, 4, 1, 1, 1, factor, factor), TILE

def launch_both():
    # whether both are Triton's own, at first and by the short key
    flat, rest = (*(tensor() for _ in range(8)), 4, 4, 1), {name: value for name, value in ROWS.items() if name != "EXACT"}
    same = []
    for _ in range(2):
        DELTA.both(((1,), (2,)), "EXACT")(*flat, **rest)
        ours = launches[-2:]
        for exact in (False, True):
            DELTA.kernel[(1 + exact,)](*flat, EXACT=exact, **rest)
        same.append(ours == launches[-2:] and ours[0] != ours[1])
    return same

CASES = {
    "plain": (SUM, ((3, 2), tensor(), tensor(), tensor(), tensor(), 32, 48, 3), BLOCK),
    "grid": (SUM, ((5, 1, 4), tensor(), tensor(), tensor(), tensor(), 32, 48, 3), BLOCK),
    "no multiple of 16": (SUM, ((3, 2), tensor(), tensor(), tensor(), tensor(), 33, 48, 3), BLOCK),
    "one": (SUM, ((3, 2), tensor(), tensor(), tensor(), tensor(), 32, 48, 1), BLOCK),
    "int64": (SUM, ((3, 2), tensor(), tensor(), tensor(), tensor(), 2**31, 48, 3), BLOCK),
    "starts at 4 bytes": (SUM, ((3, 2), tensor(1), tensor(), tensor(), tensor(), 32, 48, 3), BLOCK),
    "other dtype": (SUM, ((3, 2), tensor(), tensor(), tensor(dtype=torch.bfloat16), tensor(), 32, 48, 3), BLOCK),
    "other constant": (SUM, ((3, 2), tensor(), tensor(), tensor(), tensor(), 32, 48, 3), dict(BLOCK=2048)),
    "other option": (SUM, ((3, 2), tensor(), tensor(), tensor(), tensor(), 32, 48, 3), BLOCK | {"num_warps": 1}),
    "a tensor": (DELTA, ((1,), *(tensor() for _ in range(8)), 4, 4, 1), ROWS),
    "None": (DELTA, ((1,), *(tensor() for _ in range(3)), None, *(tensor() for _ in range(4)), 4, 4, 1), ROWS),
    "a float": attend(0.5),
    "another float": attend(1.0),
}
found = {}
for _ in range(2):
    for name, (kernel, arguments, constants) in CASES.items():
        found.setdefault(name, []).append(launch_three_times(kernel, *arguments, **constants))
keys = sum(len(kernel.found) for kernel in (SUM, DELTA, ATTEND))
print(json.dumps({"found": found, "both": launch_both(), "keys": keys}))
"""


@pytest.fixture(scope="module")
def launched(without_interpreter):
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM], env=without_interpreter, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_a_launch_by_the_short_key_is_tritons_own(launched):
    assert all(is_equal for runs in launched["found"].values() for _, is_equal, _ in runs)


def test_tritons_own_launch_takes_tensors_and_the_short_one_their_addresses(launched):
    for name, (first, second) in launched["found"].items():
        # what others launched before is found at once
        assert first[2] == [name not in {"grid", "another float"}, True, False]
        assert second[2] == [False, True, False]


def test_another_kind_of_argument_is_another_kernel(launched):
    functions = {name: {function for function, *_ in runs} for name, runs in launched["found"].items()}
    assert functions["grid"] == functions["plain"]
    assert functions["a float"] == functions["another float"]
    assert len(set.union(*functions.values())) == len(functions) - 2
    assert launched["keys"] == len(functions) - 2


def test_two_launches_by_one_key_are_tritons_own(launched):
    assert launched["both"] == [True, True]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a process with a GPU does not interpret by default")
def test_on_a_cpu_the_interpreter_runs():
    from nsa_kernels_triton.interval import kernels

    dk, dv = torch.ones(3, 20), torch.ones(3, 30)
    sums = torch.empty(20), torch.empty(30)
    kernels.add_splits_kernel[(1, 2)](dk, dv, *sums, 20, 30, 3, BLOCK=32)
    assert sums[0].eq(3).all()
    assert sums[1].eq(3).all()
    assert not kernels.add_splits_kernel.found
