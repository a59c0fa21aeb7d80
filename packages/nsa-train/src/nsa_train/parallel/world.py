"""The processes of a run, which exchange decisions over gloo, from host to host, so that no decision waits for a GPU; and sharded tensors."""

import json
import re
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor
from torch._C._distributed_c10d import HashStore, PrefixStore, TCPStore
from torch.distributed.rendezvous import rendezvous

from nsa_train.errors import ConfigError, LostContactError, PeerError, TrainError
from nsa_train.host.environment import ENVIRONMENT, is_under_torchrun

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

SIGNS = ("gloo/transport/", "ncclRemoteError", "remote process exited")
"""Parts of gloo's and NCCL's messages if a connection is lost or times out."""
T = TypeVar("T")
R = TypeVar("R", bound=tuple[Any, ...])
TIMEOUT = timedelta(minutes=30)
"""The longest wait of ranks for one of them, in an exchange or a reduction."""


@contextmanager
def contact_kept(rank: int) -> Iterator[None]:
    """Convert errors of collectives in the block into LostContactError if another rank is gone; other errors pass unchanged.

    Raises:
        LostContactError: if an exchange of `rank` with another rank failed.
    """
    try:
        yield
    except RuntimeError as error:
        if not _is_broken_off(error):
            raise
        raise LostContactError(
            f"rank {rank}: lost contact with another rank ({_cause(error)}); its message, or the launcher's, says why; go on with --resume"
        ) from None


def _is_broken_off(error: RuntimeError) -> bool:
    if isinstance(error, (dist.DistNetworkError, dist.DistStoreError)):
        return True
    # "enforce fail" is a local failure of gloo, such as a missing network interface, not the loss of another rank
    return "enforce fail" not in str(error) and any(sign in str(error) for sign in SIGNS)


def _cause(error: RuntimeError) -> str:
    """Return the first sentence of `error`, without the line of the library's source that it may begin with."""
    text = re.sub(r"^\[\S+\]\s*", "", str(error)).splitlines()[0]
    return text.partition(". ")[0][:200]


@frozen(kw_only=True, eq=False)
class World:
    """This process and its peers, with their only way to exchange data. The default has no peers.

    Ranks exchange only JSON, as uint8 tensors on the CPU, and weights: lint bans torch's object collectives, which unpickle the data that
    they receive. A tuple is returned as a list, except by `exchange`.
    """

    device: torch.device
    rank: int = 0
    world_size: int = 1
    store: Any = None
    """A key-value store that all ranks see; None for a single process."""
    is_restart: bool = False
    """True if torchrun restarted the processes after one of them failed."""
    restarts_left: int = 0
    """How often torchrun may still restart them."""

    @property
    def is_main(self) -> bool:
        """True on the one rank that writes and prints."""
        return self.rank == 0

    def gather(self, item: Any) -> list[Any]:
        """Return the `item` of every rank, by rank; items are plain values for JSON. A collective: all ranks call it."""
        payload = json.dumps(item).encode()
        return [json.loads(part) for part in (_gathered(payload) if self.world_size > 1 else [payload])]

    def exchange(self, row: R) -> list[R]:
        """Return the `row` of every rank, by rank: a NamedTuple of plain values for JSON. A collective."""
        return [type(row)(*found) for found in self.gather(row)]

    def from_main(self, item: Any = None) -> Any:
        """Return the main rank's `item`, plain values for JSON, on every rank. A collective."""
        payload = json.dumps(item if self.is_main else None).encode()
        return json.loads(_broadcast(payload, is_main=self.is_main) if self.world_size > 1 else payload)

    def on_main(self, job: Callable[[], T]) -> T | None:
        """Run `job` on the main rank only, and return its result there; None on the other ranks. A collective.

        Raises:
            TrainError: on the main rank, the error of `job`; on the others a PeerError with its message and its exit code.
        """
        result, failure = None, None
        if self.is_main:
            try:
                result = job()
            except TrainError as error:
                failure = error
        failed = self.from_main([str(failure), failure.exit_code] if failure else None)
        if failure:
            raise failure
        if failed:
            raise PeerError(failed[0], exit_code=failed[1])
        return result

    def broadcast(self, value: Tensor) -> Tensor:
        """Return the main rank's `value`; on other ranks `value` gives shape, dtype and device, and is overwritten. A collective."""
        if self.world_size == 1:
            return value
        held = value.contiguous()
        dist.broadcast(held, src=0)
        return held

    def barrier(self) -> None:
        """Wait for every rank."""
        self.gather(None)


def here() -> World:
    """Return the world of this process, from the process group that it joined; a single process without one."""
    is_joined = dist.is_available() and dist.is_initialized()
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if is_joined else (0, 1)
    return World(device=torch.device("cpu"), rank=rank, world_size=world_size)


def _gathered(payload: bytes) -> list[bytes]:
    length = torch.tensor([len(payload)])
    lengths = [torch.empty_like(length) for _ in range(dist.get_world_size())]
    dist.all_gather(lengths, length)
    padded = torch.zeros(max(map(int, lengths)), dtype=torch.uint8)
    padded[: len(payload)] = _tensor(payload)
    received = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(received, padded)
    return [_bytes(part[: int(found)]) for part, found in zip(received, lengths, strict=True)]


def _broadcast(payload: bytes, *, is_main: bool) -> bytes:
    length = torch.tensor([len(payload)])
    dist.broadcast(length, src=0)
    data = _tensor(payload) if is_main else torch.empty(int(length), dtype=torch.uint8)
    dist.broadcast(data, src=0)
    return _bytes(data)


def _tensor(payload: bytes) -> Tensor:
    # a copy, which torch may write to
    return torch.frombuffer(bytearray(payload), dtype=torch.uint8)


def _bytes(data: Tensor) -> bytes:
    return data.numpy().tobytes()


def asked_world_size() -> int | None:
    """Return the number of processes in the environment (WORLD_SIZE); None if it is not set.

    Raises:
        ConfigError: if it is not a number of processes.
    """
    text = ENVIRONMENT.get("WORLD_SIZE")
    if text is None:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"WORLD_SIZE={text!r} in the environment is not a number of processes; unset it, or use 1")
    return int(text)


def local_device(wanted: str, local_rank: int) -> torch.device:
    """Return the device of a host's process `local_rank`: its own CUDA device, or the CPU if there is none or none should be used.

    Raises:
        ConfigError: if the host has fewer CUDA devices than processes.
    """
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise ConfigError(
            f"LOCAL_RANK={local_rank} has no separate CUDA device (this host has {count}); use --nproc {max(count, 1)}"
            + ("" if count else " --set train.device=cpu")
        )
    return torch.device("cuda", local_rank)


@contextmanager
def join_world(strategy: str, device: str = "auto") -> Iterator[World]:
    """Join the process group that torchrun started, or run alone, on `device` (train.device); leave the group at the end.

    Raises:
        ConfigError: for `strategy` "single" among several processes.
        LostContactError: from the block, when another process is gone.
    """
    environment = ENVIRONMENT if is_under_torchrun() else {}
    world_size = int(environment.get("WORLD_SIZE", "1"))
    if strategy == "single":
        if world_size > 1:
            raise ConfigError(
                f"train.strategy='single' is one process, torchrun started {world_size} (each would train alone); use --set train.strategy=ddp"
            )
        yield World(device=local_device(device, 0), **_starts(environment))
        return
    own_device = local_device(device, int(environment.get("LOCAL_RANK", "0")))
    if own_device.type == "cuda":
        torch.cuda.set_device(own_device)
    rank, store = _rendezvous(alone=not environment)
    with contact_kept(rank):
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if own_device.type == "cuda" else "gloo",
            store=PrefixStore("run", store),
            rank=rank,
            world_size=world_size,
            timeout=TIMEOUT,
        )
    try:
        with contact_kept(rank):
            yield World(device=own_device, rank=rank, world_size=world_size, store=PrefixStore("stops", store), **_starts(environment))
    finally:
        dist.destroy_process_group()


def _starts(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the start that torchrun counts, as fields of a `World`."""
    count, most = (int(environment.get(f"TORCHELASTIC_{name}", "0")) for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    return {"is_restart": count > 0, "restarts_left": max(0, most - count)}


def _rendezvous(*, alone: bool) -> tuple[int, Any]:
    """Return this process's rank and a store that all ranks share."""
    if alone:
        return 0, HashStore()
    store, rank, _ = next(rendezvous("env://", timeout=TIMEOUT))
    # torchrun's store outlives the processes: entries from before a restart must not be read
    store = PrefixStore(f"start-{ENVIRONMENT.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    return rank, _own_store(store, rank) if ENVIRONMENT.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else store


def _own_store(agents: Any, rank: int) -> Any:
    """Return a store in rank 0's process. `agents`, the store of torchrun's agent, ends with the agent, but the ranks live longer, to save."""
    if rank == 0:
        own = TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
        agents.set("store", json.dumps([_address(), own.port]))
        return own
    host, port = json.loads(agents.get("store"))
    return TCPStore(host, port, wait_for_workers=False, timeout=TIMEOUT)


def _address() -> str:
    """Return this host's address as the host of torchrun's agent sees it."""
    agents = ENVIRONMENT["MASTER_ADDR"]
    with socket.create_connection((agents, int(ENVIRONMENT["MASTER_PORT"]))) as connection:
        here, there = (end[0] for end in (connection.getsockname(), connection.getpeername()))
    # on the agent's own host: `here` may be a loopback address, but other hosts found the agent by its name
    return agents if here == there else str(here)


def is_sharded(tensor: Tensor) -> "TypeGuard[DTensor]":
    """Return True for a DTensor. Its module takes a second to load, and only FSDP loads it; without it there are none."""
    loaded = sys.modules.get("torch.distributed.tensor")
    return loaded is not None and isinstance(tensor, loaded.DTensor)


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a sharded tensor, or the tensor itself."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """Return a sharded tensor in full, gathered by all ranks together, or the tensor itself."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor
