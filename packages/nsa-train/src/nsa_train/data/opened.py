"""Hashes of the blocks that a run has read: its position holds them, and a resume reads the blocks again to compare them."""

import base64
import binascii
import time
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np

from nsa_train.data.lanes import BlockSequence
from nsa_train.data.sources.base import Reading, within
from nsa_train.data.sources.files import FileBlocks, Hashes, LostError, changed
from nsa_train.errors import DataError

KEY = "block_hashes"
"""Key of the hashes in the fingerprint of a state"""
CHUNK = 1024
"""Number of blocks whose hashes form one text of a state. Texts are short, so that little is encoded again when a hash is added."""
VERIFIED_BYTES = 2**34
"""Maximum bytes that each rank of a resume reads again before its first step; other blocks are compared when they are read."""

Texts = list[list[str]]
"""A list of texts for each corpus, one text for every `CHUNK` blocks: base64 of little-endian uint32, empty if no block has a hash"""


class Walk(NamedTuple):
    """The order in which lanes open the blocks of local files."""

    sequence: BlockSequence
    files: tuple[FileBlocks, ...]
    """The blocks of each part of `sequence`, which may hold each of them several times"""
    lanes: int
    """Number of lanes of all ranks"""
    scanned: tuple[Hashes, ...]
    """The hashes of each part from opening the data, equal in every process"""


class OpenedBlocks:
    """The hashes of all blocks read so far: at the opening of the data, by `lanes` up to a position, and by the run before a resume."""

    def __init__(self, walk: Walk, lanes: range, reading: Reading, timeout_s: float) -> None:
        """`timeout_s`: the longest wait for a block that is read again."""
        self._walk, self._lanes, self._reading, self._timeout_s = walk, lanes, reading, timeout_s
        self._hashes = [values.copy() for values in walk.scanned]
        self._texts = _texts_of(self._hashes)
        self._next = dict.fromkeys(map(str, lanes), 0)

    def at(self, positions: dict[str, Any]) -> Texts:
        """Return the hashes of blocks that lanes at `positions` have opened. A lane's position must not be before its position of an earlier call."""
        stale = {chunk for number, position in positions.items() for chunk in self._opened(number, position)}
        for part, chunk in stale:
            self._texts[part][chunk] = _text(self._hashes[part][chunk * CHUNK : (chunk + 1) * CHUNK])
        return [list(texts) for texts in self._texts]

    def load(self, texts: Any, positions: dict[str, Any]) -> None:
        """Continue at `positions` with the hashes `texts` of the run so far, None if it has none.

        Blocks that this process has read, or will read, are compared with them; a share of the others is read at once to compare it.

        Raises:
            DataError: naming file and block, if a block holds other bytes.
        """
        known = _hashes_of(texts, [len(files) for files in self._walk.files])
        for files, expected in zip(self._walk.files, known, strict=True):
            found = files.kept.found
            differing = np.flatnonzero((expected != 0) & (found != 0) & (expected != found))
            if len(differing):
                raise changed(files.where(int(differing[0])))
            files.kept.expected = expected
        self._verify()
        self._hashes = [np.maximum(expected, scanned) for expected, scanned in zip(known, self._walk.scanned, strict=True)]
        self._texts = _texts_of(self._hashes)
        self._next = {str(number): positions[str(number)]["block"] for number in self._lanes}

    def _opened(self, number: str, position: dict[str, Any]) -> Iterator[tuple[int, int]]:
        """Record what lane `number` opened up to `position`; yield part and chunk of each."""
        if not position["hash"]:
            # nothing is open before the first row
            return
        while self._next[number] <= position["block"]:
            part, located = self._walk.sequence.locate(self._next[number] * self._walk.lanes + int(number))
            found, hashes = self._walk.files[part].kept.found, self._hashes[part]
            own = located.item % len(found)
            if found[own] and not hashes[own]:
                hashes[own] = found[own]
                yield part, own // CHUNK
            if not hashes[own] and self._next[number] == position["block"]:
                # on a resume, the block of the position is opened with the first row
                break
            self._next[number] += 1

    def _verify(self) -> None:
        """Read blocks that the run has opened and this process has not; the ranks share them out."""
        blocks = self._unread()

        def some() -> bool:
            until = time.monotonic() + 1
            for files, block in blocks:
                self._reading.shard = files.where(block)
                try:
                    files.record_hash(block)
                except LostError:
                    # the lane that reads the block will report the loss, or count its records
                    continue
                if time.monotonic() > until:
                    return True
            return False

        while within(self._timeout_s, some, self._reading):
            pass

    def _unread(self) -> Iterator[tuple[FileBlocks, int]]:
        for files in self._walk.files:
            known = np.flatnonzero((files.kept.expected != 0) & (files.kept.found == 0))
            mine = [block for block in known.tolist() if block % self._walk.lanes in self._lanes]
            size = files.num_bytes * len(mine) // len(files)
            step = max(1, -(-size * len(self._walk.files) // VERIFIED_BYTES))
            yield from ((files, block) for block in mine[::step])


def merge_hashes(parts: Sequence[Texts]) -> Texts:
    """Return the hashes of all `parts` together.

    Raises:
        DataError: if two parts disagree about a block.
    """
    return [[_joined(texts) for texts in zip_longest(*corpora)] for corpora in zip_longest(*parts)]


def _joined(texts: Sequence[str]) -> str:
    different = [_values(text) for text in {*texts} if text]
    if not different:
        return ""
    highest = np.maximum.reduce(different)
    if any(((values != 0) & (values != highest)).any() for values in different):
        raise DataError("data: ranks read different bytes in the same block (all must see the same files); give them equal copies")
    return _text(highest)


def _hashes_of(texts: Any, counts: Sequence[int]) -> list[Hashes]:
    """Return the hashes of corpora of `counts` blocks."""
    if texts is None:
        return [np.zeros(count, np.uint32) for count in counts]
    try:
        found = [
            np.concatenate([_values(text, min(CHUNK, count - start)) for start, text in zip(range(0, count, CHUNK), corpus, strict=True)])
            for count, corpus in zip(counts, texts, strict=True)
        ]
    except (TypeError, ValueError, binascii.Error) as error:
        raise DataError(f"data: the checkpoint's hashes of blocks do not fit this data ({error}); use another checkpoint") from None
    return found


def _texts_of(hashes: Sequence[Hashes]) -> Texts:
    return [[_text(values[start : start + CHUNK]) for start in range(0, len(values), CHUNK)] for values in hashes]


def _values(text: str, count: int = 0) -> Hashes:
    """Return the hashes in `text`, or `count` zeros if it is empty."""
    values = np.frombuffer(base64.b64decode(text, validate=True), "<u4").astype(np.uint32) if text else np.zeros(count, np.uint32)
    if count and len(values) != count:
        raise ValueError(f"{len(values)} for {count} blocks")
    return values


def _text(values: Hashes) -> str:
    return base64.b64encode(values.astype("<u4").tobytes()).decode() if values.any() else ""
