"""The position of a run in its data, as a checkpoint holds it: attrs classes with the fields that `stream.state_of` writes. Imports no torch."""

import hashlib
from collections.abc import Mapping
from typing import Any

from attrs import frozen

from nsa_train.settings.config import RunConfig
from nsa_train.settings.rules import MOST_ACCUMULATED, MOST_STEPS, integer, short
from nsa_train.settings.structuring import anything, count, is_count, list_of, problems_of, text_like

VERSION = 1
NUM_FIRST_TOKENS = 32
"""Number of tokens of a lane's first row that are recorded."""
MOST_BATCHES = MOST_STEPS * MOST_ACCUMULATED
"""Maximum micro-batches of a run, and so rows, blocks, records and documents of a lane; int64 holds their product with the lanes."""
_HASH = r"[0-9a-f]{64}"


@frozen(kw_only=True)
class _Lane:
    """The position of one row of the micro-batches."""

    epoch: int = count(MOST_BATCHES)
    hash: str = text_like(f"({_HASH})?", "a SHA-256 (64 hexadecimal digits), or empty before the first row")
    first_tokens: list[int] = list_of(
        lambda value: is_count(value, most=2**31 - 1), f"a list of at most {NUM_FIRST_TOKENS} ids", most=NUM_FIRST_TOKENS
    )
    documents: int = count(MOST_BATCHES)
    bad_records: int = count(MOST_BATCHES)


@frozen(kw_only=True)
class RowLane(_Lane):
    """The lane of a corpus in memory."""

    row: int = count(MOST_BATCHES)


@frozen(kw_only=True)
class BlockLane(_Lane):
    """The lane of a streamed corpus."""

    block: int = count(MOST_BATCHES)
    record: int = count(MOST_BATCHES)
    offset: int = count(MOST_BATCHES)


LANES: dict[str, type[_Lane]] = {"rows": RowLane, "blocks": BlockLane}
"""Value of `walk` in the fingerprint -> class of its lanes."""


@frozen(kw_only=True)
class Position:
    """The position of all ranks together. Opening the data checks the rest of the fingerprint."""

    version: int = integer(at_least=VERSION, at_most=VERSION, example=VERSION)
    fingerprint: dict[str, Any] = anything()
    batches: int = count(MOST_BATCHES)
    lanes: dict[str, Any] = anything()
    consumed_hash: str = text_like("[0-9a-f]{16}", "16 hexadecimal digits")


def position_problems(values: Any, path: str, config: RunConfig) -> list[str]:
    """Return the problems of `values`, the position of a run of `config` in its data; each problem names its path below `path`."""
    found = problems_of(values, Position, path)
    if found:
        return found
    lanes, fingerprint = values["lanes"], values["fingerprint"]
    expected = settings_of(config)
    found = [
        f"{path}.fingerprint.{key}={short(fingerprint[key])} is not the {short(value)} of config.toml"
        for key, value in expected.items()
        if key in fingerprint and (type(fingerprint[key]), fingerprint[key]) != (type(value), value)
    ]
    walk = fingerprint.get("walk")
    if not isinstance(walk, str) or walk not in LANES:
        return [*found, f"{path}.fingerprint.walk={short(walk)} is not one of {', '.join(map(repr, LANES))}"]
    if set(lanes) != set(map(str, range(config.train.batch_size))):
        return [
            *found,
            f"{path}.lanes has the keys {short(list(lanes))}, and not one per row of train.batch_size={config.train.batch_size}",
        ]
    for number, lane in lanes.items():
        found += problems_of(lane, LANES[walk], f"{path}.lanes[{number}]")
        if not found and walk == "rows" and lane["row"] != values["batches"]:
            found.append(
                f"{path}.lanes[{number}].row={lane['row']} is not {path}.batches={values['batches']} (a batch takes a row of each lane)"
            )
    if not found and values["consumed_hash"] != consumed_hash(lanes):
        found.append(f"{path}.consumed_hash={values['consumed_hash']!r} is not the hash of its lanes, {consumed_hash(lanes)!r}")
    return found


def settings_of(config: RunConfig) -> dict[str, Any]:
    """Return the settings of `config` on which a position depends, in the form of its fingerprint."""
    data, train = config.data, config.train
    return {
        "source": data.source,
        "tokenizer": data.tokenizer,
        "shuffle_seed": data.shuffle_seed,
        "packing": data.packing,
        "mix": dict(data.mix),
        "batch_size": train.batch_size,
        "seq_len": train.seq_len,
    }


def consumed_hash(lanes: Mapping[str, Any]) -> str:
    """Return one hash of the tokens that `lanes` returned, 16 hexadecimal digits: equal for equal tokens in equal order."""
    text = " ".join(f"{number}:{lanes[number]['hash']}" for number in sorted(lanes, key=int))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
