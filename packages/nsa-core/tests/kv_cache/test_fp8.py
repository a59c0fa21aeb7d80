"""A cache with FP8 tokens: the two rules of the specification, and its bytes."""

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nsa_core import BlockGeometry, CacheOptions, InputError, NSACache, NSAConfig
from nsa_core.kv_cache import cache as cache_module
from nsa_core.reference.append import to_fp8

SMALL = BlockGeometry(4, 2, 4, 3, 1, 1, 5)
CONFIG = NSAConfig(8, 4, 2, 6, 5, geometry=SMALL, gate_hidden_size=8)
FP8 = torch.float8_e4m3fn
SHARINGS = ["separate", "shared"]


def there_and_back(x):
    stored, scale = to_fp8(x)
    return (stored.float() * scale.unsqueeze(-1)).to(x.dtype)


def decode(layer, x, steps, **options):
    cache = layer.new_cache(x.shape[0], x.shape[1], **options)
    outs, done = [], 0
    for count in steps:
        if "page_size" in options:
            for b in range(x.shape[0]):
                cache.reserve(b, done + count, length=done)
        outs.append(layer(x[:, done : done + count], cache=cache))
        done += count
    return torch.cat(outs, 1), cache


@given(data=st.data(), kv=st.sampled_from(SHARINGS), static=st.booleans(), paged=st.booleans(), max_rollback=st.integers(0, 6))
def test_outputs_are_those_of_the_converted_keys_and_values_and_blocks_of_the_exact_ones(
    random_layer, random_input, data, kv, static, paged, max_rollback
):
    layer, x = random_layer(attrs.evolve(CONFIG, kv=kv)), random_input(2, 23, 8)
    steps = data.draw(st.sampled_from([[9, 1, 1, 7, 1, 4], [23], [1] * 23, [3, 20]]))
    options = {"static": static, "max_rollback": max_rollback, **({"page_size": 4} if paged else {})}

    out, cache = decode(layer, x, steps, kv_dtype=FP8, **options)

    exact = layer._by_reader

    def converted(q, keys, values, turn):
        q, rows = exact(q, keys, values, turn)
        return q, rows | {name: tuple(map(there_and_back, rows[name])) for name in ("slc", "win")}

    layer._by_reader = converted
    expected, plain = decode(layer, x, steps, **options)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    for name in ("cmp", "raw"):
        assert torch.equal(cache.keys[name], plain.keys[name])
        assert torch.equal(cache.values[name], plain.values[name])
    assert torch.equal(cache.total_reads.actual, plain.total_reads.actual)


@pytest.mark.parametrize("kv", SHARINGS)
def test_outputs_stay_close_to_those_of_a_bfloat16_cache(kv, random_layer, random_input):
    geometry = BlockGeometry(32, 16, 64, 6, 1, 2, 96)
    config = NSAConfig(128, 8, 2, 64, 64, geometry=geometry, gate_hidden_size=8, kv=kv)
    layer, x = random_layer(config, dtype=torch.bfloat16), random_input(2, 640, 128, dtype=torch.bfloat16)
    steps = [500, 100, *[1] * 40]

    out, _ = decode(layer, x, steps, kv_dtype=FP8)
    expected, _ = decode(layer, x, steps)

    difference, wide = (out.double() - expected.double()), expected.double()
    assert difference.norm() <= 0.06 * wide.norm()
    assert difference.abs().max() <= 0.10 * wide.abs().max()
    assert difference.any()


@given(rows=st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=8))
def test_a_number_is_stored_within_a_sixteenth_or_a_half_step_of_its_rows_smallest(rows):
    x = torch.tensor(rows, dtype=torch.float32)[None]

    back = there_and_back(x)

    smallest_step = 2.0**-9 * max(float(x.abs().max()) / 448, torch.finfo(torch.float32).tiny)
    assert bool(((back - x).double().abs() <= 1.01 * (x.double().abs() / 16 + smallest_step / 2)).all())
    assert not back[x == 0].any()


@pytest.mark.parametrize("kv", SHARINGS)
def test_the_token_stores_take_half_the_bytes_and_scales(kv):
    config = NSAConfig(64, 64, 4, 192, 128, geometry=BlockGeometry(), gate_hidden_size=8, kv=kv)
    options = [CacheOptions(static=True, max_rollback=0, kv_dtype=kv_dtype) for kv_dtype in (None, FP8)]
    plain, small = (NSACache(config, 16, 65536, each, dtype=torch.bfloat16, device="meta") for each in options)

    tokens = 65536 + (511 if kv == "separate" else 0)
    assert plain.nbytes - small.nbytes == 16 * tokens * 4 * ((192 + 128) * 1 - 2 * 4)
    blocks = 4 * 320 * 2 / 16
    assert (plain.bytes_per_token, small.bytes_per_token) == (4 * 320 * 2 + blocks, 4 * (320 + 8) + blocks)


def test_reordered_grown_and_cropped_stores_keep_their_scales(random_layer, random_input, monkeypatch):
    monkeypatch.setattr(cache_module, "FIRST_CAPACITY", 4)
    layer, x, other = random_layer(CONFIG), random_input(2, 14, 8), random_input(2, 9, 8, seed=5)
    for static in (False, True):
        cache = layer.new_cache(2, 30, static=static, kv_dtype=FP8)
        layer(x, cache=cache)
        cache.crop(3)
        cache.reorder(torch.tensor([1, 1]))
        out = layer(other, cache=cache)
        together = torch.cat([x[1:, :11].expand(2, -1, -1), other], 1)
        expected, _ = decode(layer, together, [11, 9], kv_dtype=FP8)
        torch.testing.assert_close(out, expected[:, 11:], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.float16, torch.float8_e5m2])
def test_an_unknown_kv_dtype_is_refused(random_layer, kv_dtype):
    with pytest.raises(InputError) as caught:
        random_layer(CONFIG).new_cache(1, 8, kv_dtype=kv_dtype)

    assert str(caught.value) == f"kv_dtype={kv_dtype} is no dtype of token stores (the rule: None or torch.float8_e4m3fn); use None"


@pytest.mark.parametrize("static", [False, True])
def test_a_kv_dtype_that_no_store_takes_is_said_to_be_unused(random_layer, static):
    layer = random_layer(attrs.evolve(CONFIG, branches=("cmp",)))

    with pytest.warns(UserWarning, match=r"^kv_dtype=torch.float8_e4m3fn is not used with branches=\('cmp',\) .*; leave it out$") as caught:
        cache = layer.new_cache(1, 8, static=static, kv_dtype=FP8)

    assert (caught[0].filename, cache.nbytes) == (__file__, layer.new_cache(1, 8, static=static).nbytes)
