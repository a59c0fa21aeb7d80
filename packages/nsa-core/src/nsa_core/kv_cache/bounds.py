"""The number of tokens of each sequence, and how many of them a crop may remove: bounds on the host, or exact numbers on the device."""

import torch
from torch import Tensor

from nsa_core.errors import CacheOverflowError


class HostBounds:
    """Bounds of a cache that grows. They live on the host, so that neither growth nor a refused step waits for a GPU."""

    def __init__(self, batch_size: int) -> None:
        """Start with empty sequences."""
        self.held = torch.zeros(batch_size, dtype=torch.int64, device="cpu")
        """int64 (B,): upper bound on the tokens of each sequence."""
        self.depth = torch.zeros_like(self.held)
        """int64 (B,): upper bound on how many tokens the rings have seen beyond the length of each sequence. A crop raises it, new tokens lower
        it. A crop may remove up to `max_rollback` minus this number."""
        self.planned = torch.zeros(2, batch_size, dtype=torch.int64, device="cpu")
        """int64 (2, B): `held` and `depth` after the step that has begun."""

    def begin(self, num_queries: int, query_count: Tensor | None, *, in_place: bool, max_seqlen: int) -> int:
        """Plan a step that adds `num_queries` tokens to each sequence, and return the largest length after it.

        `query_count` int32 `(B,)`: how many of the tokens are valid; used only if it is on a CPU. `in_place`: the tokens are written into the
        rings at once, so `depth` counts them even if the step fails before its end. In a traced graph the lengths are counted when the graph
        runs, and 0 is returned.

        Raises:
            CacheOverflowError: if a sequence would become longer than `max_seqlen`. Nothing changes then.
        """
        is_exact = query_count is None or query_count.device.type == "cpu"
        count = _count_in_graph if torch.compiler.is_compiling() else count_step
        count(self.held, self.depth, self.planned, query_count if is_exact else None, num_queries, is_exact, in_place, max_seqlen)
        return 0 if torch.compiler.is_compiling() or not self.held.numel() else int(self.planned[0].max())

    def end(self) -> None:
        """Count the step that `begin` planned."""
        self.held.copy_(self.planned[0])
        self.depth.copy_(self.planned[1])

    def check_crop(self, counts: Tensor, max_rollback: int) -> None:
        """Check on the host that the last `counts` int64 `(B,)` tokens may be removed.

        Raises:
            CacheOverflowError: for more tokens than a sequence holds, or than `max_rollback` allows.
        """
        check_crop(counts.cpu(), self.held, self.depth, max_rollback)

    def crop(self, counts: Tensor) -> None:
        """Count on the host that the last `counts` int64 `(B,)` tokens are removed."""
        counts = counts.cpu()
        self.held.sub_(counts)
        self.depth.add_(counts)

    def lost(self, _: Tensor | None = None) -> CacheOverflowError | None:
        """Return None: a cache that grows loses no token."""
        return None

    def reorder(self, indices: Tensor) -> None:
        """Replace the bounds by those of the sequences at `indices`. Indices on a GPU are not read: every sequence then gets the largest bound."""
        if indices.device.type == "cpu":
            self.held, self.depth = self.held[indices.long()], self.depth[indices.long()]
        else:
            size = (indices.shape[0],)
            self.held, self.depth = (x.new_full(size, int(x.max()) if x.numel() else 0) for x in (self.held, self.depth))
        self.planned = torch.stack([self.held, self.depth])

    def reset(self, indices: Tensor | None) -> None:
        """Set the bounds of the sequences at `indices` (None: all) to 0. Indices on a GPU are not read: the bounds then stay."""
        for x in (self.held, self.depth):
            if indices is None:
                x.zero_()
            elif indices.device.type == "cpu":
                x.index_fill_(0, indices.long(), 0)


def count_step(
    held: Tensor,
    depth: Tensor,
    planned: Tensor,
    query_count: Tensor | None,
    num_queries: int,
    is_exact: bool,
    in_place: bool,
    max_seqlen: int,
) -> None:
    """Write `held` and `depth` as they are after a step into `planned`; see `HostBounds.begin`."""
    counts = torch.full_like(held, num_queries) if query_count is None else query_count.long().clamp(0, num_queries)
    grown = held + counts
    if bool((grown > max_seqlen).any()):
        where, longest = int(grown.argmax()), int(grown.max())
        raise CacheOverflowError(
            f"sequence {where} would hold {longest} tokens (the cache was built for max_seqlen={max_seqlen}); "
            f"build it with new_cache({held.shape[0]}, {longest}) or append at most {max_seqlen - int(held[where])}"
        )
    planned[0] = grown
    # a count that is not read may be 0, so it must not raise the number of tokens that a crop may remove
    planned[1] = (depth - counts).clamp(min=0) if is_exact else depth
    if in_place:
        depth.copy_(torch.maximum(depth, counts))


_count_in_graph = torch.library.custom_op("nsa_core::count_step", count_step, mutates_args=("depth", "planned"))
_count_in_graph.register_fake(lambda *_: None)


LOST = 2**31 - 1
"""Value of `DeviceBounds.reached` that marks a sequence as overflowed in a paged cache, and in a step that is not in place."""


class DeviceBounds:
    """Bounds of a static cache: tensors on its device that are changed only in place, because a captured step reads them by address."""

    def __init__(self, lengths: Tensor, max_seqlen: int) -> None:
        """Start with empty sequences. `lengths` int32 `(B,)` is the cache's own tensor; no length grows beyond `max_seqlen`."""
        self.lengths, self.max_seqlen = lengths, max_seqlen
        self.reached = torch.zeros_like(lengths)
        """int32 (B,): the largest length of each sequence that the rings have seen; a crop does not lower it. A value above `max_seqlen` marks
        a sequence that lost tokens because they did not fit."""

    @property
    def overflowed(self) -> Tensor:
        """Return bool `(B,)`: True for sequences that lost tokens."""
        return self.reached > self.max_seqlen

    def begin(self, wanted: int | Tensor, limit: Tensor | None, *, in_place: bool) -> Tensor:
        """Return int32 `(B,)`: how many of the `wanted` tokens fit. A sequence with tokens that do not fit is marked as `overflowed`.

        Lengths up to `max_seqlen` fit; with pages, also up to `limit` `(B,)`.
        """
        # few operations, because each of them delays a step
        end = self.lengths + wanted
        if limit is None:
            added = end.clamp(max=self.max_seqlen).sub_(self.lengths)
        else:
            added = torch.minimum(end, limit).sub_(self.lengths).clamp_(min=0)
            end = end.masked_fill(added < wanted, LOST)
        if in_place:
            self.reached.clamp_(min=end)
        else:
            self.reached.masked_fill_(end > self.max_seqlen, LOST)
        return added

    def end(self) -> None:
        """Record that the rings hold the step's tokens; call it after the lengths are advanced. For a step in place, `begin` has done it."""
        self.reached.clamp_(min=self.lengths)

    def check_crop(self, counts: Tensor, max_rollback: int) -> None:
        """Check that the last `counts` int64 `(B,)` tokens may be removed; waits for the device.

        Raises:
            CacheOverflowError: for more tokens than a sequence holds, or than `max_rollback` allows, or if any sequence lost tokens.
        """
        lost = self.lost()
        if lost is not None:
            raise lost
        check_crop(counts.to(self.lengths.device), self.lengths, self.reached - self.lengths, max_rollback)

    def crop(self, counts: Tensor) -> None:
        """Do nothing: the lengths on the device are the bounds."""

    def lost(self, indices: Tensor | None = None) -> CacheOverflowError | None:
        """Return an error that names the sequences among `indices` (None: all) that lost tokens, or None if none did; waits for the device."""
        marked = self.overflowed
        if indices is not None:
            marked = torch.zeros_like(marked).index_fill(0, indices, True) & marked
        found = marked.nonzero().flatten().tolist()
        if not found:
            return None
        return CacheOverflowError(
            f"sequences {found} lost tokens (they did not fit, and a static cache never grows); reset them, or build a larger cache"
        )

    def reorder(self, indices: Tensor) -> None:
        """Replace the bounds by those of the sequences at `indices` `(B,)`."""
        self.reached.copy_(self.reached.index_select(0, indices))

    def reset(self, indices: Tensor | None) -> None:
        """Set the bounds of the sequences at `indices` (None: all) to 0."""
        self.reached.zero_() if indices is None else self.reached.index_fill_(0, indices, 0)


def check_crop(counts: Tensor, held: Tensor, depth: Tensor, max_rollback: int) -> None:
    """Raise unless `counts` `(B,)` of the `held` tokens may be removed, at rollback `depth` (`HostBounds.depth`); waits for tensors on a GPU."""
    too_deep = (counts > 0) & (counts > torch.minimum(held, max_rollback - depth))
    if not bool(too_deep.any()):
        return
    where = int(too_deep.int().argmax())
    count, tokens = int(counts[where]), int(held[where])
    if count > tokens:
        raise CacheOverflowError(
            f"sequence {where} cannot go back by {count} from {tokens} tokens (it would hold fewer than 0); crop at most {tokens}"
        )
    raise CacheOverflowError(
        f"sequence {where} cannot go back by {count} from {tokens} tokens (raw tokens older than max_rollback="
        f"{max_rollback} are gone); build the cache with keep_raw=True or a larger max_rollback"
    )
