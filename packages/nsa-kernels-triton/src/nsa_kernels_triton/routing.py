"""Decide which requests the kernels can serve, and which they should. Uses plain numbers: imports no triton, queries no GPU.

The design target is compute capability 8.0 (A100). Newer GPUs are supported as well, because the portable kernels use no feature of a
single architecture. A capability that the tables do not list gets the tiles for the smallest shared memory.
"""

import os
from importlib.util import find_spec

import torch

from nsa_core import BranchRequest, Capability, Operation, Reason
from nsa_kernels_triton.device import KIB, OLDEST, SHARED_MEMORY_BYTES, shared_memory_bytes

CAPABILITY = Capability(
    device_types=("cuda", "cpu"),
    dtypes=(torch.bfloat16, torch.float16, torch.float32),
    stored_dtypes=(torch.float8_e4m3fn,),
    max_head_dim=256,
)
SELECTIONS = (Operation.SELECT, Operation.SLC, Operation.NSA)
"""The operations whose kernels need as much shared memory as the design target has."""

MOST_STEP_ROWS = 16
"""Maximum rows of a sequence in a step of the decode kernels; attention of more rows uses the kernels of a forward pass."""
FIRST_WITH_FP8 = (8, 9)

NOT_INSTALLED = "triton is not installed (the kernels are written in it); pip install triton"
NOT_INTERPRETING = "device cpu without Triton's interpreter (there is no compiler for it); start Python with TRITON_INTERPRET=1"
TRUE_WORDS = ("1", "true", "yes", "on", "y")
"""Values of a variable that Triton reads as true, in upper or lower case."""
FOR_TESTS = "device cpu runs in Triton's interpreter only (TRITON_INTERPRET=1), which is for tests and thousands of times slower"


def reasons_against(request: BranchRequest) -> tuple[Reason, ...]:
    """Return every reason against the kernels for `request`, at once."""
    reasons = CAPABILITY.reasons_against(request)
    if find_spec("triton") is None:
        reasons += (Reason.incapable(NOT_INSTALLED),)
    if request.operation is Operation.APPEND:
        reasons += _reasons_against_fp8(request)
    if request.device_type == "cuda":
        reasons += _reasons_against_gpu(request)
    elif request.device_type == "cpu":
        reasons += (Reason.policy(FOR_TESTS) if interprets() else Reason.incapable(NOT_INTERPRETING),)
    return reasons


def _reasons_against_fp8(request: BranchRequest) -> tuple[Reason, ...]:
    """Return why kernels that write FP8 stores cannot run. Kernels that only read one still run: without `has_fp8` it is converted first."""
    capability = request.compute_capability
    if request.kv_dtype not in CAPABILITY.stored_dtypes or has_fp8(capability):
        return ()
    return (Reason.incapable("compute capability {}.{} has no conversion of FP8 (needs 8.9 or newer)".format(*capability or OLDEST)),)


def has_fp8(capability: tuple[int, int] | None) -> bool:
    """Return True if Triton has the dtype of FP8 stores on this capability. None means no GPU, so that the interpreter runs."""
    return capability is None or capability >= FIRST_WITH_FP8


def _reasons_against_gpu(request: BranchRequest) -> tuple[Reason, ...]:
    capability = request.compute_capability
    if capability is None or capability < OLDEST:
        have = "none" if capability is None else "{}.{}".format(*capability)
        return (Reason.incapable(f"compute capability {have} (needs 8.0 or newer)"),)
    have_bytes, target_bytes = shared_memory_bytes(capability), SHARED_MEMORY_BYTES[OLDEST]
    if request.operation in SELECTIONS and have_bytes < target_bytes:
        return (
            Reason.policy(
                "compute capability {}.{} has {} KB of shared memory where selection is made for {} KB (ADR 0009)".format(
                    *capability, have_bytes // KIB, target_bytes // KIB
                )
            ),
        )
    return ()


def preference(request: BranchRequest) -> int:
    """Return the priority of the kernels: above the reference (0) on a GPU, below it elsewhere."""
    return 100 if request.device_type == "cuda" else -100


def interprets() -> bool:
    """Return True if Triton runs kernels in its interpreter, or will once it is loaded.

    Triton reads the same environment variable when kernels are defined. Asking Triton itself would import its compiler, which takes seconds.
    """
    return os.environ.get("TRITON_INTERPRET", "").lower() in TRUE_WORDS  # noqa: TID251 - Triton's own switch, which nothing else shows
