"""Decide which documents are held out. The choice is deterministic, and the same on every rank.

A hash of its *content* decides whether a document is held out, so that equal documents are never on both sides.
A single document is cut by position instead: its last tenth is held out.
"""

import hashlib
from collections.abc import Collection, Sequence
from typing import NamedTuple

from nsa_train.data.sources.base import Document
from nsa_train.errors import DataError

VALIDATION_PERCENT = 5
"""Share of documents held out, by hash."""
SINGLE_FILE_VALIDATION_PERCENT = 10
"""Share of a single document held out: its end."""
END_BYTES = 256
"""Minimum length of an end that is searched in other documents: shorter ends are equal in many documents."""


class Split(NamedTuple):
    """The two sides, disjoint."""

    train: list[list[Document]]
    """The training documents of each part"""
    val: list[Document]
    """The held-out documents of all parts"""
    ends: dict[int, Document]
    """Part -> the end of its one document that was cut: the held-out text and up to `END_BYTES` before it"""


def rank_of(text: bytes) -> int:
    """Return 32 bits of a hash of `text`, its rank: documents with a rank below the limit are held out."""
    return int.from_bytes(hashlib.sha256(text).digest()[:4], "big")


def limit_of(ranks: Collection[int]) -> int:
    """Return the rank below which documents are held out: the share above, but at least one of `ranks` and never all."""
    limit = 2**32 * VALIDATION_PERCENT // 100
    return min(max(limit, min(ranks) + 1), max(ranks))


def split(parts: Sequence[Sequence[Document]]) -> Split:
    """Split the documents of `parts`, none of which is empty, into a training side and a validation side.

    Raises:
        DataError: if too few documents differ to fill both sides.
    """
    texts = {document.text for documents in parts if len(documents) > 1 for document in documents}
    limit = limit_of([rank_of(text) for text in texts]) if texts else 0
    found = Split([], [], {})
    for number, documents in enumerate(parts):
        train, val = list[Document](), list[Document]()
        for document in documents if len(documents) > 1 else ():
            (val if rank_of(document.text) < limit else train).append(document)
        if len(documents) == 1:
            train, val = _cut(documents[0])
            end = documents[0].text[-max(len(val[0].text), END_BYTES) :].strip()
            # white space is in every text
            found.ends.update({number: Document(val[0].name, end)} if end else {})
        if not train or (not val and len(texts) == 1):
            raise DataError(
                f"data.path: {documents[0].name} and the {len(documents) - 1} other documents are equal or too few (some are held out, and "
                "they must differ from those for training); name one of them alone, or more that differ"
            )
        found.train.append(train)
        found.val.extend(val)
    return found


def shared(split: Split) -> tuple[tuple[str, str], ...]:
    """Return pairs of names: a held-out text, and a training document that contains text of it.

    Whole texts are compared, and the end of a document that was cut with any piece of the documents of other parts, on either side.
    """
    names = {document.text: document.name for documents in split.train for document in documents}
    found = [(document.name, names[document.text]) for document in split.val if document.text in names]
    cut = {end.name for end in split.ends.values()}
    whole = [document for document in split.val if document.name not in cut]
    for number, end in split.ends.items():
        others = (document for part, documents in enumerate(split.train) if part != number for document in documents)
        found += [(end.name, document.name) for document in others if end.text in document.text][:1]
        # the start of a document whose end is held out is trained on
        found += [(document.name, split.train[number][0].name) for document in whole if end.text in document.text][:1]
    return tuple(dict.fromkeys(found))


def _cut(document: Document) -> tuple[list[Document], list[Document]]:
    """Return the first nine tenths of `document`, and the rest; no character is cut."""
    text = document.text
    cut = len(text) * (100 - SINGLE_FILE_VALIDATION_PERCENT) // 100
    while cut and text[cut] & 0xC0 == 0x80:
        cut -= 1
    if cut == 0:
        raise DataError(
            f"data.path: {document.name} holds {len(text)} byte (it is cut into train and validation); name a longer file, or more of them"
        )
    return [Document(f"{document.name}[:{cut}]", text[:cut])], [Document(f"{document.name}[{cut}:]", text[cut:])]
