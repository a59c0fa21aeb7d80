"""Full causal attention with the calling convention of `nsa_core.NativeSparseAttention`: the dense baseline.

It uses the fastest dense attention of the device instead of torch's default, which is half as fast on Hopper.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from nsa_core import checks
from nsa_core.attention import sliding_window_attention
from nsa_core.config import BlockGeometry, NSAConfig
from nsa_core.errors import CacheOverflowError, InputError, type_of
from nsa_core.kv_cache.cache import FIRST_CAPACITY
from nsa_core.module import HeadNorm
from nsa_core.operands import queries_of
from nsa_core.reference.causal import causal_attention
from nsa_core.rope import RotaryEmbedding
from nsa_core.varlen import positions_from_cu_seqlens, sequence_ids

FASTEST_FIRST = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
LARGEST_VARLEN_DIM = 256


class DenseCache:
    """The KV cache of one dense layer: position p of a sequence is in row p. The sequences of a batch may have different lengths."""

    def __init__(self, keys: Tensor, values: Tensor, max_seqlen: int | None = None, *, static: bool = False) -> None:
        """Start empty, with the stores `keys` and `values` `(B, rows + 1, G, D)`; invalid tokens are written into the last row.

        The stores grow by doubling up to `max_seqlen` tokens (None: no bound). A `static` cache does not grow and keeps no state on the
        host: it drops tokens that do not fit and sets a flag on the device, which `check` reads.
        """
        self.keys, self.values, self.is_static = keys, values, static
        self.max_seqlen = max_seqlen
        self.lengths = torch.zeros(len(keys), dtype=torch.int64, device=keys.device)
        """(B,): number of cached tokens of each sequence."""
        self.overflowed = torch.zeros_like(self.lengths, dtype=torch.bool)
        """(B,): the sequences of a static cache that lost tokens."""
        self.held = [0] * len(keys)
        """Upper bound on the length of each sequence, kept on the host; a static cache does not use it."""

    @property
    def bound(self) -> int:
        """Return an upper bound on all lengths, without reading them from the device."""
        return self.capacity if self.is_static else max(self.held, default=0)

    @property
    def capacity(self) -> int:
        """Return the number of tokens per sequence for which there is room."""
        return self.keys.shape[1] - 1

    @property
    def batch_size(self) -> int:
        """Return the number of sequences."""
        return self.keys.shape[0]

    @property
    def nbytes(self) -> int:
        """Return the bytes of both stores."""
        return self.keys.nbytes + self.values.nbytes

    def append(self, k: Tensor, v: Tensor, query_count: Tensor | None) -> None:
        """Append `k`, `v` `(B, S, G, D)`. Rows from `query_count` `(B,)` on are invalid and dropped. If an error is raised, nothing changes.

        Raises:
            CacheOverflowError: if a sequence of a growing cache could become longer than `max_seqlen`.
        """
        if not self.is_static:
            # counts on a GPU are not read; every row then reserves space
            self._make_room(query_count.tolist() if checks.can_read(query_count) else [k.shape[1]] * self.batch_size)
        spare, step = self.capacity, torch.arange(k.shape[1], device=k.device)
        counts = torch.full_like(self.lengths, k.shape[1]) if query_count is None else query_count.to(self.lengths).clamp(0, k.shape[1])
        fitting = torch.minimum(counts, spare - self.lengths)
        rows = torch.where(step < fitting[:, None], self.lengths[:, None] + step, spare)
        if query_count is not None:
            # NaN in an invalid row must not stay in the last row, which a later step may weight by 0
            is_row = (step < counts[:, None])[..., None, None]
            k, v = torch.where(is_row, k, 0), torch.where(is_row, v, 0)
        sequences = torch.arange(len(k), device=k.device)[:, None]
        # under autocast k and v have the autocast dtype
        self.keys[sequences, rows], self.values[sequences, rows] = k.to(self.keys.dtype), v.to(self.values.dtype)
        self.lengths.add_(fitting)
        self.overflowed.logical_or_(fitting < counts)

    def check(self) -> None:
        """Raise CacheOverflowError if a step of a static cache dropped tokens that did not fit; waits for the device."""
        if lost := self.overflowed.nonzero().flatten().tolist():
            raise CacheOverflowError(f"sequences {lost} lost tokens (a static cache never grows); reset them, or build a larger cache")

    def crop(self, num_tokens: int) -> None:
        """Remove the last `num_tokens` tokens of every sequence.

        Raises:
            CacheOverflowError: if a sequence of a static cache lost tokens, or, on a CPU, if a sequence holds fewer tokens.
            InputError: for anything but an integer of at least 0.
        """
        self.check_crop(num_tokens)
        removed = (self.lengths[:, None] - 1 - torch.arange(num_tokens, device=self.lengths.device)).clamp(min=-1)
        sequences = torch.arange(self.batch_size, device=self.lengths.device)[:, None]
        # a later step weights rows beyond a sequence by 0, and 0 times NaN is NaN; row -1 is the last one
        self.keys[sequences, removed], self.values[sequences, removed] = 0, 0
        self.lengths.sub_(num_tokens).clamp_(min=0)
        self.held = [max(0, held - num_tokens) for held in self.held]

    def check_crop(self, num_tokens: int) -> None:
        """Raise the errors that `crop(num_tokens)` would raise; nothing changes."""
        if not checks.is_size(num_tokens, 0):
            raise InputError(f"num_tokens={num_tokens!r} (the rule: an integer of at least 0, for all sequences); use 1")
        if self.is_static:
            self.check()
        if self.lengths.device.type == "cpu" and bool((self.lengths < num_tokens).any()):
            raise CacheOverflowError(f"a sequence cannot go back by {num_tokens} tokens (it has {int(self.lengths.min())}); crop fewer")

    def reset(self) -> None:
        """Empty every sequence."""
        for x in (self.keys, self.values):
            # a later step weights rows beyond a sequence by 0, and 0 times NaN is NaN
            x.zero_()
        self.lengths.zero_()
        self.overflowed.zero_()
        self.held = [0] * self.batch_size

    # a tensor made in inference mode cannot be written outside of it
    @torch.inference_mode(False)
    def reorder(self, indices: Tensor) -> None:
        """Replace the sequences by the ones at `indices` `(B',)`, in this order; an index may repeat. A static cache is reordered in place.

        Raises:
            InputError: if indices are no vector of int32 or int64, leave 0 .. batch_size - 1 (checked on a CPU), or are not B for a static cache.
        """
        checks.check_indices(indices, self.batch_size)
        if self.is_static and len(indices) != self.batch_size:
            raise InputError(f"indices name {len(indices)} sequences (a static cache keeps its {self.batch_size}); give {self.batch_size}")
        for name in ("keys", "values", "lengths", "overflowed"):
            held = getattr(self, name)
            chosen = held.index_select(0, indices.to(held.device))
            held.copy_(chosen) if self.is_static else setattr(self, name, chosen)
        # indices on a GPU are not read
        self.held = [self.held[index] for index in indices.tolist()] if checks.can_read(indices) else [self.bound] * len(indices)

    def _make_room(self, counts: list[int]) -> None:
        grown = [held + count for held, count in zip(self.held, counts, strict=True)]
        needed = max(grown, default=0)
        if self.max_seqlen is not None and needed > self.max_seqlen:
            longest = grown.index(needed)
            raise CacheOverflowError(
                f"{counts[longest]} tokens after {self.held[longest]} pass max_seqlen={self.max_seqlen} of this cache; "
                f"use new_cache with max_seqlen={needed} or more"
            )
        if needed > self.capacity:
            rows = max(needed, 2 * self.capacity)
            rows = rows if self.max_seqlen is None else min(rows, self.max_seqlen)
            with torch.inference_mode(False):
                self.keys, self.values = (nn.functional.pad(x, (0, 0, 0, 0, 0, rows - self.capacity)) for x in (self.keys, self.values))
        self.held = grown


class DenseAttention(nn.Module):
    """Full causal GQA with RoPE. It reads only the sizes, RoPE, qk_norm and qkv_bias of `config`."""

    def __init__(self, config: NSAConfig) -> None:
        checks.check_config(config)
        super().__init__()
        self.hidden_size, self.heads, self.kv_heads = config.hidden_size, config.num_heads, config.num_kv_heads
        self.dim_qk, self.dim_v = config.head_dim_qk, config.head_dim_v
        self.q_proj = nn.Linear(config.hidden_size, self.heads * self.dim_qk, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, self.kv_heads * self.dim_qk, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, self.kv_heads * self.dim_v, bias=config.qkv_bias)
        self.o_proj = nn.Linear(self.heads * self.dim_v, config.hidden_size, bias=False)
        if config.qk_norm:
            self.q_norm, self.k_norm = (HeadNorm(self.dim_qk, config.qk_norm_eps) for _ in range(2))
        self.has_norms = config.qk_norm
        self.rope = RotaryEmbedding(self.dim_qk, theta=config.rope_theta, scaling=config.rope_scaling)

    def forward(
        self,
        x: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        cache: DenseCache | None = None,
        query_count: Tensor | None = None,
    ) -> Tensor:
        """Return the attention `(B, S, hidden)` of `x` `(B, S, hidden)`; packed: B = 1 with `cu_seqlens` and the upper bound `max_seqlen`.

        With `cache`, the S tokens follow the cached tokens. The first `query_count` int32 `(B,)` of the S tokens are valid; the others give 0
        and are not cached.

        Raises:
            InputError: for cu_seqlens, max_seqlen, a cache or a query_count that do not fit x or each other.
            CacheOverflowError: if the cache is too small.
        """
        weight = self.q_proj.weight
        checks.check_hidden(x, self.hidden_size, weight)
        if cache is not None and not isinstance(cache, DenseCache):
            raise InputError(f"cache is {type_of(cache)} (the rule: a DenseCache); build it with this layer's new_cache")
        if cache is not None and cache.batch_size != x.shape[0]:
            raise InputError(
                f"the cache holds {cache.batch_size} sequences, x has {x.shape[0]}; build it with new_cache({x.shape[0]}, ...)"
            )
        if cache is not None:
            checks.check_cache_dtype(x, cache.keys.dtype, weight)
        if cu_seqlens is not None and (cache is not None or query_count is not None):
            raise InputError("cu_seqlens came with a cache or query_count (a packed batch holds whole sequences); drop one")
        if query_count is not None:
            checks.check_count(query_count, x.shape[0], x.shape[1])
        placed = queries_of(x, cu_seqlens, None if cache is not None else max_seqlen)
        q, k = self._projected(x)
        v = self.v_proj(x).unflatten(-1, (self.kv_heads, self.dim_v))
        if cache is not None:
            out = self._cached(q, k, v, cache, query_count)
        elif cu_seqlens is not None:
            out = self._packed(q, k, v, cu_seqlens, placed.max_count)
        else:
            positions = torch.arange(x.shape[1], device=x.device)
            out = fast_causal_attention(self.rope(q, positions), self.rope(k, positions), v)
        if query_count is not None:
            is_row = torch.arange(x.shape[1], device=x.device) < query_count.to(x.device, non_blocking=True).unsqueeze(1)
            out = torch.where(is_row[..., None, None], out, 0)
        result: Tensor = self.o_proj(out.flatten(-2))
        return result

    @property
    def num_heads(self) -> int:
        """Return H."""
        return self.heads

    def queries_keys(self, x: Tensor, *, cu_seqlens: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the rotated queries `(B, S, H, D_k)` and keys `(B, S, G, D_k)` of a pass over x `(B, S, hidden)` without a cache."""
        total = x.shape[1]
        positions = torch.arange(total, device=x.device) if cu_seqlens is None else positions_from_cu_seqlens(cu_seqlens, total)
        q, k = self._projected(x)
        return self.rope(q, positions), self.rope(k, positions)

    def _projected(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return q and k before RoPE."""
        q = self.q_proj(x).unflatten(-1, (self.heads, self.dim_qk))
        k = self.k_proj(x).unflatten(-1, (self.kv_heads, self.dim_qk))
        return (self.q_norm(q), self.k_norm(k)) if self.has_norms else (q, k)

    def new_cache(
        self,
        batch_size: int,
        max_seqlen: int | None = None,
        *,
        static: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        **_: Any,
    ) -> DenseCache:
        """Return an empty `DenseCache` for sequences of at most `max_seqlen` tokens (None: no bound).

        Other options of `NativeSparseAttention.new_cache` are ignored. `dtype` and `device` None: those of the weights.

        Raises:
            InputError: for sizes that are no integers or too small, and for a static cache without a bound.
        """
        if not checks.is_size(batch_size, 0) or not (max_seqlen is None or checks.is_size(max_seqlen, 1)):
            raise InputError(f"batch_size={batch_size}, max_seqlen={max_seqlen} (integers of at least 0 and 1); use 1 and 4096")
        if static and max_seqlen is None:
            raise InputError("max_seqlen=None with static=True (a static cache is allocated once, whole); use max_seqlen=4096")
        rows = FIRST_CAPACITY if max_seqlen is None else max_seqlen if static else min(max_seqlen, FIRST_CAPACITY)
        # torch.zeros, not weight.new_zeros: under FSDP the weight is a shard
        weight = self.k_proj.weight
        shape = batch_size, rows + 1, self.kv_heads
        with torch.inference_mode(False):
            keys, values = (
                torch.zeros(*shape, dim, dtype=weight.dtype if dtype is None else dtype, device=weight.device if device is None else device)
                for dim in (self.dim_qk, self.dim_v)
            )
            return DenseCache(keys, values, max_seqlen, static=static)

    def _packed(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
        total, count = q.shape[1], cu_seqlens.shape[0] - 1
        positions = positions_from_cu_seqlens(cu_seqlens, total)
        q, k, v = self.rope(q, positions)[0], self.rope(k, positions)[0], v[0]
        if count * max_seqlen == total:
            # all sequences have the length max_seqlen, so they already form a batch
            rows = (count, max_seqlen)
            return fast_causal_attention(*(x.unflatten(0, rows) for x in (q, k, v))).flatten(0, 1).unsqueeze(0)
        if has_varlen_attention(q, v):
            from nsa_core.varlen_attention import varlen_causal_attention

            return varlen_causal_attention(q, k, v, cu_seqlens, max_seqlen).unsqueeze(0)
        return self._padded(q, k, v, positions, cu_seqlens, max_seqlen).unsqueeze(0)

    def _padded(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
        """Return causal attention of packed rows by a padded batch `(N, max_seqlen, ...)`."""
        total = len(q)
        within = torch.arange(max_seqlen, device=q.device)
        rows = (cu_seqlens[:-1, None].long() + within).clamp(max=total - 1)
        # rows after a sequence's end hold tokens of the next sequence; the causal mask hides them
        out = fast_causal_attention(*(x[rows] for x in (q, k, v)))
        return out[sequence_ids(cu_seqlens, total), positions]

    @torch.no_grad()
    def _cached(self, q: Tensor, k: Tensor, v: Tensor, cache: DenseCache, query_count: Tensor | None) -> Tensor:
        # appending changes the lengths in place
        start = cache.lengths.clone()
        positions = start[:, None] + torch.arange(q.shape[1], device=q.device)
        cache.append(self.rope(k, positions), v, query_count)
        # at least one row, even if nothing is cached
        bound = max(1, cache.bound)
        keys, values = cache.keys[:, :bound], cache.values[:, :bound]
        if q.shape[1] > 1:
            # torch's fast kernels take no mask, and the others would store all scores
            whole = BlockGeometry(window_size=bound)
            # a static cache drops rows that do not fit, and they give 0
            counts = (cache.lengths - start).int() if cache.is_static or query_count is not None else None
            q = self.rope(q, positions)
            return sliding_window_attention(q, keys, values, geometry=whole, query_start=start.int(), query_count=counts).out
        visible = torch.arange(bound, device=q.device) <= positions[..., None]
        out = nn.functional.scaled_dot_product_attention(
            self.rope(q, positions).transpose(1, 2),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            attn_mask=visible[:, None],
            enable_gqa=True,
        )
        return out.transpose(1, 2)


def fast_causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return causal attention `(B, S, H, D_v)` of q `(B, S, H, D_k)`, k `(B, S, G, D_k)`, v `(B, S, G, D_v)`."""
    if q.device.type != "cuda":
        return causal_attention(q, k, v)
    with sdpa_kernel(FASTEST_FIRST, set_priority=True):
        return causal_attention(q, k, v)


def has_varlen_attention(q: Tensor, v: Tensor) -> bool:
    """Return True if `varlen_attention.varlen_causal_attention` can serve packed q `(total, H, D_k)` and v `(total, G, D_v)`."""
    is_half = q.dtype in (torch.bfloat16, torch.float16)
    return q.device.type == "cuda" and is_half and q.shape[-1] == v.shape[-1] <= LARGEST_VARLEN_DIM
