"""Measured thresholds in a file: the length from which one backend is faster than another. `nsa-bench thresholds --write` writes the file."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from attrs import frozen

from nsa_core.backends.base import BranchRequest, Operation

FORMAT, SCHEMA = "nsa-thresholds", 1
DIRECTIONS = {"fwd": False, "fwd+bwd": True}
"""Names of directions in a table, and whether they need gradients."""
GEOMETRY_SIZES = 5
"""Sizes in the text of a geometry: l/d/l'/n/w."""
SIZES_READ = {Operation.CMP: slice(2), Operation.WIN: slice(4, 5)}
"""The sizes of a geometry that an operation depends on; an operation that is missing here depends on all of them."""


def user_file() -> Path:
    """Return the path of the user's table: `nsa/thresholds.json` in torch's cache, `~/.cache/torch` unless torch is set up otherwise."""
    return Path(torch.hub.get_dir()).parent / "nsa" / "thresholds.json"


@frozen(kw_only=True)
class MinLength:
    """The measured length from which `backend` is faster than `against`, for one GPU, direction and shape of heads."""

    compute_capability: tuple[int, int] | None
    operation: Operation
    needs_grad: bool
    dtype: str
    """Such as "bfloat16"."""
    geometry: tuple[int, ...]
    """(l, d, l', n, w)."""
    group_size: int
    """Query heads per KV head."""
    head_dim_qk: int
    head_dim_v: int
    backend: str
    against: str
    min_length: int | None
    """In tokens; None if there is no length from which `backend` stayed enough faster, up to `max_length`."""
    max_length: int
    """The longest length that was measured."""

    def is_of(self, request: BranchRequest) -> bool:
        """Return True if `request` has the measured operation, GPU, direction, dtype, group size, head dimensions and sizes of blocks."""
        *sizes, _, _, window_size = request.geometry.as_tuple()
        read = SIZES_READ.get(self.operation, slice(None))
        return (
            self.operation is request.operation
            and self.compute_capability == request.compute_capability
            and self.needs_grad == request.needs_grad
            and self.dtype == str(request.dtype).removeprefix("torch.")
            and self.group_size * request.num_kv_heads == request.num_heads
            and (self.head_dim_qk, self.head_dim_v) == (request.head_dim_qk, request.head_dim_v)
            and self.geometry[read] == (*sizes, window_size)[read]
        )


@frozen(kw_only=True)
class ThresholdTable:
    """The entries of a file; empty if the file is missing or cannot be used."""

    entries: tuple[MinLength, ...] = ()
    problem: str | None = None
    """Why the file cannot be used, and what to do; None if it can, or does not exist."""

    def of(self, request: BranchRequest, backend: str) -> tuple[MinLength, ...]:
        """Return the entries of `backend` for calls like `request`, one for each backend that it was compared with."""
        return tuple(entry for entry in self.entries if entry.backend == backend and entry.is_of(request))


def read_table(path: Path) -> ThresholdTable:
    """Return the table in `path`. For a file that cannot be used, no error is raised: the table is empty, and its `problem` says why."""
    try:
        text = path.read_text(encoding="utf-8")
        return ThresholdTable(entries=_entries_of(json.loads(text)))
    except FileNotFoundError:
        return ThresholdTable()
    except OSError as error:
        why = f"cannot be read ({error})"
    except (KeyError, TypeError, AttributeError) as error:
        why = f"has a damaged row ({type(error).__name__}: {error})"
    except (ValueError, RecursionError) as error:
        # also text that is not UTF-8 or not JSON
        why = f"is damaged or no table of thresholds ({error})"
    return ThresholdTable(problem=f"{path} {why}; remove it, and write it again by `nsa-bench thresholds --write`")


table_of = cache(read_table)
"""Returns the table in a path; a process reads each path only once."""


def _entries_of(content: Any) -> tuple[MinLength, ...]:
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"its format is not {FORMAT!r}")
    if content.get("schema") != SCHEMA:
        raise ValueError(f"its schema is {content.get('schema')!r}; this version reads {SCHEMA}")
    return tuple(_entry_of(row) for row in content["rows"])


def _entry_of(row: dict[str, Any]) -> MinLength:
    capability, least = row["compute_capability"], row["min_length"]
    geometry = tuple(int(size) for size in row["geometry"].split("/"))
    if len(geometry) != GEOMETRY_SIZES:
        raise ValueError(f"geometry {row['geometry']!r} is not l/d/l'/n/w")
    group_size, rest = divmod(_positive(row["num_heads"]), _positive(row["num_kv_heads"]))
    if rest:
        raise ValueError(f"num_heads {row['num_heads']} is not a multiple of num_kv_heads {row['num_kv_heads']}")
    return MinLength(
        compute_capability=None if capability is None else _capability_of(capability),
        operation=Operation(row["operation"]),
        needs_grad=DIRECTIONS[row["direction"]],
        dtype=_text(row["dtype"]),
        geometry=geometry,
        group_size=group_size,
        head_dim_qk=_positive(row["head_dim_qk"]),
        head_dim_v=_positive(row["head_dim_v"]),
        backend=_text(row["backend"]),
        against=_text(row["against"]),
        min_length=None if least is None else _positive(least),
        max_length=_positive(row["max_length"]),
    )


def _capability_of(dotted: str) -> tuple[int, int]:
    major, minor = dotted.split(".")
    return int(major), int(minor)


def _positive(value: Any) -> int:
    if type(value) is not int or value < 1:
        raise ValueError(f"{value!r} is not a positive whole number")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not text")
    return value
