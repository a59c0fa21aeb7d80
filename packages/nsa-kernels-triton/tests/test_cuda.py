"""The kernels on a GPU, at real shapes: exact against the reference in float64, never waiting, captured, bounded in memory.

The other files also run on a GPU if there is one; these tests need one.
"""

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from attrs import evolve
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

from nsa_core import (
    BlockGeometry,
    NativeSparseAttention,
    NSAConfig,
    compressed_attention,
    nsa_attention,
    select_blocks,
    selected_attention,
    sliding_window_attention,
)
from nsa_core.blocks import num_compressed_blocks
from nsa_core.reference.causal import causal_attention
from nsa_core.selection import pool_importance
from nsa_core.testing import masks
from nsa_core.testing.inputs import Inputs, Shape, make_inputs
from nsa_core.testing.tolerances import allowed_error, max_error, near_tie_margin
from nsa_kernels_triton.launch import Sequences
from nsa_kernels_triton.selected import op as selected
from nsa_kernels_triton.streams import second_stream

pytestmark = [pytest.mark.hardware(capability=(8, 0)), pytest.mark.filterwarnings("ignore:.*against policy.*")]

GEOMETRY = BlockGeometry()
PAPER = {"num_heads": 64, "num_kv_heads": 4, "head_dim_qk": 192, "head_dim_v": 128}
EVEN = {**PAPER, "head_dim_qk": 128}
LLAMA = {"num_heads": 32, "num_kv_heads": 8, "head_dim_qk": 128, "head_dim_v": 128}
NARROW = {"num_heads": 16, "num_kv_heads": 8, "head_dim_qk": 64, "head_dim_v": 64}
REAL = {"P": PAPER, "M": EVEN, "L": LLAMA, "S": NARROW}
HALF = [torch.bfloat16, torch.float16]
each_real = pytest.mark.parametrize("sizes", REAL.values(), ids=REAL)
each_half = pytest.mark.parametrize("dtype", HALF, ids=["bf16", "fp16"])


@pytest.fixture(autouse=True)
def ways_of_long_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let calls of so few queries have late ones, and early ones that have a choice."""
    monkeypatch.setattr(selected, "EARLY_BLOCKS", 18)


def inputs_of(num_queries: int = 0, dtype: torch.dtype = torch.bfloat16, lengths: tuple[int, ...] | None = None, **sizes: Any) -> Inputs:
    """Return inputs on the GPU."""
    shape = Shape(geometry=GEOMETRY, num_queries=num_queries, lengths=lengths, **sizes)
    return make_inputs(evolve(shape, seed=num_queries), device="cuda").to(dtype)


def huge_inputs(num_queries: int, **sizes: int) -> Inputs:
    """Return normal bfloat16 inputs made on the GPU."""
    heads, groups, head_dim_qk, head_dim_v = (sizes[name] for name in PAPER)
    num_blocks = (num_queries - GEOMETRY.compression_block_size) // GEOMETRY.compression_stride + 1

    def normal(rows: int, count: int, width: int) -> Tensor:
        return torch.randn(1, rows, count, width, device="cuda", dtype=torch.bfloat16)

    pairs = [normal(rows, groups, width) for rows in (num_blocks, num_queries, num_queries) for width in (head_dim_qk, head_dim_v)]
    return Inputs.of([normal(num_queries, heads, head_dim_qk), *pairs, torch.rand(1, num_queries, heads, 3, device="cuda")])


def weights_of(out: Tensor) -> Tensor:
    """Return gradients for `out` that every dtype holds exactly."""
    return torch.randn(out.shape, generator=torch.Generator().manual_seed(7)).to(torch.bfloat16).to(out)


def evaluate(function: Callable[..., Tensor], operands: tuple[Tensor, ...]) -> list[Tensor]:
    """Return out and the gradients of the operands."""
    leaves = [x.detach().clone().requires_grad_() for x in operands]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad((out * weights_of(out)).sum(), leaves)]


def chosen_blocks(inputs: Inputs, **options: Any) -> Tensor:
    """Return the blocks that the kernels choose, as `nsa_attention` does."""
    lse = compressed_attention(inputs.q, inputs.k_cmp, inputs.v_cmp, geometry=GEOMETRY, backend="triton", **options).lse
    return select_blocks(inputs.q, inputs.k_cmp, lse, geometry=GEOMETRY, backend="triton", **options)


def composed(indices: Tensor, **options: Any) -> Callable[..., Tensor]:
    """Return Eq. 5 by the reference with a given choice, so that rounding cannot change it."""

    def run(q: Tensor, k_cmp: Tensor, v_cmp: Tensor, k_slc: Tensor, v_slc: Tensor, k_win: Tensor, v_win: Tensor, gates: Tensor) -> Tensor:
        keywords: dict[str, Any] = {"geometry": GEOMETRY, "backend": "sdpa", **options}
        outs = (
            compressed_attention(q, k_cmp, v_cmp, **keywords).out,
            selected_attention(q, k_slc, v_slc, indices, **keywords).out,
            sliding_window_attention(q, k_win, v_win, **keywords).out,
        )
        return torch.stack([out * gates[..., index, None] for index, out in enumerate(outs)]).sum(0)

    return run


def kernels(**options: Any) -> Callable[..., Tensor]:
    """Return Eq. 5 by the kernels."""
    return lambda *tensors: nsa_attention(*tensors, geometry=GEOMETRY, backend="triton", **options)


def fused_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Return torch's memory-efficient attention under `mask` (B, S, G, T); rows that see nothing give 0."""
    heads_per_group = q.shape[2] // k.shape[2]
    mask = mask.to(q.device).repeat_interleave(heads_per_group, 2).transpose(1, 2)
    sees = mask.any(-1, keepdim=True)
    keys = mask.shape[-1]
    bias = torch.zeros(*mask.shape[:-1], -(-keys // 8) * 8, dtype=q.dtype, device=q.device)[..., :keys]
    bias = bias.masked_fill_(~(mask | ~sees), -math.inf)
    width = q.shape[3] - v.shape[3]
    operands = (x.repeat_interleave(heads_per_group, 2).transpose(1, 2) for x in (k, pad(v, (0, width))))
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        out = scaled_dot_product_attention(q.transpose(1, 2), *operands, attn_mask=bias)
    return torch.where(sees, out, 0).transpose(1, 2)[..., : v.shape[3]]


def torchs(indices: Tensor) -> Callable[..., Tensor]:
    """Return Eq. 5 by torch's fused attention under explicit masks: the reference for low-precision errors."""

    def run(q: Tensor, k_cmp: Tensor, v_cmp: Tensor, k_slc: Tensor, v_slc: Tensor, k_win: Tensor, v_win: Tensor, gates: Tensor) -> Tensor:
        length, groups = q.shape[1], k_slc.shape[2]
        block = torch.arange(length, device=q.device) // GEOMETRY.selection_block_size
        causal = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
        chosen = torch.zeros(1, length, groups, int(block[-1]) + 2, dtype=torch.bool, device=q.device)
        chosen.scatter_(-1, torch.where(indices >= 0, indices, int(block[-1]) + 1).long(), True)
        everyone = (1, length, groups, -1)
        seen = (
            masks.compressed_mask(length, k_cmp.shape[1], GEOMETRY)[None, :, None].expand(everyone),
            chosen[..., block] & causal[None, :, None],
            masks.window_mask(length, GEOMETRY)[None, :, None].expand(everyone),
        )
        pairs = ((k_cmp, v_cmp), (k_slc, v_slc), (k_win, v_win))
        outs = [fused_attention(q, *pair, mask) for pair, mask in zip(pairs, seen, strict=True)]
        return torch.stack([out * gates[..., index, None] for index, out in enumerate(outs)]).sum(0)

    return run


NAMES = ("out", "dq", "dk_cmp", "dv_cmp", "dk_slc", "dv_slc", "dk_win", "dv_win", "dgates")


def assert_exact(ours: list[Tensor], exact: list[Tensor], yardstick: list[Tensor] | None = None, names: tuple[str, ...] = NAMES) -> None:
    for index, (name, x, truth) in enumerate(zip(names, ours, exact, strict=True)):
        torch_error = 0.0 if yardstick is None else max_error(yardstick[index], truth)
        error, limit = max_error(x, truth), allowed_error(truth, x.dtype, torch_error)
        print(f"{name}: {error:.2e} of {limit:.2e}, torch's own {torch_error:.2e}")
        assert error <= limit, f"{name} is off by {error:.2e} (allowed: {limit:.2e})"


@each_half
@each_real
def test_outputs_and_gradients_are_as_exact_as_torchs_own(sizes: dict[str, int], dtype: torch.dtype) -> None:
    inputs = inputs_of(1500, dtype, **sizes)
    indices = chosen_blocks(inputs)
    ours, exact = evaluate(kernels(), inputs.tensors), evaluate(composed(indices), inputs.to(torch.float64).tensors)
    assert_exact(ours, exact, evaluate(torchs(indices), inputs.tensors))


@each_half
@pytest.mark.parametrize("sizes", [EVEN, LLAMA, NARROW], ids=["M", "L", "S"])
def test_two_branches_in_one_operation_are_as_exact_as_torchs_own(sizes: dict[str, int], dtype: torch.dtype) -> None:
    inputs = inputs_of(1500, dtype, **sizes)
    indices = chosen_blocks(inputs)

    def of_two(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(q: Tensor, *others: Tensor) -> Tensor:
            *pairs, gates = others
            is_open = torch.tensor([0, 1, 1], device="cuda")
            return function(q, inputs.k_cmp.to(q.dtype), inputs.v_cmp.to(q.dtype), *pairs, gates * is_open)

        return run

    def fused(q: Tensor, k_cmp: Tensor, _v_cmp: Tensor, *others: Tensor) -> Tensor:
        return kernels()(q, k_cmp, None, *others)

    operands = (inputs.q, *inputs.tensors[3:])
    ours, exact = evaluate(of_two(fused), operands), evaluate(of_two(composed(indices)), tuple(x.double() for x in operands))
    assert_exact(ours, exact, evaluate(of_two(torchs(indices)), operands), (*NAMES[:2], *NAMES[4:]))


@each_half
@pytest.mark.parametrize("factor", [5, 15, 50])
def test_large_logits_are_as_exact_as_torchs_own(factor: int, dtype: torch.dtype) -> None:
    inputs = inputs_of(1100, torch.float64, **LLAMA)
    inputs = inputs._replace(q=factor * inputs.q).to(dtype)
    indices = chosen_blocks(inputs)
    ours, exact = evaluate(kernels(), inputs.tensors), evaluate(composed(indices), inputs.to(torch.float64).tensors)
    assert_exact(ours, exact, evaluate(torchs(indices), inputs.tensors))


@each_half
@pytest.mark.parametrize("factor", [100, 300])
@pytest.mark.parametrize("sizes", [EVEN, NARROW], ids=["M", "S"])
def test_gradients_of_large_scores_are_at_most_twice_as_inexact_as_flash_attentions(
    sizes: dict[str, int], factor: int, dtype: torch.dtype
) -> None:
    # a window over all keys is dense causal attention
    length = 1100
    heads_per_group = sizes["num_heads"] // sizes["num_kv_heads"]
    geometry = evolve(GEOMETRY, window_size=length)
    made = inputs_of(length, torch.float64, **sizes)
    operands = tuple(x.to(dtype) for x in (factor * made.q, factor * made.k_win, made.v_win))

    def window(backend: str) -> Callable[..., Tensor]:
        return lambda q, k, v: sliding_window_attention(q, k, v, geometry=geometry, backend=backend).out

    def flash(q: Tensor, *pair: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return causal_attention(q, *(x.repeat_interleave(heads_per_group, 2) for x in pair))

    exact = evaluate(window("sdpa"), tuple(x.double() for x in operands))
    found = zip(("out", "dq", "dk", "dv"), evaluate(window("triton"), operands), evaluate(flash, operands), exact, strict=True)
    for name, ours, torchs_own, truth in found:
        error, torch_error = max_error(ours, truth), max_error(torchs_own, truth)
        print(f"{name}: {error:.2e}, flash attention's {torch_error:.2e}: {error / torch_error:.2f} times")
        assert error <= 2 * torch_error, name


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 63, 64, 65, 513, 1023, 1024, 1025, 1499, 4097])
def test_float32_equals_the_reference_at_every_length(length: int) -> None:
    inputs = inputs_of(length, torch.float32, num_heads=6, num_kv_heads=2, head_dim_qk=64, head_dim_v=48)
    exact = evaluate(composed(chosen_blocks(inputs)), inputs.to(torch.float64).tensors)
    assert_exact(evaluate(kernels(), inputs.tensors), exact)


@pytest.mark.parametrize("head_dims", [(16, 16), (40, 24), (80, 80), (96, 96), (192, 128), (128, 192), (256, 256)], ids=str)
def test_float32_equals_the_reference_at_every_head_dimension(head_dims: tuple[int, int]) -> None:
    inputs = inputs_of(1301, torch.float32, num_heads=4, num_kv_heads=2, head_dim_qk=head_dims[0], head_dim_v=head_dims[1])
    exact = evaluate(composed(chosen_blocks(inputs)), inputs.to(torch.float64).tensors)
    assert_exact(evaluate(kernels(), inputs.tensors), exact)


@pytest.mark.parametrize(
    "head_dims", [(48, 40), (64, 64), (80, 80), (96, 96), (160, 72), (160, 136), (192, 128), (192, 192), (256, 256)], ids=str
)
def test_any_head_dimension_is_as_exact_as_torchs_own(head_dims: tuple[int, int]) -> None:
    inputs = inputs_of(1301, num_heads=8, num_kv_heads=2, head_dim_qk=head_dims[0], head_dim_v=head_dims[1])
    indices = chosen_blocks(inputs)
    ours, exact = evaluate(kernels(), inputs.tensors), evaluate(composed(indices), inputs.to(torch.float64).tensors)
    assert_exact(ours, exact, evaluate(torchs(indices), inputs.tensors))


@pytest.mark.parametrize("heads_per_group", [1, 2, 3, 4, 5, 6, 7, 8, 16])
def test_any_group_is_as_exact_as_torchs_own(heads_per_group: int) -> None:
    inputs = inputs_of(1301, num_heads=2 * heads_per_group, num_kv_heads=2, head_dim_qk=128, head_dim_v=128)
    indices = chosen_blocks(inputs)
    ours, exact = evaluate(kernels(), inputs.tensors), evaluate(composed(indices), inputs.to(torch.float64).tensors)
    assert_exact(ours, exact, evaluate(torchs(indices), inputs.tensors))


@pytest.mark.parametrize("head_dims", [(64, 64), (128, 128), (192, 128), (192, 192)], ids=str)
def test_scores_far_above_a_rows_first_ones_are_exact(head_dims: tuple[int, int]) -> None:
    inputs = inputs_of(2100, num_heads=16, num_kv_heads=2, head_dim_qk=head_dims[0], head_dim_v=head_dims[1])
    rows = torch.arange(2100, device="cuda")
    for attend, k, v, first in (
        (sliding_window_attention, inputs.k_win, inputs.v_win, 700),
        (compressed_attention, inputs.k_cmp, inputs.v_cmp, 80),
    ):
        # weights of some rows that float32 cannot hold
        k = k * torch.where(rows[: k.shape[1]] % 131 == first % 131, 60, 1)[:, None, None].bfloat16()  # noqa: PLW2901 - few of the keys
        ours, yardstick, exact = (
            attend(inputs.q.to(dtype), k.to(dtype), v.to(dtype), geometry=GEOMETRY, backend=backend)
            for backend, dtype in (("triton", torch.bfloat16), ("sdpa", torch.bfloat16), ("sdpa", torch.float64))
        )
        assert exact.lse.max() > 100
        assert max_error(ours.out, exact.out) <= allowed_error(exact.out, torch.bfloat16, max_error(yardstick.out, exact.out))
        seen = exact.lse.isfinite()
        assert torch.equal(ours.lse.isfinite(), seen)
        torch.testing.assert_close(ours.lse[seen].double(), exact.lse[seen], rtol=1e-4, atol=1e-2)


def test_surplus_compressed_rows_may_be_nan() -> None:
    inputs = inputs_of(1301, num_heads=8, num_kv_heads=2, head_dim_qk=128, head_dim_v=128)
    q = inputs.q.clone().requires_grad_()
    k, v = (pad(x, (0, 0, 0, 0, 0, 3), value=math.nan).requires_grad_() for x in (inputs.k_cmp, inputs.v_cmp))
    out = compressed_attention(q, k, v, geometry=GEOMETRY, backend="triton").out
    gradients = torch.autograd.grad(out.sum(), (q, k, v))
    assert all(bool(x.isfinite().all()) for x in (out, *gradients))
    assert not any(bool(x[:, -3:].any()) for x in gradients[1:])


@pytest.mark.parametrize(
    ("dtype", "heads", "head_dim"), [(torch.float32, (4, 2), 64), (torch.bfloat16, (32, 4), 128)], ids=["float32", "bf16"]
)
def test_a_hundred_packed_sequences_equal_the_reference(dtype: torch.dtype, heads: tuple[int, int], head_dim: int) -> None:
    short = torch.randint(0, 400, (99,), generator=torch.Generator().manual_seed(3)).tolist()
    lengths = (*short, 2100)
    sizes = {"num_heads": heads[0], "num_kv_heads": heads[1], "head_dim_qk": head_dim, "head_dim_v": head_dim}
    inputs = inputs_of(dtype=dtype, lengths=lengths, surplus_blocks=3, **sizes)
    # so many that early queries are attended to densely
    sequences = Sequences(1, sum(lengths), inputs.cu_seqlens, inputs.cu_seqlens)
    assert selected.early_queries(inputs.q, inputs.k_slc, inputs.v_slc, GEOMETRY, sequences)
    options = {"cu_seqlens": inputs.cu_seqlens, "max_seqlen": 2100}
    reference = composed(chosen_blocks(inputs, **options), **options)
    exact = evaluate(reference, inputs.to(torch.float64).tensors)
    yardstick = None if dtype == torch.float32 else evaluate(reference, inputs.tensors)
    assert_exact(evaluate(kernels(**options), inputs.tensors), exact, yardstick)


@pytest.mark.parametrize("head_dims", [(64, 64), (80, 96), (128, 64), (128, 128), (192, 64), (192, 128), (192, 192)], ids=str)
def test_packed_sequences_are_as_exact_as_the_reference(head_dims: tuple[int, int]) -> None:
    sizes = {"num_heads": 12, "num_kv_heads": 2, "head_dim_qk": head_dims[0], "head_dim_v": head_dims[1]}
    inputs = inputs_of(lengths=(1, 63, 64, 65, 1025, 0, 1400), surplus_blocks=3, **sizes)
    options = {"cu_seqlens": inputs.cu_seqlens, "max_seqlen": 1400}
    reference = composed(chosen_blocks(inputs, **options), **options)
    exact, yardstick = (evaluate(reference, inputs.to(dtype).tensors) for dtype in (torch.float64, torch.bfloat16))
    assert_exact(evaluate(kernels(**options), inputs.tensors), exact, yardstick)


@pytest.mark.parametrize("head_dims", [(64, 64), (80, 96), (128, 64), (128, 128), (192, 64), (192, 128), (192, 192)], ids=str)
def test_steps_over_stores_never_read_what_does_not_count(head_dims: tuple[int, int]) -> None:
    capacity, num_queries, starts, counts = 2000, 40, (0, 900, 1950), (40, 7, 40)
    whole = inputs_of(capacity, num_heads=12, num_kv_heads=2, head_dim_qk=head_dims[0], head_dim_v=head_dims[1])
    stores = [x.expand(3, -1, -1, -1).clone() for x in whole.tensors[1:7]]
    q = torch.stack([pad(whole.q[0], (0, 0, 0, 0, 0, num_queries))[start:][:num_queries] for start in starts])
    gates = torch.rand(3, num_queries, 12, 3, device="cuda", dtype=q.dtype)
    options = {
        "query_start": torch.tensor(starts, dtype=torch.int32, device="cuda"),
        "query_count": torch.tensor(counts, dtype=torch.int32, device="cuda"),
    }
    clean = Inputs.of([q, *stores, gates])
    expected = composed(chosen_blocks(clean, **options), **options)(*clean.to(torch.float64).tensors)
    dirty = [x.clone() for x in clean.tensors]
    for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
        dirty[0][row, count:], dirty[7][row, count:] = math.nan, math.nan
        for index, store in enumerate(dirty[1:7]):
            held = num_compressed_blocks(start + count, GEOMETRY) if index < 2 else start + count
            store[row, held:] = math.nan
    out = kernels(**options)(*dirty)
    assert not out[1, 7:].any()
    assert max_error(out, expected) <= allowed_error(expected, torch.bfloat16, 2**-9)


MANY = 70_000
"""Sequences, more than CUDA allows programs on the second axis of a grid."""
FEW_OF_MANY = [0, 1, 65_535, 65_536, MANY - 1]
SMALL_BLOCKS, LARGE_BLOCKS = BlockGeometry(2, 1, 2, 1, 0, 1, 2), BlockGeometry(2, 2, 64, 1, 0, 1, 2)


@pytest.mark.parametrize("geometry", [SMALL_BLOCKS, LARGE_BLOCKS], ids=["blocks_of_2", "blocks_of_64"])
@pytest.mark.parametrize("is_packed", [False, True], ids=["dense", "packed"])
def test_outputs_and_gradients_of_many_sequences_are_exact(is_packed: bool, geometry: BlockGeometry) -> None:
    length, heads, head_dim = 3, 16, 64
    generator = torch.Generator("cuda").manual_seed(3)
    rows = [(length, heads), *[(num_compressed_blocks(length, geometry), 1)] * 2, *[(length, 1)] * 4]
    tensors = [torch.randn(MANY, *of, head_dim, generator=generator, device="cuda").bfloat16() for of in rows]
    gates = torch.rand(MANY, length, heads, 3, generator=generator, device="cuda").bfloat16()
    weights = torch.randn(MANY, length, heads, head_dim, generator=generator, device="cuda").bfloat16()

    def run(backend: str, *operands: Tensor, **options: Any) -> list[Tensor]:
        leaves = [x.detach().clone().requires_grad_() for x in operands[:-1]]
        out = nsa_attention(*leaves, geometry=geometry, backend=backend, **options)
        return [out.detach(), *torch.autograd.grad(out, leaves, operands[-1].to(out.dtype))]

    operands = [*tensors, gates, weights]
    if is_packed:
        bounds = torch.arange(0, MANY * length + 1, length, dtype=torch.int32, device="cuda")
        ours = run("triton", *(x.flatten(0, 1)[None] for x in operands), cu_seqlens=bounds, max_seqlen=length)
    else:
        ours = run("triton", *operands)
    few = [x[FEW_OF_MANY] for x in operands]
    exact = run("sdpa", *(x.double() for x in few))
    assert_exact([x.reshape(MANY, -1, *x.shape[2:])[FEW_OF_MANY] for x in ours], exact, run("sdpa", *few))


def test_a_step_of_many_sequences_equals_the_whole_pass() -> None:
    kernels_of = dict.fromkeys(("cmp", "select", "slc", "win", "append", "rotate"), "triton")
    layer = NativeSparseAttention(NSAConfig(64, 2, 1, 16, 16, geometry=SMALL_BLOCKS, backends=kernels_of)).to("cuda")
    x = torch.randn(MANY, 3, 64, device="cuda")
    cache = layer.new_cache(MANY, 4, static=True)
    with torch.no_grad():
        outs = [layer(part, cache=cache) for part in x.split([2, 1], 1)]
        whole = layer(x[FEW_OF_MANY])
    assert max_error(torch.cat(outs, 1)[FEW_OF_MANY], whole.double()) <= allowed_error(whole, torch.float32)


@each_real
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "float32"])
def test_nan_reaches_the_rows_that_the_table_says(dtype: torch.dtype, sizes: dict[str, int], extremes: Any) -> None:
    length, token, block = 2100, 900, 55
    inputs, heads_per_group = inputs_of(length, dtype, **sizes), sizes["num_heads"] // sizes["num_kv_heads"]
    is_chosen = (chosen_blocks(inputs)[0, :, 0] == token // GEOMETRY.selection_block_size).any(-1)
    chose = set(is_chosen.nonzero().flatten().tolist())
    first_seeing = block * GEOMETRY.compression_stride + GEOMETRY.compression_block_size - 1
    sees = {
        "cmp": set(range(first_seeing, length)),
        "slc": {t for t in chose if t >= token},
        "win": set(range(token, token + GEOMETRY.window_size)),
    }
    assert len(chose) < length * 2 // 3
    # a tile of the most rows, 192, has rows of a query and of so many neighbours
    reach = -(-192 // heads_per_group)
    for name in Inputs._fields[:7]:
        branch = name.rsplit("_", maxsplit=1)[-1]
        with torch.no_grad():
            out = kernels()(*extremes.poisoned(inputs, name, block if branch == "cmp" else token, math.nan).tensors)
        is_bad = ~out.isfinite().all(-1)[0]
        assert not is_bad[:, heads_per_group:].any(), "another group"
        bad = set(is_bad.any(1).nonzero().flatten().tolist())
        if name == "q":
            assert bad == {token}
            assert not is_bad[:, 1:].any()
        elif branch != "slc" and name.startswith("k"):
            assert bad == sees[branch], name
        else:
            reached_from = chose if branch == "slc" else sees[branch]
            assert sees[branch] <= bad <= {t + shift for t in reached_from for shift in range(1 - reach, reach)}, name


@pytest.mark.hardware(num_gpus=2, capability=(8, 0))
def test_kernels_run_where_their_tensors_lie() -> None:
    inputs = inputs_of(1301, **LLAMA)
    there = tuple(x.to("cuda:1") for x in inputs.tensors)
    assert torch.cuda.current_device() == 0
    for ours, expected in zip(evaluate(kernels(), there), evaluate(kernels(), inputs.tensors), strict=True):
        assert ours.device.index == 1
        assert torch.equal(ours.cpu(), expected.cpu())


@each_real
def test_the_choice_equals_float64s_above_the_margin(sizes: dict[str, int]) -> None:
    length = 8192
    inputs = huge_inputs(length, **sizes)
    lse = compressed_attention(inputs.q, inputs.k_cmp, inputs.v_cmp, geometry=GEOMETRY, backend="triton").lse
    ours = select_blocks(inputs.q, inputs.k_cmp, lse, geometry=GEOMETRY, backend="triton")
    expected = select_blocks(inputs.q.double(), inputs.k_cmp.double(), lse.double(), geometry=GEOMETRY, backend="sdpa")
    rows = torch.arange(7, length, 61, device="cuda")
    near = near_ties(inputs, lse, rows)
    wrong = (ours != expected)[0, rows].any(-1)
    print(f"{float(near.double().mean()):.4f} of rows lie below the margin; {int(wrong.sum())} of {wrong.numel()} rows differ")
    assert not bool((wrong & ~near).any())


def near_ties(inputs: Inputs, lse: Tensor, rows: Tensor) -> Tensor:
    """Return bool (rows, G): where the last chosen and the first left out lie within the margin of bfloat16 scores."""
    length, groups = inputs.q.shape[1], inputs.k_cmp.shape[2]
    num_blocks = -(-length // GEOMETRY.selection_block_size)
    q = inputs.q[0, rows].double().unflatten(1, (groups, -1))
    scores = torch.einsum("rghd,cgd->rghc", q, inputs.k_cmp[0].double()) * inputs.q.shape[3] ** -0.5
    weights = (scores - lse[0, rows].double().unflatten(1, (groups, -1)).unsqueeze(-1)).exp()
    ends = torch.arange(weights.shape[-1], device="cuda") * GEOMETRY.compression_stride + GEOMETRY.compression_block_size - 1
    weights = torch.where(ends <= rows[:, None, None, None], weights, 0).sum(2)
    importance = pool_importance(weights, GEOMETRY, num_blocks)
    block, own = torch.arange(num_blocks, device="cuda"), (rows // GEOMETRY.selection_block_size)[:, None, None]
    is_free = (block >= GEOMETRY.num_initial_blocks) & (block <= own - GEOMETRY.num_local_blocks)
    room = GEOMETRY.num_selected_blocks - GEOMETRY.num_initial_blocks - GEOMETRY.num_local_blocks
    ranked = torch.where(is_free, importance, -1.0).sort(-1, descending=True).values
    margin = near_tie_margin(importance.amax(-1), torch.bfloat16)
    return ranked[..., room - 1] - ranked[..., room] <= margin


@contextmanager
def no_waiting() -> Iterator[None]:
    """Make every operation that waits for the GPU an error."""
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("layout", ["dense", "packed", "cached"])
def test_no_pass_waits_for_the_gpu(layout: str) -> None:
    inputs = huge_inputs(3000, **LLAMA).with_grad()
    bounds, start = torch.tensor([0, 700, 700, 3000], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    options: dict[str, Any] = {
        "dense": {},
        "packed": {"cu_seqlens": bounds.cuda(), "max_seqlen": 2300},
        "cached": {"query_start": start.cuda(), "query_count": (start + 2900).cuda()},
    }[layout]
    kernels(**options)(*inputs.tensors).sum().backward()
    with no_waiting():
        kernels(**options)(*inputs.tensors).sum().backward()
        select_and_attend(inputs, options).sum().backward()


def select_and_attend(inputs: Inputs, options: dict[str, Any]) -> Tensor:
    """Return the branches one by one."""
    keywords: dict[str, Any] = {"geometry": GEOMETRY, "backend": "triton", **options}
    out, lse = compressed_attention(inputs.q, inputs.k_cmp, inputs.v_cmp, **keywords)
    indices = select_blocks(inputs.q, inputs.k_cmp, lse, **keywords)
    slc = selected_attention(inputs.q, inputs.k_slc, inputs.v_slc, indices, **keywords).out
    win: Tensor = sliding_window_attention(inputs.q, inputs.k_win, inputs.v_win, **keywords).out
    return out + slc + win


def captured(step: Callable[[], list[Tensor]]) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
    """Return a graph of `step`, and what it writes."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    return graph, results


def test_a_graph_captures_attention_over_no_block() -> None:
    inputs = inputs_of(GEOMETRY.compression_block_size - 1, **EVEN).with_grad()
    function, operands = operation_of("cmp", inputs)

    def step() -> list[Tensor]:
        out = function(*operands)
        return [out.detach(), *torch.autograd.grad(out.sum(), operands)]

    graph, results = captured(step)
    graph.replay()
    torch.cuda.synchronize()
    assert results[2].shape[1] == 0
    assert not any(x.any() for x in results)


@each_real
def test_a_graph_captures_forward_and_backward(sizes: dict[str, int]) -> None:
    static, other = huge_inputs(2050, **sizes).with_grad(), huge_inputs(2050, **sizes)
    dout = torch.randn(*static.q.shape[:3], sizes["head_dim_v"], device="cuda", dtype=torch.bfloat16)

    def step() -> list[Tensor]:
        out = kernels()(*static.tensors)
        # detached: a graph kept alive keeps the nodes of the stream that recorded it
        return [out.detach(), *torch.autograd.grad(out, static.tensors, dout)]

    graph, results = captured(step)
    with torch.no_grad():
        for index, x in enumerate(other.tensors):
            static.tensors[index].copy_(x)
    graph.replay()
    torch.cuda.synchronize()
    for replayed, eager in zip(results, step(), strict=True):
        assert torch.equal(replayed, eager)


@each_real
def test_twenty_runs_are_bit_equal(sizes: dict[str, int]) -> None:
    inputs = huge_inputs(4099, **sizes).with_grad()
    dout = torch.randn(*inputs.q.shape[:3], sizes["head_dim_v"], device="cuda", dtype=torch.bfloat16)
    first: list[Tensor] = []
    for _ in range(20):
        out = kernels()(*inputs.tensors)
        found = [out.detach(), *torch.autograd.grad(out, inputs.tensors, dout)]
        first = first or found
        assert all(torch.equal(x, y) for x, y in zip(found, first, strict=True))


def operation_of(name: str, x: Inputs, **options: Any) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    """Return an operation by the kernels, and its operands."""
    keywords: dict[str, Any] = {"geometry": GEOMETRY, "backend": "triton", **options}
    indices = chosen_blocks(x, **options)
    return {
        "nsa": (kernels(**options), x.tensors),
        "cmp": (lambda *operands: compressed_attention(*operands, **keywords).out, (x.q, x.k_cmp, x.v_cmp)),
        "slc": (lambda *operands: selected_attention(*operands, indices, **keywords).out, (x.q, x.k_slc, x.v_slc)),
        "win": (lambda *operands: sliding_window_attention(*operands, **keywords).out, (x.q, x.k_win, x.v_win)),
    }[name]


@each_real
@pytest.mark.parametrize("operands", [(1, 3, 5), (2, 4, 6)], ids=["keys", "values"])
def test_rows_without_a_gradient_give_none_whatever_their_keys_and_values_are(
    operands: tuple[int, ...], sizes: dict[str, int], extremes: Any
) -> None:
    extremes.assert_rows_without_a_gradient_give_none(inputs_of(1500, **sizes), operands, 3e38, GEOMETRY, 1117)


@pytest.mark.usefixtures("nan_buffers")
@pytest.mark.parametrize("late", ["second", "current"])
@pytest.mark.parametrize("lengths", [None, (1024, 7, 1700)], ids=["dense", "packed"])
@pytest.mark.parametrize("operation", ["nsa", "cmp", "slc", "win"])
def test_streams_wait_for_each_other(operation: str, lengths: tuple[int, ...] | None, late: str) -> None:
    inputs = inputs_of(2731, lengths=lengths, **EVEN)
    options = {} if lengths is None else {"cu_seqlens": inputs.cu_seqlens, "max_seqlen": max(lengths)}
    function, operands = operation_of(operation, inputs, **options)
    expected = evaluate(function, operands)
    leaves = [x.detach().clone().requires_grad_() for x in operands]
    weights = weights_of(expected[0])
    current = torch.cuda.current_stream()
    stream = current if late == "current" else second_stream(current)
    taken = []

    def hold_up() -> None:
        """Let the stream sleep for some 50 ms, and overwrite the memory that was given back."""
        with torch.cuda.stream(stream):
            torch.cuda._sleep(10**8)
        taken.extend(torch.full((2**power,), math.nan, device="cuda") for power in range(10, 28))

    hold_up()
    out = function(*leaves)
    hold_up()
    gradients = torch.autograd.grad((out * weights).sum(), leaves)
    hold_up()
    for ours, same in zip([out, *gradients], expected, strict=True):
        assert torch.equal(ours, same)


def test_a_failure_waits_for_the_second_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = inputs_of(2731, **EVEN)
    evaluate(kernels(), inputs.tensors)
    leaves = [x.detach().clone().requires_grad_() for x in inputs.tensors]
    out = kernels()(*leaves)
    second = second_stream(torch.cuda.current_stream())
    with torch.cuda.stream(second):
        torch.cuda._sleep(10**8)
    monkeypatch.setattr(selected, "chunks", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        out.sum().backward()
    assert not second.query(), "it sleeps still"
    event = torch.cuda.Event()
    event.record()
    event.synchronize()
    assert second.query()


def test_the_layer_trains_through_the_kernels_by_itself() -> None:
    layer = NativeSparseAttention(NSAConfig(256, 8, 2, 64, 64)).to("cuda", torch.bfloat16)
    x = torch.randn(2, 1500, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    layer(x).float().square().mean().backward()
    assert x.grad is not None
    assert bool(x.grad.isfinite().all())


@pytest.mark.parametrize("sizes", [PAPER, EVEN], ids=["P", "M"])
def test_memory_stays_within_twice_the_operands_and_gradients(sizes: dict[str, int]) -> None:
    length = 65536
    inputs = huge_inputs(length, **sizes).with_grad()
    dout = torch.randn(*inputs.q.shape[:3], sizes["head_dim_v"], device="cuda", dtype=torch.bfloat16)
    counted = 2 * (sum(x.nbytes for x in inputs.tensors) + dout.nbytes)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() - sum(x.nbytes for x in inputs.tensors) - dout.nbytes
    out = kernels()(*inputs.tensors)
    torch.autograd.grad(out, inputs.tensors, dout)
    peak = torch.cuda.max_memory_allocated() - before
    print(f"peak {peak / 2**30:.2f} GiB of {counted / 2**30:.2f} GiB operands, out and gradients: {peak / counted:.2f}x")
    assert peak <= 2 * counted


def test_scratch_grows_with_the_length_not_its_square() -> None:
    scratch = []
    for length in (16384, 65536):
        inputs = huge_inputs(length, **NARROW).with_grad()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        torch.autograd.grad(kernels()(*inputs.tensors).sum(), inputs.tensors)
        scratch.append(torch.cuda.max_memory_allocated() - before)
        del inputs
    print([f"{each / 2**20:.0f} MiB" for each in scratch])
    assert scratch[1] <= 4.2 * scratch[0] + 2**30


def test_offsets_pass_two_to_the_31() -> None:
    length = 180_000
    if torch.cuda.mem_get_info()[0] < 60 * 2**30:
        pytest.skip("needs 60 GiB of free GPU memory")
    inputs = huge_inputs(length, **PAPER)
    assert inputs.q.numel() > 2**31
    leaves = inputs.with_grad()
    out = kernels()(*leaves.tensors)
    # the last rows alone, over the same keys: small offsets in q, none in what is written
    tail = 70
    start = torch.tensor([length - tail], dtype=torch.int32, device="cuda")
    last = Inputs.of([inputs.q[:, -tail:], *inputs.tensors[1:7], inputs.gates[:, -tail:]])
    options = {"query_start": start}
    expected = composed(chosen_blocks(last, **options), **options)(*last.tensors)
    assert max_error(out[:, -tail:], expected.double()) <= allowed_error(expected, torch.bfloat16, 2**-8)
    # the gradient of the last rows reaches the first block's keys, and none of the queries before
    weights = torch.zeros_like(out)
    weights[:, -tail:] = weights_of(out[:, -tail:])
    gradients = torch.autograd.grad(out, leaves.tensors, weights)
    assert not gradients[0][:, :-tail].any()
    small = last.with_grad()
    stepped = torch.autograd.grad(kernels(**options)(*small.tensors), small.tensors, weights[:, -tail:])
    for name, whole, step in zip(NAMES[1:], gradients, stepped, strict=True):
        part = whole[:, -tail:] if whole.shape[1] != step.shape[1] else whole
        assert max_error(part, step) <= allowed_error(step, torch.bfloat16, 2**-8), name
