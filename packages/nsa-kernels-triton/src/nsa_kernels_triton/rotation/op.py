"""The operation ROTATE: q and the keys of a step, rotated by one launch."""

import torch
from torch import Tensor

from nsa_core.rope import RotaryEmbedding, rotate_step
from nsa_kernels_triton.launch import cdiv, has_pdl, next_power_of_2
from nsa_kernels_triton.rotation import kernels

MOST_TENSORS = 4
"""Maximum number of tensors of heads that one launch rotates."""
BLOCK_HEADS = 4
"""Heads per program. This gives enough programs for a step of one token; with fewer heads, more cosines would be computed twice."""


def rotate(heads: tuple[Tensor, ...], start: Tensor, rope: RotaryEmbedding) -> tuple[Tensor, ...]:
    """Return each of `heads` rotated; see `nsa_core.backends.base.RotateBackend`.

    A rotation of another class, or of another width, uses the reference, which reads `rope.tables`.
    """
    if type(rope) is not RotaryEmbedding or rope.dim != heads[0].shape[3]:
        return rotate_step(heads, start, rope)
    if not start.is_cuda:
        return _rotate(heads, start, rope)
    with torch.cuda.device(start.device):
        return _rotate(heads, start, rope)


def _rotate(heads: tuple[Tensor, ...], start: Tensor, rope: RotaryEmbedding) -> tuple[Tensor, ...]:
    given = [x.detach().contiguous() for x in heads]
    # not empty_like, which would keep the strides of a view; the outputs are contiguous
    found = [x.new_empty(x.shape) for x in given]
    frequencies, start = rope.kept_frequencies(start.device), start.contiguous()
    batch, num_new, _, head_dim = given[0].shape
    for first in range(0, len(given) if batch * num_new else 0, MOST_TENSORS):
        pairs = list(zip(given, found, strict=True))[first : first + MOST_TENSORS]
        sizes = [x.shape[2] for x, _ in pairs] + [0] * (MOST_TENSORS - len(pairs))
        tensors = [x for pair in pairs for x in pair] + [None] * (2 * (MOST_TENSORS - len(pairs)))
        is_dependent = has_pdl(start)
        kernels.rotate_kernel[(batch * num_new, sum(cdiv(size, BLOCK_HEADS) for size in sizes))](
            start, frequencies, *tensors, num_new, rope.attention_factor(),
            A_HEADS=sizes[0], B_HEADS=sizes[1], C_HEADS=sizes[2], D_HEADS=sizes[3],
            HALF=head_dim // 2, WIDTH=next_power_of_2(head_dim // 2), BLOCK_HEADS=BLOCK_HEADS, num_warps=4,
            PDL=is_dependent, **({"launch_pdl": True} if is_dependent else {}),
        )  # fmt: skip
    return tuple(found)
