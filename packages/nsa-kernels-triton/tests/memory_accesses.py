"""Small runs of every operation for compute-sanitizer: `python memory_accesses.py [planted]`.

No size is a multiple of a tile, so that every mask is at work. `planted` writes past the end of a tensor instead.
"""

import sys
import warnings

import torch
import triton
import triton.language as tl

from nsa_core import Operation, compressed_attention, nsa_attention, select_blocks, selected_attention, sliding_window_attention
from nsa_core.testing.inputs import SMALL, Shape, make_inputs, random_block_indices

SHAPES = [
    Shape(num_queries=37, batch=3, num_heads=3, num_kv_heads=1, head_dim_qk=24, head_dim_v=40),
    Shape(lengths=(19, 0, 1, 35), num_heads=6, num_kv_heads=2, head_dim_qk=16, head_dim_v=16),
]


def run_every_operation(shape: Shape, dtype: torch.dtype) -> None:
    inputs = make_inputs(shape, device="cuda").to(dtype).with_grad()
    indices = random_block_indices(shape, device="cuda")
    one_by_one = dict.fromkeys((operation.value for operation in Operation if operation is not Operation.NSA), "triton")
    options = {"geometry": SMALL, "cu_seqlens": inputs.cu_seqlens, "max_seqlen": max(shape.lengths or (shape.num_queries,))}
    compressed = compressed_attention(inputs.q, inputs.k_cmp, inputs.v_cmp, backend="triton", **options)
    select_blocks(inputs.q, inputs.k_cmp, compressed.lse, backend="triton", **options)
    selected = selected_attention(inputs.q, inputs.k_slc, inputs.v_slc, indices, backend="triton", **options)
    window = sliding_window_attention(inputs.q, inputs.k_win, inputs.v_win, backend="triton", **options)
    for result in (compressed, selected, window):
        # with and without a gradient of lse
        result.out.sum().backward(retain_graph=True)
        (result.out.sum() + torch.where(result.lse == float("-inf"), 0, result.lse).sum()).backward()
    for backend in ("triton", one_by_one):
        nsa_attention(*inputs.tensors, backend=backend, **options).sum().backward()
    torch.cuda.synchronize()


@triton.jit
def write_past_the_end(x_ptr, BLOCK: tl.constexpr):
    """Write BLOCK numbers, past the end of x."""
    tl.store(x_ptr + tl.arange(0, BLOCK), 1.0)


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message=".*against policy.*")
    if sys.argv[1:] == ["planted"]:
        write_past_the_end[(1,)](torch.zeros(111, device="cuda"), BLOCK=128)
        torch.cuda.synchronize()
    else:
        for shape in SHAPES:
            for dtype in (torch.float32, torch.bfloat16):
                run_every_operation(shape, dtype)
