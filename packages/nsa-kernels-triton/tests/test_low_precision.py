"""bfloat16 and float16 against torch's flash attention: at most twice its error, plus 2^-8.

Flash attention rounds the weights to the operands' dtype for the second product and takes the backward's row sums from a
rounded out; torch's MATH attention does neither. So these tests compare with flash attention.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention

from nsa_core import compressed_attention, nsa_attention, selected_attention, sliding_window_attention
from nsa_core.reference import naive
from nsa_core.testing import masks
from nsa_core.testing.inputs import SMALL, Shape, make_inputs, random_block_indices
from nsa_core.testing.tolerances import allowed_error, max_error

pytestmark = [pytest.mark.usefixtures("nan_buffers"), pytest.mark.filterwarnings("ignore:.*against policy.*")]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = {
    "small": Shape(num_queries=61, num_heads=6, num_kv_heads=2, head_dim_qk=16, head_dim_v=16),
    "wide": Shape(num_queries=40, num_heads=4, num_kv_heads=1, head_dim_qk=64, head_dim_v=64),
}


def flash_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Return torch's flash attention under `mask`, bool (B, S, G, T); rows that see nothing give 0."""
    mask = mask.to(q.device)
    sees = mask.any(-1, keepdim=True)
    attend = flash_on_a_gpu if q.is_cuda else flash_on_a_cpu
    return torch.where(sees.repeat_interleave(q.shape[2] // k.shape[2], 2), attend(q, k, v, mask | ~sees), 0)


def flash_on_a_cpu(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    heads_per_group = q.shape[2] // k.shape[2]
    mask = mask.repeat_interleave(heads_per_group, 2).transpose(1, 2)
    bias = torch.zeros(mask.shape, dtype=q.dtype).masked_fill(~mask, float("-inf"))
    keys, values = (x.repeat_interleave(heads_per_group, 2).transpose(1, 2) for x in (k, v))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return scaled_dot_product_attention(q.transpose(1, 2), keys, values, attn_mask=bias).transpose(1, 2)


def flash_on_a_gpu(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Flash attention takes no mask on a GPU: each row of a group becomes a sequence of one query, over copies of the keys that it sees."""
    num_groups = k.shape[2]
    queries = q.unflatten(2, (num_groups, -1))
    seen = mask.flatten(0, 2)
    row, key = seen.nonzero(as_tuple=True)
    batch, group = row // (q.shape[1] * num_groups), row % num_groups
    # the gradients of a key's copies are summed in float32, as a kernel sums those of its queries
    keys, values = (x.float()[batch, key, group].to(x.dtype).unsqueeze(1).expand(-1, queries.shape[3], -1) for x in (k, v))
    starts = torch.arange(seen.shape[0] + 1, dtype=torch.int32, device=q.device)
    counts = seen.sum(1)
    ends = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    out = varlen_attn(queries.flatten(0, 2), keys.contiguous(), values.contiguous(), starts, ends, 1, int(counts.max()))
    assert isinstance(out, Tensor)
    return out.view(*q.shape[:3], -1)


def mask_of(branch: str, shape: Shape, indices: Tensor) -> Tensor:
    """Return which keys each query sees, bool (B, S, G, T)."""
    if branch == "cmp":
        mask = masks.compressed_mask(shape.total, shape.num_blocks, shape.geometry)
    elif branch == "win":
        mask = masks.window_mask(shape.total, shape.geometry)
    else:
        block = torch.arange(shape.total) // shape.geometry.selection_block_size
        causal = torch.arange(shape.total) <= torch.arange(shape.total).unsqueeze(1)
        return (indices.cpu().unsqueeze(-1) == block).any(3) & causal[None, :, None]
    return mask[None, :, None].expand(1, -1, shape.num_kv_heads, -1)


def evaluate(function: Callable[..., Any], operands: tuple[Tensor, ...]) -> list[Tensor]:
    """Return out and the gradients of the operands."""
    leaves = [x.detach().clone().requires_grad_() for x in operands]
    out = function(*leaves)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(7)).to(torch.bfloat16).to(out)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), leaves)]


def evaluate_torchs(function: Callable[..., Any], operands: tuple[Tensor, ...]) -> list[Tensor]:
    """Return what `evaluate` does; torch's backward on a GPU has no fixed order, which `nan_buffers` would refuse."""
    torch.use_deterministic_algorithms(False)
    found = evaluate(function, operands)
    torch.use_deterministic_algorithms(True)
    return found


def assert_within_twice_torchs_error(ours: list[Tensor], flash: list[Tensor], exact: list[Tensor]) -> None:
    for index, (x, yardstick, truth) in enumerate(zip(ours, flash, exact, strict=True)):
        error, limit = max_error(x, truth), allowed_error(truth, x.dtype, max_error(yardstick, truth))
        assert error <= limit, f"{'gradient ' + str(index - 1) if index else 'out'} is off by {error:.2e} (allowed: {limit:.2e})"


@pytest.mark.parametrize(
    ("factor", "key_factor"),
    [(1, 1), pytest.param(50, 1, marks=pytest.mark.slow), pytest.param(100, 100, marks=pytest.mark.slow), (300, 300)],
    ids=["", "q x 50", "q, k x 100", "q, k x 300"],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("branch", ["cmp", "slc", "win"])
def test_a_branch_is_as_exact_as_torchs_flash_attention(
    branch: str, shape: Shape, dtype: torch.dtype, factor: int, key_factor: int
) -> None:
    assert_as_exact_as_flash(branch, shape, dtype, factor, key_factor)


def assert_as_exact_as_flash(branch: str, shape: Shape, dtype: torch.dtype, factor: int, key_factor: int) -> None:
    """Assert that out and gradients of a branch, of q and keys times factors, have at most twice the error of flash attention."""
    geometry = shape.geometry
    inputs = make_inputs(shape, device=DEVICE)
    keys = {name: key_factor * getattr(inputs, name) for name in ("k_cmp", "k_slc", "k_win")}
    inputs = inputs._replace(q=factor * inputs.q, **keys).to(dtype)
    indices = random_block_indices(shape, holes=True, device=DEVICE)
    k, v = {"cmp": inputs[1:3], "slc": inputs[3:5], "win": inputs[5:7]}[branch]
    extra: tuple[Tensor, ...] = (indices,) if branch == "slc" else ()
    operation, oracle = {
        "cmp": (compressed_attention, naive.compressed_attention),
        "slc": (selected_attention, naive.selected_attention),
        "win": (sliding_window_attention, naive.sliding_window_attention),
    }[branch]
    mask = mask_of(branch, shape, indices)
    ours = evaluate(lambda q, k, v: operation(q, k, v, *extra, geometry=geometry, backend="triton").out, (inputs.q, k, v))
    flash = evaluate_torchs(lambda q, k, v: flash_attention(q, k, v, mask), (inputs.q, k, v))
    exact = evaluate(lambda q, k, v: oracle(q, k, v, *extra, geometry=geometry).out, (inputs.q.double(), k.double(), v.double()))
    assert_within_twice_torchs_error(ours, flash, exact)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_the_whole_is_as_exact_as_torchs_flash_attention(dtype: torch.dtype) -> None:
    # every candidate block is chosen, so that no near tie decides anything
    shape = Shape(num_queries=32, num_heads=6, num_kv_heads=2, head_dim_qk=16, head_dim_v=16)
    inputs = make_inputs(shape, device=DEVICE).to(dtype)
    every = torch.arange(4, dtype=torch.int32).expand(1, 32, 2, 4)
    branches = [mask_of(branch, shape, every) for branch in ("cmp", "slc", "win")]

    def torchs(q: Tensor, *rest: Tensor) -> Tensor:
        outs = [flash_attention(q, *rest[2 * i : 2 * i + 2], mask) for i, mask in enumerate(branches)]
        gates = rest[6]
        return sum(out * gates[..., i, None] for i, out in enumerate(outs))  # type: ignore[return-value]

    ours = evaluate(lambda *x: nsa_attention(*x, geometry=SMALL, backend="triton"), inputs.tensors)
    exact = evaluate(lambda *x: naive.nsa_attention(*x, geometry=SMALL), inputs.to(torch.float64).tensors)
    assert_within_twice_torchs_error(ours, evaluate_torchs(torchs, inputs.tensors), exact)


def test_a_gradient_that_many_queries_share_is_summed_in_float32() -> None:
    length, first_reader, slope = 600, 8, 1 + 2**-7
    q, k, v = (torch.zeros(1, length, 1, 16, dtype=torch.bfloat16, device=DEVICE) for _ in range(3))
    v.requires_grad_()
    indices = torch.full((1, length, 1, SMALL.num_selected_blocks), -1, dtype=torch.int32, device=DEVICE)
    indices[:, first_reader:, :, 0] = 0
    out = selected_attention(q, k, v, indices, geometry=SMALL, backend="triton").out
    out.backward(torch.full_like(out, slope))
    assert v.grad is not None
    # every reader gives an eighth of its slope to each of the block's 8 tokens; a running sum in bfloat16 would end at 74
    expected = torch.tensor((length - first_reader) / 8 * slope, dtype=torch.bfloat16, device=DEVICE)
    assert torch.equal(v.grad[0, :8, 0], expected.expand(8, 16))
    assert not v.grad[0, 8:].any()
