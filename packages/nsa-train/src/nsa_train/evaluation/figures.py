"""The figures of an evaluation. Imports no torch."""

from typing import NamedTuple


class Figure(NamedTuple):
    """One figure with its coordinates; a coordinate that its task does not have is None."""

    task: str
    mode: str | None
    measure: str
    """"loss" (nats per token), "right" (a share), "recall" (a share of attention mass), ..."""
    value: float
    samples: int
    """Number of tokens, answers or queries in the mean `value`."""
    length: int | None = None
    """Tokens of a sequence, question and answer included."""
    depth: float | None = None
    """Relative position of a pass key: 0 is the first position, 1 the last."""
    first: int | None = None
    """The first position of a bucket, counted from 0."""
    last: int | None = None
    """The last position of a bucket, inclusive."""
    layer: int | None = None
    group: int | None = None
    """The KV head."""
