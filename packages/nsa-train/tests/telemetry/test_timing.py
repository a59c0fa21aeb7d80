"""A marked backend computes what its backend does, whatever the operation's operands are."""

import torch

from nsa_core import BackendRegistry, NativeSparseAttention, Operation, default_registry
from nsa_train.telemetry.layers import BranchTimes, MarkedBackend


def test_every_operation_of_a_cached_step_is_timed_under_its_own_name(tiny_config) -> None:
    times = BranchTimes()
    backends = [backend for backend in default_registry().backends if backend.name == "sdpa"]
    layer = NativeSparseAttention(tiny_config().nsa_config())
    x = torch.randn(1, 16, 32)
    expected = layer(x, cache=layer.new_cache(1, 16))
    layer.registry = BackendRegistry(tuple(MarkedBackend(backend, times=times) for backend in backends))
    torch.testing.assert_close(layer(x, cache=layer.new_cache(1, 16)), expected, rtol=0, atol=0)
    assert set(times.total_ms()) == {"cmp", "select", "slc", "win", "append", "rotate"}


def test_a_marked_choice_of_blocks_is_timed(tiny_config) -> None:
    times, geometry = BranchTimes(), tiny_config().nsa_config().geometry
    choose = default_registry().named(Operation.CHOOSE, "sdpa")
    scores, positions = torch.randn(5, 2, 9), torch.arange(5, dtype=torch.int32)
    chosen = MarkedBackend(choose, times=times)(scores, None, positions, 2, geometry=geometry)
    assert torch.equal(chosen, choose(scores, None, positions, 2, geometry=geometry))
    assert set(times.total_ms()) == {"choose"}
