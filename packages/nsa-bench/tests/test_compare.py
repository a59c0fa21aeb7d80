"""Our operation compared with other packages'."""

import pytest
import torch

from nsa_bench import compare
from nsa_bench.cases import Case, head_shape, parse_geometry
from nsa_bench.compare import PeerRun, run_comparisons
from nsa_bench.measurement import Direction, Job, Setup
from nsa_bench.routes import RouteRecorder
from nsa_core import nsa_attention
from nsa_core.compression import block_windows
from nsa_core.reference.sdpa import sdpa_backends

CPU = torch.device("cpu")
GEOMETRY = parse_geometry("8/8/8/6/16")
SHAPE = head_shape(4, 2, 16, 8)
FORWARD, BOTH = Direction


class Peer:
    """A peer that computes what we do, or something near it."""

    def __init__(self, name="peer", window=True, error=0.0, reasons=(), fails=False):
        self.name, self.window, self.error, self.reasons, self.fails = name, window, error, list(reasons), fails

    def reasons_against(self, case, device):
        return self.reasons

    def build(self, case, device):
        if self.fails:
            raise TypeError("unexpected keyword argument 'g_swa'")

        def run(q, k, v, gates):
            k_cmp, v_cmp = (block_windows(x, case.geometry).tokens.mean(2) for x in (k, v))
            is_open = torch.tensor([1, 1, int(self.window)])
            return nsa_attention(q, k_cmp, v_cmp, k, v, k, v, gates * is_open, geometry=case.geometry) * (1 + self.error)

        return PeerRun(run=run, has_window=self.window, note="" if self.window else "without its window branch")


def compared(*peers, dtype=torch.float32, backend="auto", seq_len=200):
    job = Job(case=Case(shape=SHAPE, seq_len=seq_len, geometry=GEOMETRY, dtype=dtype), operations=("nsa",))
    setup = Setup(device=CPU, registry=RouteRecorder(tuple(sdpa_backends())), backend=backend)
    return {(one.implementation, one.direction): one for one in run_comparisons((job,), setup, peers)}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seq_len", [7, 200])
def test_we_are_right_on_shared_keys(dtype, seq_len):
    found = compared(dtype=dtype, seq_len=seq_len)
    assert set(found) == {("sdpa", FORWARD), ("sdpa", BOTH)}
    for one in found.values():
        assert one.reason == ""
        assert one.timing is not None
        assert one.check.method == f"rows in float64, {min(seq_len, 32)} of {seq_len} rows"
    # q, k, v, gates and out, in the dtype, and their gradients
    assert found["sdpa", BOTH].tensor_bytes == 2 * dtype.itemsize * seq_len * (4 * 16 + 2 * 24 + 4 * 3 + 4 * 8)


def test_a_peer_that_agrees_is_timed_without_a_note():
    one = compared(Peer())["peer", BOTH]
    assert (one.reason, one.note) == ("", "")
    assert one.check.limit_used <= 1
    assert one.timing is not None


def test_a_peer_that_differs_is_timed_with_its_error():
    found = compared(Peer(error=0.1))
    for direction in Direction:
        one = found["peer", direction]
        assert one.timing is not None
        assert one.check.error == pytest.approx(0.1, rel=0.01)
        assert one.note == "not the result of the reference"
        assert not one.is_failure


def test_a_peer_without_a_window_is_compared_without_one():
    one = compared(Peer(window=False))["peer", BOTH]
    assert one.check.limit_used <= 1
    assert one.note == "without its window branch"


def test_a_peer_that_is_absent_or_breaks_has_reasons_and_no_time():
    found = compared(Peer("absent", reasons=["not here", "nor able"]), Peer("broken", fails=True))
    assert {found["absent", direction].reason for direction in Direction} == {"not here; nor able"}
    assert found["broken", FORWARD].reason == "TypeError: unexpected keyword argument 'g_swa'"
    for name in ("absent", "broken"):
        assert found[name, BOTH].timing is None
        assert not found[name, BOTH].is_failure


def test_we_are_judged():
    found = compared(backend="nobody")
    for one in found.values():
        assert "no backend 'nobody'" in one.reason
        assert one.is_failure


def test_a_case_that_does_not_fit_is_reported(monkeypatch):
    def refuse(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(compare, "make_tensors", refuse)
    [one] = compared().values()
    assert one.reason == "inputs or reference: OutOfMemoryError: CUDA out of memory"
    assert one.is_failure
