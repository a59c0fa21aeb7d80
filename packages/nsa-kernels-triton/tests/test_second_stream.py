"""Which stream waits for which when kernels run on two streams, and that results are right if the second stream is late.

On a GPU test_cuda.py delays either stream.
"""

from contextlib import contextmanager, nullcontext

import pytest
import torch

from nsa_core import compressed_attention, nsa_attention, selected_attention, sliding_window_attention
from nsa_core.backends.base import Queries
from nsa_core.testing.inputs import SMALL, Shape, make_inputs, random_block_indices
from nsa_kernels_triton import streams
from nsa_kernels_triton.interval import op as interval
from nsa_kernels_triton.selected import index
from nsa_kernels_triton.selected import op as selected


class Stream:
    device = "a GPU"

    def __init__(self, waits, name):
        self.waits, self.name = waits, name

    def wait_stream(self, other):
        self.waits.append(f"{self.name} for {other.name}")


class OnGPU(torch.Tensor):
    is_cuda = property(lambda self: True)


@pytest.fixture
def gpu(monkeypatch):
    """Let streams note what they wait for; `gpu.current` is the current one."""

    class GPU:
        def __init__(self):
            self.waits, self.x = [], torch.zeros(1).as_subclass(OnGPU)
            self.made, self.current = 0, Stream(self.waits, "first")

        def make(self, device):
            self.made += 1
            return Stream(self.waits, f"second {self.made}")

        @contextmanager
        def use(self, stream):
            before, self.current = self.current, stream
            yield
            self.current = before

    found = GPU()
    monkeypatch.setattr(streams, "_SECOND_STREAMS", {})
    monkeypatch.setattr(torch.cuda, "Stream", found.make)
    monkeypatch.setattr(torch.cuda, "stream", found.use)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: found.current)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    return found


def test_the_second_stream_waits_for_the_current_one_and_a_join_the_other_way_round(gpu):
    with streams.fork_stream(gpu.x):
        assert gpu.current.name == "second 1"
        assert gpu.waits == ["second 1 for first"]
    assert gpu.current.name == "first"
    streams.join_stream(gpu.x)
    assert gpu.waits == ["second 1 for first", "first for second 1"]


def test_every_stream_has_a_second_one_of_its_own(gpu):
    for name in ("another", "first"):
        gpu.current = Stream(gpu.waits, name)
        for _ in range(2):
            with streams.fork_stream(gpu.x):
                pass
    assert gpu.waits == ["second 1 for another"] * 2 + ["second 2 for first"] * 2


def test_an_op_that_fails_joins(gpu):
    @streams.on_its_device
    def fails(queries):
        with streams.fork_stream(queries.q):
            pass
        raise MemoryError

    with pytest.raises(MemoryError):
        fails(Queries(gpu.x, 1))
    assert gpu.waits == ["second 1 for first"] * 2 + ["first for second 1"]


def test_an_op_that_fails_before_it_forked_a_stream_may_be_captured(gpu):
    @streams.on_its_device
    def fails(queries):
        raise MemoryError

    with pytest.raises(MemoryError):
        fails(Queries(gpu.x, 1))
    # what a stream under capture waits for must wait for it first
    assert gpu.waits == ["second 1 for first", "first for second 1"]


def test_an_op_that_does_not_fail_waits_for_nothing_by_itself(gpu):
    streams.on_its_device(lambda queries: None)(Queries(gpu.x, 1))
    assert gpu.waits == []


def test_on_a_cpu_there_is_one_order():
    x = torch.zeros(1)
    with streams.fork_stream(x):
        x += 1
    streams.join_stream(x)
    assert streams.on_its_device(lambda queries: queries.q + 1)(Queries(x, 1)).item() == 2


HEADS = {"num_heads": 2, "num_kv_heads": 2}
SHAPES = {
    "dense": Shape(num_queries=70, **HEADS),
    "packed": Shape(lengths=(40, 0, 1, 29), **HEADS),
    "no block": Shape(num_queries=5, **HEADS),
}


def strided(x):
    """Return x where kernels cannot read it in place."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="without a GPU there is no second stream")
@pytest.mark.usefixtures("nan_buffers")
@pytest.mark.filterwarnings("ignore:.*against policy.*")
@pytest.mark.parametrize(
    ("operation", "shape"),
    [
        # all branches at once take packed rows in CI
        pytest.param(operation, shape, marks=pytest.mark.slow if name == "packed" and operation != "nsa" else (), id=f"{operation}-{name}")
        for operation in ("cmp", "slc", "win", "nsa")
        for name, shape in SHAPES.items()
    ],
)
def test_a_late_second_stream_changes_no_bit(operation, shape, monkeypatch, check_late_stream):
    # several splits of queries, chunks of rows, and items of lists
    monkeypatch.setattr(interval, "MIN_SPLIT_QUERIES", 16)
    monkeypatch.setattr(index, "MAX_CHUNK_ROWS", 32)
    monkeypatch.setattr(selected, "BACKWARD_ITEM_ROWS", 16)
    inputs = make_inputs(shape, torch.float32)
    indices = random_block_indices(shape)

    def evaluate():
        x = inputs._replace(**{name: strided(y).requires_grad_() for name, y in inputs._asdict().items() if name != "cu_seqlens"})
        options = {"geometry": SMALL, "cu_seqlens": inputs.cu_seqlens, "backend": "triton"}
        out, leaves = {
            "cmp": lambda: (compressed_attention(x.q, x.k_cmp, x.v_cmp, **options).out, (x.q, x.k_cmp, x.v_cmp)),
            "slc": lambda: (selected_attention(x.q, x.k_slc, x.v_slc, indices, **options).out, (x.q, x.k_slc, x.v_slc)),
            "win": lambda: (sliding_window_attention(x.q, x.k_win, x.v_win, **options).out, (x.q, x.k_win, x.v_win)),
            "nsa": lambda: (nsa_attention(*x.tensors, **options), x.tensors),
        }[operation]()
        return [out, *torch.autograd.grad(out.sin().sum(), leaves)]

    has_late = check_late_stream(evaluate) > 0
    assert has_late == (operation != "cmp" or shape.num_blocks > 0)
