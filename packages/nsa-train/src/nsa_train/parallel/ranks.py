"""JSON, bytes and tensors between the ranks of a run; with one process, each call answers for itself.

Bytes travel as uint8 tensors, so no pickle does: torch's object collectives, which unpickle what they receive, are banned by lint.
Without `group`, the default process group carries them.
"""

import json
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from nsa_train.errors import CheckpointError, ConfigError, TrainError

T = TypeVar("T")


def is_distributed() -> bool:
    """Return whether this process belongs to a process group."""
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    """Return this process's rank."""
    return dist.get_rank() if is_distributed() else 0


def world_size() -> int:
    """Return the number of ranks."""
    return dist.get_world_size() if is_distributed() else 1


def gather_bytes(payload: bytes, *, group: Any = None) -> list[bytes]:
    """Return what every rank passed, by rank. A collective: all ranks call it."""
    if not is_distributed():
        return [payload]
    wire = _wire(group)
    length = torch.tensor([len(payload)], device=wire)
    lengths = [torch.empty_like(length) for _ in range(world_size())]
    dist.all_gather(lengths, length, group=group)
    most = max(int(found) for found in lengths)
    padded = torch.zeros(most, dtype=torch.uint8, device=wire)
    padded[: len(payload)] = _tensor(payload, wire)
    received = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(received, padded, group=group)
    return [_bytes(part[: int(found)]) for part, found in zip(received, lengths, strict=True)]


def gather_json(value: Any, *, group: Any = None) -> list[Any]:
    """Return the JSON-able values that the ranks passed, by rank; a tuple comes back as a list. A collective."""
    return [json.loads(part) for part in gather_bytes(json.dumps(value).encode(), group=group)]


def broadcast_bytes(payload: bytes | None, *, group: Any = None) -> bytes:
    """Return what rank 0 passed; the others pass None. A collective."""
    if not is_distributed():
        assert payload is not None
        return payload
    wire = _wire(group)
    length = torch.tensor([len(payload or b"")], device=wire)
    dist.broadcast(length, src=0, group=group)
    data = _tensor(payload or b"", wire) if rank() == 0 else torch.empty(int(length), dtype=torch.uint8, device=wire)
    dist.broadcast(data, src=0, group=group)
    return _bytes(data)


def broadcast_json(value: Any = None, *, group: Any = None) -> Any:
    """Return the JSON-able value that rank 0 passed; a tuple comes back as a list. A collective."""
    return json.loads(broadcast_bytes(json.dumps(value).encode() if rank() == 0 else None, group=group))


def on_rank_0(job: Callable[[], T]) -> T | None:
    """Return what `job` returned on rank 0, which alone runs it; None on the others. A collective.

    Raises:
        TrainError: on all ranks, what `job` raised on rank 0.
    """
    result, failure = None, None
    if rank() == 0:
        try:
            result = job()
        except TrainError as error:
            failure = error
    problem = broadcast_json({"text": str(failure), "is_config": isinstance(failure, ConfigError)} if failure else None)
    if failure:
        raise failure
    if problem:
        raise (ConfigError if problem["is_config"] else CheckpointError)(problem["text"])
    return result


def broadcast_tensor(value: Tensor) -> Tensor:
    """Return rank 0's `value`; on the other ranks `value` gives shape, dtype and device, and is overwritten. A collective."""
    if is_distributed():
        held = value.to(_wire(None)) if value.device.type == "cpu" else value.contiguous()
        dist.broadcast(held, src=0)
        return held
    return value


def _wire(group: Any) -> torch.device:
    """The device whose tensors the process group carries."""
    if "gloo" in dist.get_backend_config(group):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _tensor(payload: bytes, wire: torch.device) -> Tensor:
    # a copy, which torch may write to; frombuffer refuses an empty one
    return torch.frombuffer(bytearray(payload), dtype=torch.uint8).to(wire) if payload else torch.empty(0, dtype=torch.uint8, device=wire)


def _bytes(data: Tensor) -> bytes:
    return data.cpu().numpy().tobytes()
