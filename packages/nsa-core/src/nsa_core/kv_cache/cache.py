"""NSACache: the KV cache of one layer.

The selected branch stores every token. The sliding branch has a ring buffer of the last w - 1 + max_rollback tokens. The compressed branch
stores its finished blocks, and a ring buffer of the last l - 1 + max_rollback raw tokens, which unfinished blocks still need. With shared keys
and values, the sliding branch reads the selected branch's store and has no ring buffer. Lengths live on the device, so no step waits for a
GPU. The cache holds no autograd graph.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nsa_core import blocks, checks
from nsa_core.backends.base import Keys, NewRows
from nsa_core.config import BRANCHES, NSAConfig
from nsa_core.errors import InputError, type_of
from nsa_core.kv_cache.bounds import DeviceBounds, HostBounds
from nsa_core.kv_cache.options import DEFAULTS, CacheOptions
from nsa_core.kv_cache.pages import PageTable
from nsa_core.kv_cache.step_graphs import StepGraphs
from nsa_core.kv_cache.stores import StoreOptions, Stores
from nsa_core.reference.append import join_rows
from nsa_core.telemetry import ReadCounter, Reads
from nsa_core.varlen import compressed_lengths

FIRST_CAPACITY = 1024
"""Initial capacity of a growing cache, in tokens per sequence, unless its bound is lower."""
UNLIMITED = 2**31 - 1
"""Maximum length of a sequence: positions are int32."""
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
MAX_FORMS = 64
"""Maximum number of entries of `NSACache.known_forms`."""


class Step(NamedTuple):
    """The tokens that one call of the layer appends."""

    start: Tensor
    """int32 (B,): length of each sequence before the step."""
    added: Tensor
    """int32 (B,): number of new tokens of each sequence."""
    in_place: bool
    """True if the step's tokens are written into the rings before attention: they replace only rows that are kept for a rollback."""


class NSACache:
    """The KV cache of one layer for a batch of sequences, with separate lengths."""

    def __init__(
        self,
        config: NSAConfig,
        batch_size: int,
        max_seqlen: int | None = None,
        options: CacheOptions = DEFAULTS,
        *,
        num_kv_heads: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        """Allocate a cache for `batch_size` sequences of at most `max_seqlen` tokens (None: no bound).

        `num_kv_heads`: with tensor parallelism, the number of KV heads of this rank; None: the config's. `dtype`: the dtype in which keys and
        values are computed.

        Raises:
            InputError: for sizes that are not integers or below 1 (batch_size, max_rollback: below 0), a static or paged cache without a bound,
                a page that does not hold whole selection blocks, a dtype that no keys are computed in, an unknown kv_dtype, or step_graphs of a
                cache that is not static or not on a GPU.
        """
        checks.check_config(config)
        if not isinstance(options, CacheOptions):
            raise InputError(f"options={options!r} is {type_of(options)} (the rule: CacheOptions); use CacheOptions(static=True)")
        options.check(batch_size, max_seqlen, device)
        checks.check_dtype(dtype)
        self.config = config
        self.max_seqlen = UNLIMITED if max_seqlen is None else max_seqlen
        self.max_rollback = UNLIMITED if options.keep_raw else options.max_rollback
        heads = config.num_kv_heads if num_kv_heads is None else num_kv_heads
        if not checks.is_size(heads, 1):
            raise InputError(f"num_kv_heads={heads!r} (an integer of at least 1); use {config.num_kv_heads}")
        capacity = self.max_seqlen if options.is_fixed else min(self.max_seqlen, FIRST_CAPACITY)
        # a separate bool: comparing capacities would recompile a compiled step for each capacity
        self.can_grow = capacity < self.max_seqlen
        # a tensor made in inference mode cannot be written outside of it
        with torch.inference_mode(False):
            self.pages = None if options.page_size is None else self._page_table(batch_size, options.page_size, options.num_pages, device)
            """The pages of a paged cache, else None."""
            self.stores = Stores(
                config, batch_size, heads, StoreOptions(capacity, self.max_rollback, dtype, options.kv_dtype, self.pages), device
            )
            self.lengths = torch.zeros(batch_size, dtype=torch.int32, device=device)
            """int32 (B,): number of cached tokens of each sequence."""
            self.bounds: DeviceBounds | HostBounds = (
                DeviceBounds(self.lengths, self.max_seqlen) if options.static else HostBounds(batch_size)
            )
            self._last_reads, self._total_reads = (torch.zeros(batch_size, 1 + heads, dtype=torch.int64, device=device) for _ in range(2))
            """int64 (B, 1 + G): the predicted reads of each sequence, then the actual reads of each KV head."""
        self.known_forms: set[tuple[torch.Size, torch.dtype, bool]] = set()
        """Forms of steps that passed the checks: q's shape and dtype, and `Step.in_place`. Cleared when stores are replaced."""
        # Table 4 counts all three branches; a layer with fewer counts nothing
        counts = options.count_reads and len(config.branches) == len(BRANCHES)
        self.read_counter = ReadCounter() if counts else None
        self.graphs = StepGraphs(may_fail=options.step_graphs is None) if options.captures(device) else None
        """The captured steps of a cache with `step_graphs`; None for other caches. Steps of up to 16 rows per sequence under `no_grad` or
        `inference_mode` are captured. The first step of a kind (shape and dtype of x, with or without `query_count`, stream) runs eagerly. The
        second one is captured, which waits for the GPU, and replayed; later ones are replayed."""

    def note_form(self, form: tuple[torch.Size, torch.dtype, bool]) -> None:
        """Add `form` to `known_forms`: a step of this form passed the checks."""
        if len(self.known_forms) >= MAX_FORMS:
            self.known_forms.clear()
        self.known_forms.add(form)

    def _page_table(self, batch_size: int, page_size: int, num_pages: int | None, device: torch.device | str) -> PageTable:
        if not (checks.is_size(page_size, 1) and (num_pages is None or checks.is_size(num_pages, 1))):
            raise InputError(f"page_size={page_size}, num_pages={num_pages} (integers of at least 1); use 64 and None")
        enough = batch_size * -(-self.max_seqlen // page_size)
        return PageTable(batch_size, self.max_seqlen, enough if num_pages is None else num_pages, page_size, device)

    @property
    def is_static(self) -> bool:
        """Return True if the cache keeps no state on the host and changes its tensors only in place."""
        return isinstance(self.bounds, DeviceBounds)

    @property
    def keys(self) -> dict[str, Tensor]:
        """Return the stores of keys: "cmp", "slc" and the rings "win" and "raw", each `(B, rows, G, D_k)`.

        In a paged cache, "cmp" and "slc" are `(pages + 1, rows of a page, G, D_k)`.
        """
        return self.stores.keys

    @property
    def values(self) -> dict[str, Tensor]:
        """Return the stores of values `(B, rows, G, D_v)` under the same names; a store without values is missing."""
        return self.stores.values

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype in which keys and values are computed."""
        return self.stores.dtype

    @property
    def nbytes(self) -> int:
        """Return the bytes of all stores, scales included."""
        return self.stores.nbytes

    @property
    def bytes_per_token(self) -> float:
        """Return the bytes that each additional token of a sequence needs, including its share of a compressed block; rings do not count."""
        return self.stores.bytes_per_token

    @property
    def batch_size(self) -> int:
        """Return the number of sequences."""
        return self.lengths.shape[0]

    @property
    def num_compressed(self) -> Tensor:
        """Return int32 `(B,)`: the number of compressed blocks of each sequence. A block exists once its last token is cached."""
        return compressed_lengths(self.lengths, self.config.geometry)

    @property
    def last_reads(self) -> Reads | None:
        """Return the number of keys that one KV head read in the last step, predicted `(B,)` and actual `(B, G)`; None if nothing was counted.

        The tensors are copies. A static cache keeps no state on the host: it returns the counts of the last step that had tokens, or zeros
        before the first one.
        """
        if self.read_counter is None or (self.read_counter.reads is None and not self.is_static):
            return None
        return _reads_of(self._last_reads)

    @property
    def total_reads(self) -> Reads:
        """Return the number of keys that one KV head read since its sequence began, predicted `(B,)` and actual `(B, G)`, as copies."""
        return _reads_of(self._total_reads)

    def check(self) -> None:
        """Raise CacheOverflowError if a step of a static cache dropped tokens that did not fit; waits for the device.

        A growing cache raises in the step itself, so it never raises here.
        """
        if lost := self.bounds.lost():
            raise lost

    def begin_step(self, num_queries: int, query_count: Tensor | None) -> Step:
        """Return the step that appends up to `num_queries` tokens to each sequence; `end_step` then advances the lengths.

        A static cache stores the tokens that fit, and sets the sequence's overflow flag if some do not. The host reads no tensor of the device.

        Raises:
            CacheOverflowError: if a sequence of a growing cache may become longer than `max_seqlen`, or if its pages have no room. A query_count
                on a GPU is not read; every count is then taken as `num_queries`.
            InputError: for a query_count of the wrong shape or range, or if a CUDA graph captures a step of a cache that grows.
        """
        self.check_count(num_queries, query_count)
        count = None if query_count is None else query_count.to(device=self.lengths.device, dtype=torch.int32, non_blocking=True)
        in_place = num_queries <= self.max_rollback or self.max_rollback >= self.max_seqlen
        # the host cannot check a count on a GPU, so it is clamped
        wanted = None if count is None else count.clamp(0, num_queries)
        if isinstance(self.bounds, DeviceBounds):
            limit = None if self.pages is None else self.pages.limits(self.lengths, self.config.geometry)
            added = self.bounds.begin(num_queries if wanted is None else wanted, limit, in_place=in_place)
        else:
            added = torch.full_like(self.lengths, num_queries) if wanted is None else wanted
            if self.pages is None and torch.compiler.is_compiling() and not self.can_grow:
                # the stores cannot grow any more, so the graph need not end
                self.bounds.begin(num_queries, query_count, in_place=in_place, max_seqlen=self.max_seqlen)
            else:
                # imported here because it loads torch's compiler, which only a step needs
                from nsa_core.kv_cache.growth import make_room

                make_room(self, num_queries, query_count, in_place)
        if self.read_counter is not None:
            # a step that was refused keeps the reads of the one before
            self.read_counter.forget()
        return Step(self.lengths.clone(), added, in_place)

    def new_rows(self, name: str, k: Tensor, v: Tensor | None) -> NewRows:
        """Return a step's keys and values `(B, m, G, D)` for the store `name`."""
        return NewRows(self.stores.keys_of(name), k, v)

    def window(self, rows: Mapping[str, NewRows], step: Step) -> Keys | None:
        """Return the keys that the sliding branch reads in a step; None if the layer has no sliding branch. `rows`: store name -> the step's rows.

        The keys are the selected branch's store if the two branches share it. Else an in-place step reads the ring itself, and any other
        step reads a copy of the ring's last tokens followed by the new tokens.
        """
        if "win" not in self.config.branches:
            return None
        new = rows["slc" if self.stores.window_reads_all else "win"]
        if self.stores.window_reads_all or step.in_place:
            return new.store
        most = min(self.config.geometry.window_size - 1, self.stores.capacity)
        tail = step.start.clamp(max=most)
        k, v, *scales = join_rows(new, step.start - tail, tail, most)
        if scales:
            k, v = k.view(new.store.k.dtype), v.view(new.store.v.dtype)
        k_scale, v_scale = scales or (None, None)
        return Keys(k, v, k.shape[1], first=step.start - tail, k_scale=k_scale, v_scale=v_scale)

    def reserve(self, sequence: int, num_tokens: int, *, length: int) -> None:
        """Reserve pages for a sequence of `length` tokens, so that it has room for `num_tokens` tokens in total.

        Copy on write: shared pages that a later step would write are copied now. These are the pages with tokens from `length` on, and those
        with blocks that are not complete. The caller passes the length, so nothing waits for a GPU.

        Raises:
            CacheOverflowError: if too few pages are free, or `num_tokens` is above `max_seqlen`. Nothing changes then.
            InputError: for a cache without pages, a sequence that it does not hold, or numbers that are below 0 or not integers.
        """
        if self.pages is None:
            raise InputError("the cache has no pages to reserve (it was built without page_size); use new_cache(..., page_size=64)")
        if not (checks.is_size(num_tokens, 0) and checks.is_size(length, 0)):
            raise InputError(
                f"num_tokens={num_tokens!r}, length={length!r} (integers of at least 0); use what the sequence will hold, and holds"
            )
        geometry = self.config.geometry
        first_open = blocks.num_compressed_blocks(length, geometry) * geometry.compression_stride
        copies = self.pages.own(sequence, first_open // self.pages.page_size, max(num_tokens, length))
        self.stores.copy_pages(copies)

    def end_step(self, step: Step) -> None:
        """Advance the lengths, and add the step's reads to the totals."""
        self.lengths.add_(step.added)
        if not (self.is_static and step.in_place):
            self.bounds.end()
        reads = None if self.read_counter is None else self.read_counter.reads
        if reads is not None:
            predicted, actual = reads
            torch.cat([predicted.unsqueeze(1), actual], 1, out=self._last_reads)
            self._total_reads.add_(self._last_reads)

    def check_count(self, num_queries: int, query_count: Tensor | None) -> None:
        """Raise InputError if query_count has the wrong shape, or, on a CPU, a value outside 0 .. num_queries."""
        if query_count is not None:
            checks.check_count(query_count, self.batch_size, num_queries)

    def crop(self, num_tokens: int | Sequence[int] | Tensor) -> None:
        """Remove the last `num_tokens` tokens of every sequence. `num_tokens` is one number for all, or integers `(B,)`, one per sequence.

        A static cache waits for its device here, and so does a call with counts on a GPU. If an error is raised, nothing changes.

        Raises:
            CacheOverflowError: for more tokens than a sequence holds; for more than `max_rollback`, where tokens of earlier crops count too
                until new tokens replace them; also if a sequence of a static cache lost tokens.
            InputError: for anything but integers of at least 0, one for all or one per sequence.
        """
        counts = self.check_crop(num_tokens)
        self.bounds.crop(counts)
        # the check compared counts with an upper bound, so a length could become negative without the clamp
        self.lengths.sub_(counts.to(self.lengths.device, torch.int32, non_blocking=True)).clamp_(min=0)

    def check_crop(self, num_tokens: int | Sequence[int] | Tensor) -> Tensor:
        """Return how many tokens `crop(num_tokens)` would remove, int64 `(B,)`, or raise the errors that it would raise. Nothing changes."""
        try:
            counts = num_tokens if isinstance(num_tokens, Tensor) else torch.tensor(num_tokens, device="cpu")
        except (TypeError, ValueError, RuntimeError):
            # -1 is refused below
            counts = torch.tensor(-1, device="cpu")
        counts = counts.expand(self.batch_size) if not counts.dim() else counts
        # torch makes a float tensor of an empty list, so its dtype is not checked
        is_counted = counts.dtype in INTEGERS or not (counts.numel() or isinstance(num_tokens, Tensor))
        if counts.shape != (self.batch_size,) or not is_counted or bool((counts < 0).any()):
            shown = num_tokens.tolist() if isinstance(num_tokens, Tensor) else num_tokens
            raise InputError(f"num_tokens={shown} (0 or more, one per sequence); give {self.batch_size} counts")
        counts = counts.long()
        self.bounds.check_crop(counts, self.max_rollback)
        return counts

    def reset(self, indices: Tensor | None = None) -> None:
        """Empty the sequences at `indices` (None: all), so that new ones may begin there.

        Raises:
            CacheOverflowError: if one of them had lost tokens; the sequences are emptied nevertheless. Only a static cache raises it, and it
                waits for its device.
            InputError: for indices that `reorder` refuses.
        """
        chosen = None if indices is None else self._checked(indices)
        lost = self.bounds.lost(chosen)
        # a cache that grows reads indices on the host alone
        self.bounds.reset(chosen if self.is_static else indices)
        for x in (self.lengths, self._last_reads, self._total_reads):
            x.zero_() if chosen is None else x.index_fill_(0, chosen, 0)
        if lost:
            raise lost

    def reorder(self, indices: Tensor) -> None:
        """Replace the sequences by the ones at `indices` `(B',)`, in this order; an index may repeat (beam search).

        A static cache is reordered in place, with B' = B. In a growing cache B' may be any number. Pass its indices on the CPU: the host does
        not read indices on a GPU, and every sequence then gets the largest host bound.

        Raises:
            InputError: for indices that are not a vector of int32 or int64, or that lie outside 0 .. batch_size - 1 (checked on a CPU); in a
                static cache, for B' other than B; in a paged cache, for indices on a GPU.
        """
        chosen = self._checked(indices)
        if self.is_static and chosen.shape[0] != self.batch_size:
            raise InputError(
                f"indices name {chosen.shape[0]} sequences (a static cache keeps its {self.batch_size}); "
                f"give {self.batch_size}, or use select(indices)"
            )
        self._reorder(indices, chosen, self._sources(indices))

    def select(self, indices: Tensor) -> None:
        """Keep only the sequences at `indices` `(B',)`, in order. A static cache keeps its batch size; the other slots are empty.

        Raises:
            CacheOverflowError: if a sequence of a static cache lost tokens; a static cache waits for its device to check this.
            InputError: as in `reorder`, but a static cache takes up to B indices.
        """
        chosen = self._checked(indices)
        spare = self.batch_size - chosen.shape[0]
        if not self.is_static:
            self._reorder(indices, chosen, self._sources(indices))
            return
        if spare < 0:
            raise InputError(
                f"indices name {chosen.shape[0]} sequences (a static cache keeps its {self.batch_size}); give as many or fewer"
            )
        self.check()
        padded = torch.nn.functional.pad(chosen, (0, spare))
        self._reorder(padded, padded, [*self._sources(indices), *[None] * spare])
        if spare:
            self.reset(torch.arange(self.batch_size - spare, self.batch_size, device=self.lengths.device))

    def _sources(self, indices: Tensor) -> list[int | None]:
        """Return the indices as a list of the page table's sequences; an empty list without pages."""
        if self.pages is None:
            return []
        if indices.device.type != "cpu":
            raise InputError(f"indices are on {indices.device} (pages are kept on the host, which reads them); use indices.cpu()")
        return list(indices.tolist())

    # as in __init__: the new tensors must be writable outside of inference mode
    @torch.inference_mode(False)
    def _reorder(self, indices: Tensor, chosen: Tensor, sources: list[int | None]) -> None:
        """Reorder by the caller's `indices`; `chosen` is a copy on the cache's device, `sources` a list for the page table."""
        in_place = self.is_static
        self.stores.reorder(chosen, in_place=in_place)
        if not in_place:
            self.known_forms.clear()
        self.bounds.reorder(chosen if in_place else indices)
        if self.pages is not None:
            self.pages.reorder(sources)
        if in_place:
            for x in (self.lengths, self._last_reads, self._total_reads):
                x.copy_(x.index_select(0, chosen))
            return
        self.lengths = self.lengths.index_select(0, chosen)
        self._last_reads, self._total_reads = (x.index_select(0, chosen) for x in (self._last_reads, self._total_reads))
        if self.read_counter is not None:
            self.read_counter.forget()

    def _checked(self, indices: Tensor) -> Tensor:
        """Return `indices` on the cache's device."""
        checks.check_indices(indices, self.batch_size)
        return indices.to(self.lengths.device, torch.int64, non_blocking=True)


def _reads_of(counts: Tensor) -> Reads:
    """Return a copy of `counts` `(B, 1 + G)` as Reads."""
    predicted, actual = counts.split([1, counts.shape[1] - 1], 1)
    return Reads(predicted.squeeze(1).clone(), actual.clone())
