"""Who waits for whom when kernels run beside each other; that results are right is shown on a GPU (test_cuda.py)."""

from contextlib import contextmanager, nullcontext

import pytest
import torch

from nsa_kernels_triton import launch


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
    monkeypatch.setattr(launch, "_SECOND_STREAMS", {})
    monkeypatch.setattr(torch.cuda, "Stream", found.make)
    monkeypatch.setattr(torch.cuda, "stream", found.use)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: found.current)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    return found


def test_the_second_stream_waits_for_the_current_one_and_a_join_the_other_way_round(gpu):
    with launch.beside(gpu.x):
        assert gpu.current.name == "second 1"
        assert gpu.waits == ["second 1 for first"]
    assert gpu.current.name == "first"
    launch.join(gpu.x)
    assert gpu.waits == ["second 1 for first", "first for second 1"]


def test_every_stream_has_a_second_one_of_its_own(gpu):
    for name in ("another", "first"):
        gpu.current = Stream(gpu.waits, name)
        for _ in range(2):
            with launch.beside(gpu.x):
                pass
    assert gpu.waits == ["second 1 for another"] * 2 + ["second 2 for first"] * 2


def test_an_op_that_fails_joins(gpu):
    @launch.on_its_device
    def fails(x):
        with launch.beside(x):
            pass
        raise MemoryError

    with pytest.raises(MemoryError):
        fails(gpu.x)
    assert gpu.waits == ["second 1 for first", "first for second 1"]


def test_an_op_that_does_not_fail_waits_for_nothing_by_itself(gpu):
    launch.on_its_device(lambda x: None)(gpu.x)
    assert gpu.waits == []


def test_on_a_cpu_there_is_one_order():
    x = torch.zeros(1)
    with launch.beside(x):
        x += 1
    launch.join(x)
    assert launch.on_its_device(lambda y: y + 1)(x).item() == 2
