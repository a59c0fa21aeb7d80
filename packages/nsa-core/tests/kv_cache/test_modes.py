"""Modes of torch that are on while a cache is built or used: the default device, and inference mode."""

from contextlib import nullcontext

import pytest
import torch

from nsa_core import BlockGeometry, NSAConfig

CONFIG = NSAConfig(8, 4, 2, 6, 5, geometry=BlockGeometry(4, 2, 4, 3, 1, 1, 5), gate_hidden_size=8)
KINDS = [{}, {"page_size": 8}, {"static": True}, {"static": True, "page_size": 8}]


def step(layer, cache, x):
    """Append x (B, m, hidden) to sequences of equal lengths."""
    if cache.pages is not None:
        length = int(cache.lengths.max())
        for sequence in range(cache.batch_size):
            cache.reserve(sequence, length + x.shape[1], length=length)
    return layer(x, cache=cache)


def grown(layer, cache, x):
    step(layer, cache, x)


def cropped(layer, cache, x):
    cache.crop(1)
    cache.crop([1, 1])


def reordered(layer, cache, x):
    cache.reorder(torch.tensor([1, 0], device="cpu"))
    cache.select(torch.tensor([1, 0], device="cpu"))


def emptied(layer, cache, x):
    cache.reset(torch.tensor([1], device="cpu"))
    cache.reset()


USES = [grown, cropped, reordered, emptied]


def run(layer, kind, modes):
    """Return the outputs of steps after each of USES; the first of `modes` is on while the cache is built, the others during one use each."""
    x = torch.randn(2, 20, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with modes[0]():
        cache = layer.new_cache(2, 60, **kind)
    outs = [step(layer, cache, x)]
    for mode, use in zip(modes[1:], USES, strict=True):
        with mode():
            use(layer, cache, x)
        outs.append(step(layer, cache, x[:, :3]))
    cache.check()
    return outs


@pytest.fixture(autouse=True)
def _early_growth(monkeypatch):
    monkeypatch.setattr("nsa_core.kv_cache.cache.FIRST_CAPACITY", 24)


def check_modes(layer, kind, modes):
    for out, expected in zip(run(layer, kind, modes), run(layer, kind, [nullcontext] * 5), strict=True):
        assert torch.equal(out, expected)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_default_device_decides_nothing_of_a_cache(random_layer, kind):
    check_modes(random_layer(CONFIG), kind, [lambda: torch.device("meta")] * 5)


@pytest.mark.parametrize("on", range(5), ids=["built", *(use.__name__ for use in USES)])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_cache_that_inference_mode_built_or_changed_serves_outside_of_it(random_layer, kind, on):
    check_modes(random_layer(CONFIG), kind, [torch.inference_mode if number == on else nullcontext for number in range(5)])
