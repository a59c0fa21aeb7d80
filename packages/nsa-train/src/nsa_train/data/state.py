"""The position of a run in its data, as a checkpoint holds it: plain JSON, the same for any number of ranks and workers."""

from collections.abc import Sequence
from typing import Any

from nsa_train.data.opened import KEY, merge_hashes
from nsa_train.data_state import VERSION, consumed_hash
from nsa_train.errors import DataError


def state_of(fingerprint: dict[str, Any], batches: int, lanes: dict[str, Any]) -> dict[str, Any]:
    """Return the state of one rank: what is read, micro-batches given out, and the position of each of its lanes."""
    return {"version": VERSION, "fingerprint": fingerprint, "batches": batches, "lanes": lanes, "consumed_hash": consumed_hash(lanes)}


def merge_states(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the state of all ranks, from the `state_dict` of each, in any order.

    Raises:
        DataError: when the parts are not of one moment of one run.
    """
    lanes = {number: state for part in parts for number, state in part["lanes"].items()}
    # the hashes of opened blocks add up; everything else is the same on all ranks
    fingerprints = [{key: value for key, value in part["fingerprint"].items() if key != KEY} for part in parts]
    for key in ("version", "fingerprint", "batches"):
        values = fingerprints if key == "fingerprint" else [part[key] for part in parts]
        if any(value != values[0] for value in values):
            raise DataError(f"data: ranks disagree about {key} ({values}); save all of them at the same step")
    if len(lanes) != sum(len(part["lanes"]) for part in parts):
        raise DataError(f"data: two ranks serve the same lanes ({sorted(lanes, key=int)} in all); give every rank its own number")
    ordered = {number: lanes[number] for number in sorted(lanes, key=int)}
    hashes = [part["fingerprint"][KEY] for part in parts if KEY in part["fingerprint"]]
    fingerprint = {**fingerprints[0], KEY: merge_hashes(hashes)} if hashes else fingerprints[0]
    return state_of(fingerprint, parts[0]["batches"], ordered)


def check_state(merged: dict[str, Any], fingerprint: dict[str, Any], lanes: int) -> None:
    """Let a state pass that belongs to this data.

    Raises:
        DataError: naming what differs.
    """
    if merged.get("version") != VERSION:
        raise DataError(f"data: the checkpoint's position has version={merged.get('version')} (this one reads {VERSION}); use that version")
    differing = [
        f"{key} was {merged['fingerprint'].get(key)!r} and is {value!r}"
        for key, value in fingerprint.items()
        if merged["fingerprint"].get(key) != value
    ]
    if differing:
        raise DataError(f"data: the position of the checkpoint is one in other data ({'; '.join(differing)}); give the recipe of that run")
    if sorted(merged["lanes"], key=int) != [str(number) for number in range(lanes)]:
        raise DataError(
            f"data: the checkpoint has the positions of {len(merged['lanes'])} of {lanes} rows (a part is missing); save with merge_states"
        )
