"""A fallback is an "auto" training call that the backend preferred at the start did not serve."""

import pytest
import torch

from nsa_core import BranchRequest, NativeSparseAttention, default_registry
from nsa_core.backends.base import Reason
from nsa_train.telemetry.layers import FallbackCounts, MarkedBackend, attach, counting_registry


class Unwilling(MarkedBackend):
    """The reference under another name, preferred, but refusing sequences of more than 16 tokens."""

    name = "other"

    def preference(self, request: BranchRequest) -> int:
        return 100

    def reasons_against(self, request: BranchRequest) -> tuple[Reason, ...]:
        return (Reason.incapable("too long"),) if request.num_keys > 16 else ()


@pytest.fixture
def layer(tiny_config) -> NativeSparseAttention:
    return NativeSparseAttention(tiny_config().nsa_config())


def _counting(layer: NativeSparseAttention, preferred: dict[str, str]) -> FallbackCounts:
    counts = FallbackCounts(preferred)
    [window] = [backend for backend in default_registry().backends if (backend.name, backend.operation) == ("sdpa", "win")]
    attach([layer], counting_registry([*default_registry().backends, Unwilling(window)], counts))
    return counts


def test_the_preferred_backend_is_no_fallback(layer: NativeSparseAttention) -> None:
    counts = _counting(layer, {"win": "other", "slc": "sdpa"})
    layer(torch.zeros(1, 16, 32))
    assert counts.row() == {"cmp": 0, "select": 0, "slc": 0, "win": 0, "nsa": 0, "total": 0}


def test_a_call_served_by_another_is_counted(layer: NativeSparseAttention) -> None:
    counts = _counting(layer, {"win": "other", "slc": "sdpa"})
    for _ in range(3):
        layer(torch.zeros(1, 17, 32))
    assert counts.row() == {"cmp": 0, "select": 0, "slc": 0, "win": 3, "nsa": 0, "total": 3}


def test_evaluation_and_decoding_are_not_counted(layer: NativeSparseAttention) -> None:
    counts = _counting(layer, {"win": "other"})
    with torch.no_grad():
        layer(torch.zeros(1, 17, 32))
    layer(torch.zeros(1, 17, 32), cache=layer.new_cache(1, 32))
    assert counts.row()["total"] == 0


def test_a_named_backend_is_no_fallback(tiny_config) -> None:
    layer = NativeSparseAttention(tiny_config("nsa.backends.win=sdpa").nsa_config())
    counts = _counting(layer, {"win": "other"})
    layer(torch.zeros(1, 17, 32))
    assert counts.row()["total"] == 0


def test_counts_go_on_from_a_row() -> None:
    counts = FallbackCounts({"cmp": "triton"})
    counts.restore({"step": 10, "cmp": 2, "select": 0, "slc": 1, "win": 0, "nsa": 0, "total": 3})
    counts.note("cmp", "sdpa")
    counts.note("cmp", "triton")
    counts.note("nsa", None)
    assert counts.row() == {"cmp": 3, "select": 0, "slc": 1, "win": 0, "nsa": 0, "total": 4}


def test_a_compiled_graph_counts_its_route_once(layer: NativeSparseAttention) -> None:
    counts = _counting(layer, {"win": "other"})
    torch.compiler.reset()
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    x = torch.zeros(1, 17, 32)
    for _ in range(3):
        compiled(x)
    assert counts.row()["win"] == counts.row()["total"] == 1
