"""Every operation against the oracle, by the conformance kit; in Triton's interpreter without a GPU, on it with one."""

from typing import Any

import pytest
import torch
from attrs import frozen

from nsa_core import BranchRequest, Capability, Layout, Operation, Reason
from nsa_core.testing.conformance import check_backend
from nsa_kernels_triton.plugin import TritonBackend

pytestmark = pytest.mark.usefixtures("nan_buffers")
ATTENTION = (Operation.CMP, Operation.SELECT, Operation.SLC, Operation.WIN, Operation.NSA)
"""CHOOSE has its test in test_choice.py, APPEND in test_append.py."""
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@frozen
class Some:
    """A backend for some of the kit's cases, without those that add little and are slow in the interpreter."""

    backend: TritonBackend
    name: str = "triton"

    @property
    def operation(self) -> Operation:
        return self.backend.operation

    @property
    def capability(self) -> Capability:
        return self.backend.capability

    def reasons_against(self, request: BranchRequest) -> tuple[Reason, ...]:
        return self.backend.reasons_against(request) + (Reason.incapable("left to the slow tier"),) * self._is_dear(request)

    def _is_dear(self, request: BranchRequest) -> bool:
        """Return True of the longer edge lengths, of groups, head dimensions and many sequences in half precision, of most float16, and of the 10
        sequences with l < l'.

        The fused operation over packed rows, caches and ragged rows is left out in half precision too: the slow tier has all of them, test_decode.py
        has caches, and test_cuda.py packed rows on a GPU. Of its groups, test_properties.py has others.
        """
        if request.dtype == torch.float16:
            is_packed_window = self.operation is Operation.WIN and request.layout is Layout.PACKED and request.num_sequences <= 6
            if not is_packed_window and (self.operation not in (Operation.SELECT, Operation.WIN) or request.layout is not Layout.DENSE):
                return True
        if self.operation is Operation.NSA and request.dtype != torch.float32 and request.layout is not Layout.DENSE:
            return True
        if request.layout is not Layout.DENSE:
            return request.num_sequences > (9 if request.dtype == torch.float32 else 6)
        if request.dtype != torch.float32:
            return request.batch == 2 or request.num_heads != 4 or request.head_dim_qk != 8
        if self.operation is Operation.NSA and request.num_heads in (1, 5, 16):
            return True
        return request.batch == 2 and request.num_queries > 13 and request.num_queries != 33

    def preference(self, request: BranchRequest) -> int:
        return self.backend.preference(request)

    def __call__(self, *tensors: Any, **options: Any) -> Any:
        return self.backend(*tensors, **options)


@pytest.mark.parametrize("operation", ATTENTION)
def test_every_operation_conforms_to_the_oracle(operation: Operation) -> None:
    report = check_backend(Some(TritonBackend(operation=operation)), device=DEVICE)
    print(report)
    assert len(report.passed) >= 20


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("operation", ATTENTION)
def test_every_operation_conforms_in_every_case(operation: Operation) -> None:
    report = check_backend(TritonBackend(operation=operation), device=DEVICE)
    print(report)
    assert len(report.passed) >= 70
    assert all("float64" in case for case in report.declined)
