"""PageTable: which pages of a cache's stores hold which tokens of which sequence. It is kept on the host and writes a table on the device."""

from collections import Counter
from collections.abc import Iterable, Sequence
from heapq import nsmallest
from operator import index
from typing import NamedTuple, SupportsIndex

import torch
from torch import Tensor

from nsa_core import checks
from nsa_core.config import BlockGeometry
from nsa_core.errors import CacheOverflowError, InputError
from nsa_core.varlen import compressed_lengths


def _number(page: SupportsIndex) -> int:
    """Return a page's number as an int; raise TypeError for a bool, and for anything else that is no integer."""
    if isinstance(page, bool):
        raise TypeError
    return index(page)


class Copies(NamedTuple):
    """Pages to copy before a step writes them, page old[i] to page new[i]: other sequences read the old pages."""

    old: list[int]
    new: list[int]


class PageTable:
    """Pages of the sequences of a batch. Sequences may share pages that none of them writes any more."""

    def __init__(self, batch_size: int, max_seqlen: int, num_pages: int, page_size: int, device: torch.device | str) -> None:
        """Start with `num_pages` free pages of `page_size` tokens."""
        self.page_size, self.num_pages, self.max_seqlen = page_size, num_pages, max_seqlen
        self.table = torch.full((batch_size, -(-max_seqlen // page_size)), -1, dtype=torch.int32, device=device)
        """int32 (B, max_pages): the pages of each sequence in order, -1 after the last."""
        self.extents = torch.zeros(2, batch_size, dtype=torch.int32, device=device)
        """int32 (2, B). Row 0: how many tokens the pages of each sequence hold. Row 1: the tokens up to the end of its last shared page, or 0."""
        self._host_extents = torch.zeros(2, batch_size, dtype=torch.int32, device="cpu")
        self._pages: list[list[int]] = [[] for _ in range(batch_size)]
        self._num_readers = [0] * num_pages
        self._free = set(range(num_pages))

    @property
    def num_free(self) -> int:
        """Return the number of pages that no sequence has."""
        return len(self._free)

    def pages_of(self, sequence: int) -> tuple[int, ...]:
        """Return the pages of a sequence, in the order of its tokens."""
        return tuple(self._pages[self._checked(sequence)])

    def limits(self, lengths: Tensor, geometry: BlockGeometry) -> Tensor:
        """Return `(B,)`: the length up to which each sequence may grow from `lengths` `(B,)`; 0 if a step would write a shared page.

        A step writes tokens from `lengths` on, and blocks that are not complete yet.
        """
        held, shared = self._host_extents if lengths.device.type == "cpu" else self.extents
        first_open = compressed_lengths(lengths, geometry) * geometry.compression_stride
        return torch.where(first_open >= shared, held, 0)

    def assign(self, sequence: int, pages: Sequence[int]) -> None:
        """Assign pages to a sequence that has none, in the order of its tokens; pages of other sequences become shared.

        Raises:
            InputError: for a sequence that has pages already; for pages that are not integers, beyond the stores, named twice or too many.
        """
        if self._pages[self._checked(sequence)]:
            raise InputError(f"sequence {sequence} has {len(self._pages[sequence])} pages (each holds tokens); free it first")
        try:
            # numbers in a tensor become Python integers, because the host counts the readers of each page
            pages = [_number(page) for page in pages]
        except TypeError:
            raise InputError(f"pages={pages!r:.120} is no list of integers (they number pages); use [0, 1]") from None
        if outside := [page for page in pages if not 0 <= page < self.num_pages]:
            raise InputError(f"page {outside[0]} is beyond the store (it has {self.num_pages} pages); use 0 .. {self.num_pages - 1}")
        if len(set(pages)) < len(pages) or len(pages) > self.table.shape[1]:
            raise InputError(f"pages={pages} (each once, at most {self.table.shape[1]} of a sequence); drop what is too much")
        self._replace(sequence, pages)

    def own(self, sequence: int, first: int, num_tokens: int) -> Copies:
        """Give a sequence pages for `num_tokens` tokens, and return the pages to copy. Its pages from index `first` on are no longer shared.

        Raises:
            CacheOverflowError: if too few pages are free, or `num_tokens` is above `max_seqlen`. Nothing changes then.
        """
        pages = list(self._pages[self._checked(sequence)])
        needed = -(-num_tokens // self.page_size)
        if num_tokens > self.max_seqlen:
            raise CacheOverflowError(
                f"sequence {sequence} would hold {num_tokens} tokens (the cache was built for max_seqlen={self.max_seqlen}); reserve fewer"
            )
        shared = [page_index for page_index in range(first, len(pages)) if self._num_readers[pages[page_index]] > 1]
        count = len(shared) + max(needed - len(pages), 0)
        if count > self.num_free:
            raise CacheOverflowError(
                f"sequence {sequence} needs {count} more pages for {num_tokens} tokens ({self.num_free} of {self.num_pages} are free); "
                f"free a sequence, or build the cache with num_pages={self.num_pages + count - self.num_free}"
            )
        if not count:
            return Copies([], [])
        fresh = nsmallest(count, self._free)
        copies = Copies([pages[page_index] for page_index in shared], fresh[: len(shared)])
        for page_index, page in zip(shared, fresh, strict=False):
            pages[page_index] = page
        self._replace(sequence, pages + fresh[len(shared) :])
        return copies

    def free(self, sequence: int) -> None:
        """Free the pages of a sequence; pages that others share stay with them.

        Raises:
            InputError: if it has no pages, for example because they were freed before.
        """
        if not self._pages[self._checked(sequence)]:
            raise InputError(f"sequence {sequence} has no pages (they are freed once); drop the second free")
        self._replace(sequence, [])

    def reorder(self, sources: Sequence[int | None]) -> None:
        """Replace the sequences by the ones at the indices `sources`; None gives a sequence without pages. Copies of one source share its pages."""
        self._pages = [[] if source is None else list(self._pages[source]) for source in sources]
        readers = Counter(page for have in self._pages for page in have)
        self._num_readers = [readers[page] for page in range(self.num_pages)]
        self._free = {page for page in range(self.num_pages) if not readers[page]}
        width = self.table.shape[1]
        if len(sources) != self.table.shape[0]:
            self.table, self.extents = self.table.new_empty(len(sources), width), self.extents.new_empty(2, len(sources))
            self._host_extents = torch.empty(2, len(sources), dtype=torch.int32, device="cpu")
        rows = [self._row(sequence) for sequence in range(len(sources))]
        table = torch.tensor(rows, dtype=torch.int32, device="cpu").view(-1, width)
        self.table.copy_(table, non_blocking=True)
        self._write_extents(range(len(sources)))

    def _replace(self, sequence: int, pages: list[int]) -> None:
        """Replace the pages of one sequence, and update the table, the free pages and the extents."""
        had = self._pages[sequence]
        self._pages[sequence] = pages
        gone, new = set(had).difference(pages), set(pages).difference(had)
        for change, changed in ((-1, gone), (1, new)):
            for page in changed:
                self._num_readers[page] += change
        self._free -= new
        self._free |= {page for page in gone if not self._num_readers[page]}
        self.table[sequence].copy_(torch.tensor(self._row(sequence), dtype=torch.int32, device="cpu"), non_blocking=True)
        # a new or a removed reader may start or end the sharing of a page, which changes the extents of its other readers
        is_shared = any(self._num_readers[page] for page in gone) or any(self._num_readers[page] > 1 for page in new)
        self._write_extents(range(len(self._pages)) if is_shared else (sequence,))

    def _row(self, sequence: int) -> list[int]:
        have = self._pages[sequence]
        return have + [-1] * (self.table.shape[1] - len(have))

    def _write_extents(self, sequences: Iterable[int]) -> None:
        """Update the extents of `sequences`, in place."""
        for sequence in sequences:
            have = self._pages[sequence]
            shared = next((page_index + 1 for page_index in reversed(range(len(have))) if self._num_readers[have[page_index]] > 1), 0)
            self._host_extents[0, sequence] = min(len(have) * self.page_size, self.max_seqlen)
            self._host_extents[1, sequence] = shared * self.page_size
        self.extents.copy_(self._host_extents, non_blocking=True)

    def _checked(self, sequence: int) -> int:
        if not checks.is_size(sequence, 0) or sequence >= len(self._pages):
            raise InputError(f"sequence {sequence!r} is none (the cache holds {len(self._pages)}); use 0 .. {len(self._pages) - 1}")
        return sequence
