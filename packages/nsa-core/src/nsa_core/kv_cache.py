"""Keys and values of past tokens, per branch, for chunked prefill and decode.

The selected branch keeps every token, the sliding branch a ring of the last w (and what a rollback may need), the
compressed branch its finished blocks and a ring of the raw tokens that unfinished blocks still need. Where the branches share
their keys and values, the sliding branch reads the selected one's store and has no ring. Nothing here waits
for a GPU: lengths live on the device, and a host-side bound on them guards against overflow. The cache holds no
autograd graph.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nsa_core import blocks, checks
from nsa_core.backends.base import Keys, NewRows
from nsa_core.config import BRANCHES, NSAConfig
from nsa_core.errors import CacheOverflowError, InputError
from nsa_core.reference.append import join_rows
from nsa_core.telemetry import ReadCounter, Reads
from nsa_core.varlen import compressed_lengths

DEFAULT_MAX_ROLLBACK = 64
RINGS = ("win", "raw")
"""The stores that hold the last tokens alone."""


class Step(NamedTuple):
    """The tokens that one call of the layer appends."""

    start: Tensor
    """int32 (B,): each sequence's length before."""
    added: Tensor
    """int32 (B,): its new tokens."""
    bound: int
    """Host bound on every length afterwards."""
    in_place: bool
    """True where the rings may take the step's tokens before it attends: they replace only what a rollback might have read."""


class NSACache:
    """The past of a batch of sequences, each of its own length, for one layer."""

    def __init__(
        self,
        config: NSAConfig,
        batch_size: int,
        max_seqlen: int,
        *,
        max_rollback: int = DEFAULT_MAX_ROLLBACK,
        keep_raw: bool = False,
        count_reads: bool = True,
        num_kv_heads: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        """Allocate for `batch_size` sequences of at most `max_seqlen` tokens.

        `max_rollback`: how far `crop` may go back, in tokens; `keep_raw` keeps every raw token so that it may go back
        to the start. `count_reads`: count the tokens that each step reads, where all three branches exist. `num_kv_heads`: the KV
        heads of this rank, where tensor parallelism shares them out; None: the config's.

        Raises:
            InputError: for sizes below 1 (batch_size, max_rollback: below 0).
        """
        if batch_size < 0 or max_seqlen < 1 or max_rollback < 0:
            raise InputError(
                f"batch_size={batch_size}, max_seqlen={max_seqlen}, max_rollback={max_rollback} (at least 0, 1 and 0); use 1, 4096 and 64"
            )
        self.config = config
        self.max_seqlen = max_seqlen
        self.max_rollback = max_seqlen if keep_raw else max_rollback
        self.tail_size = config.geometry.compression_block_size - 1
        self.window_tail_size = min(config.geometry.window_size - 1, max_seqlen)
        self.keys: dict[str, Tensor] = {}
        """Stores (B, rows, G, D_k): "cmp" blocks, "slc" tokens, and the rings "win" (none where "slc" serves both) and "raw", which hold
        position p in row p % rows."""
        self.values: dict[str, Tensor] = {}
        for name, size in self._store_sizes().items():
            shape = (batch_size, size, config.num_kv_heads if num_kv_heads is None else num_kv_heads)
            self.keys[name] = torch.zeros(*shape, config.head_dim_qk, dtype=dtype, device=device)
            if name in config.branches or (name == "raw" and "cmp" in config.branches):
                self.values[name] = torch.zeros(*shape, config.head_dim_v, dtype=dtype, device=device)
        self.lengths = torch.zeros(batch_size, dtype=torch.int32, device=device)
        """int32 (B,): tokens held of each sequence."""
        self._bounds = [0] * batch_size
        self._depth = self._settled = [0] * batch_size
        # Table 4 counts all three branches, so nothing is counted of a layer with fewer
        counts = count_reads and len(config.branches) == len(BRANCHES)
        self.read_counter = ReadCounter() if counts else None
        zero = torch.zeros(batch_size, dtype=torch.int64, device=device)
        self._total_reads = Reads(zero, zero.unsqueeze(1).repeat(1, next(iter(self.keys.values())).shape[2]))

    def _store_sizes(self) -> dict[str, int]:
        """Return the tokens (blocks, for "cmp") that each store of the branches in use holds per sequence."""
        branches, longest = self.config.branches, self.max_seqlen
        sizes = {}
        if "cmp" in branches or "slc" in branches:
            sizes["cmp"] = max(blocks.num_compressed_blocks(longest, self.config.geometry), 1)
            sizes["raw"] = max(min(self.tail_size + self.max_rollback, longest), 1)
        if "slc" in branches:
            sizes["slc"] = longest
        if "win" in branches and not self._window_reads_all:
            sizes["win"] = max(min(self.window_tail_size + self.max_rollback, longest), 1)
        return sizes

    @property
    def _window_reads_all(self) -> bool:
        """Return True where the sliding branch reads the selected branch's store, which holds the same keys and values."""
        return self.config.kv == "shared" and {"slc", "win"} <= set(self.config.branches)

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the stored keys and values."""
        return next(iter(self.keys.values())).dtype

    @property
    def batch_size(self) -> int:
        """Return the number of sequences."""
        return self.lengths.shape[0]

    @property
    def num_compressed(self) -> Tensor:
        """Return int32 `(B,)`: compressed blocks emitted for each sequence; a block appears with its last token."""
        return compressed_lengths(self.lengths, self.config.geometry)

    @property
    def last_reads(self) -> Reads | None:
        """Return the tokens read in the last step, predicted `(B,)` and actual `(B, G)`; None where nothing was counted."""
        return self.read_counter.reads if self.read_counter else None

    @property
    def total_reads(self) -> Reads:
        """Return the tokens read since the cache was made, predicted `(B,)` and actual `(B, G)`."""
        return self._total_reads

    def begin_step(self, num_queries: int, query_count: Tensor | None) -> Step:
        """Return the step that appends up to `num_queries` tokens to each sequence; the lengths stay until `end_step`.

        Raises:
            CacheOverflowError: when a sequence may outgrow `max_seqlen`. A query_count on the CPU is counted exactly,
                one on the GPU is not read and counts as `num_queries`.
            InputError: for a query_count of the wrong shape or range.
        """
        if self.read_counter is not None:
            self.read_counter.reads = None
        counts = self._host_counts(num_queries, query_count)
        self._grown = [have + more for have, more in zip(self._bounds, counts, strict=True)]
        # what is not read may be 0, and then wins back nothing of what a rollback used up
        won_back = counts if query_count is None or query_count.device.type == "cpu" else [0] * self.batch_size
        self._next_depth = [max(depth - count, 0) for depth, count in zip(self._settled, won_back, strict=True)]
        bound = max([0, *self._grown])
        if bound > self.max_seqlen:
            where = self._grown.index(bound)
            raise CacheOverflowError(
                f"sequence {where} would hold {bound} tokens (the cache was built for max_seqlen={self.max_seqlen}); "
                f"build it with new_cache({self.batch_size}, {bound}) or append at most {self.max_seqlen - self._bounds[where]}"
            )
        if query_count is None:
            added = torch.full_like(self.lengths, num_queries)
        else:
            added = query_count.to(device=self.lengths.device, dtype=torch.int32, non_blocking=True)
        in_place = num_queries <= self.max_rollback or self.max_rollback >= self.max_seqlen
        if in_place:
            # until the step has ended, a rollback must not read what it replaces
            self._depth = [max(depth, settled + count) for depth, settled, count in zip(self._depth, self._settled, counts, strict=True)]
        return Step(self.lengths.clone(), added, bound, in_place)

    def new_rows(self, name: str, k: Tensor, v: Tensor | None, step: Step) -> NewRows:
        """Return a step's keys and values `(B, m, G, D)` for the store `name`."""
        store = self.keys[name]
        return NewRows(Keys(store, self.values.get(name, store), step.bound, ring=name in RINGS), k, v)

    def window(self, rows: Mapping[str, NewRows], step: Step) -> Keys | None:
        """Return the keys that the sliding branch reads of a step's `rows` by store; None without the branch.

        They are the selected branch's store where the two share it, else the ring, or a copy of its last tokens and the new ones behind them.
        """
        if "win" not in self.config.branches:
            return None
        new = rows["slc" if self._window_reads_all else "win"]
        if self._window_reads_all or step.in_place:
            return new.store
        assert new.v is not None
        most, tail = self.window_tail_size, step.start.clamp(max=self.window_tail_size)
        k, v = (join_rows(store, x, step.start - tail, tail, most) for store, x in ((new.store.k, new.k), (new.store.v, new.v)))
        return Keys(k, v, k.shape[1], first=step.start - tail)

    def end_step(self, step: Step) -> None:
        """Advance the lengths and add up the reads."""
        self.lengths += step.added
        self._bounds = self._grown
        self._depth = self._settled = self._next_depth
        if self.read_counter is not None and self.read_counter.reads is not None:
            last = self.read_counter.reads
            self._total_reads = Reads(self._total_reads.predicted + last.predicted, self._total_reads.actual + last.actual)

    def _host_counts(self, num_queries: int, query_count: Tensor | None) -> list[int]:
        if query_count is None:
            return [num_queries] * self.batch_size
        if query_count.dtype != torch.int32:
            raise InputError(f"query_count is {query_count.dtype} (kernels read int32); use query_count.to(torch.int32)")
        checks.check_shape("query_count", query_count, (self.batch_size,), "(B,)")
        if query_count.device.type != "cpu":
            return [num_queries] * self.batch_size
        counts = [int(count) for count in query_count.tolist()]
        if any(not 0 <= count <= num_queries for count in counts):
            raise InputError(f"query_count={counts} leaves 0 .. {num_queries} (the rows that x has); clip it")
        return counts

    def crop(self, num_tokens: int | Sequence[int]) -> None:
        """Forget the last `num_tokens` tokens of every sequence (an int, or one per sequence).

        Raises:
            CacheOverflowError: when crops since the tokens were last replaced go deeper than `max_rollback`, or below 0.
        """
        counts = [num_tokens] * self.batch_size if isinstance(num_tokens, int) else list(num_tokens)
        if len(counts) != self.batch_size or any(count < 0 for count in counts):
            raise InputError(f"num_tokens={num_tokens} (0 or more, one per sequence); give {self.batch_size} counts")
        for place, count in enumerate(counts):
            if count and count > min(self._bounds[place], self.max_rollback - self._depth[place]):
                raise CacheOverflowError(
                    f"sequence {place} cannot go back by {count} from {self._bounds[place]} tokens (raw tokens older than max_rollback="
                    f"{self.max_rollback} are gone); build the cache with keep_raw=True or a larger max_rollback"
                )
        self._bounds = [have - count for have, count in zip(self._bounds, counts, strict=True)]
        self._depth = self._settled = [depth + count for depth, count in zip(self._depth, counts, strict=True)]
        # a length may lie below its host bound, so the bound's check alone does not keep it from passing 0
        self.lengths -= torch.tensor(counts, dtype=torch.int32).to(self.lengths.device, non_blocking=True)
        self.lengths.clamp_(min=0)

    def _check_indices(self, indices: Tensor) -> None:
        checks.check_rank("indices", indices, 1, "(B',)")
        if indices.dtype not in (torch.int64, torch.int32):
            raise InputError(f"indices are {indices.dtype} (they name sequences); use indices.to(torch.int64)")
        outside = [place for place in indices.tolist() if not 0 <= place < self.batch_size] if indices.device.type == "cpu" else []
        if outside:
            raise InputError(f"indices name sequence {outside[0]} (the cache holds {self.batch_size}); use 0 .. {self.batch_size - 1}")

    def reorder(self, indices: Tensor) -> None:
        """Replace the sequences by those at `indices` int64 `(B',)`, in order, repeats allowed (beam search, batch select).

        Indices on the CPU keep the host bounds exact; on the GPU every sequence gets the largest.

        Raises:
            InputError: for indices that are no vector of integers or, on a CPU, leave 0 .. batch_size - 1.
        """
        self._check_indices(indices)
        chosen = indices.to(self.lengths.device)
        for stores in (self.keys, self.values):
            stores.update({name: store.index_select(0, chosen) for name, store in stores.items()})
        self.lengths = self.lengths.index_select(0, chosen)
        self._total_reads = Reads(*(reads.index_select(0, chosen) for reads in self._total_reads))
        if self.read_counter is not None:
            self.read_counter.reads = None
        if indices.device.type == "cpu":
            self._bounds = [self._bounds[place] for place in indices.tolist()]
            self._depth = self._settled = [self._depth[place] for place in indices.tolist()]
        else:
            self._bounds = [max([0, *self._bounds])] * indices.shape[0]
            self._depth = self._settled = [max([0, *self._depth])] * indices.shape[0]
