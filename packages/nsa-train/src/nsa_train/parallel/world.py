"""The processes of a run. Decisions travel over a gloo group of their own, so that none of them waits for a GPU."""

import json
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen
from torch._C._distributed_c10d import HashStore, PrefixStore, TCPStore
from torch.distributed.rendezvous import rendezvous

from nsa_train.errors import ConfigError
from nsa_train.host.environment import ENVIRONMENT
from nsa_train.parallel.contact import contact_kept
from nsa_train.parallel.ranks import broadcast_json, gather_json

TIMEOUT = timedelta(minutes=30)
"""The longest that ranks wait for one of them, in an exchange or a reduction."""


@frozen(kw_only=True, eq=False)
class World:
    """This process and its peers. The default stands alone."""

    device: torch.device
    rank: int = 0
    world_size: int = 1
    control: Any = None
    """The gloo group of the decisions; None for a process alone."""
    store: Any = None
    """Keys that all ranks see; None for a process alone."""
    is_restart: bool = False
    """True where torchrun started the processes again after one of them failed."""
    restarts_left: int = 0
    """How often torchrun would start them again."""

    @property
    def is_main(self) -> bool:
        """True on the one rank that writes and prints."""
        return self.rank == 0

    def exchange(self, numbers: Sequence[float]) -> list[list[float]]:
        """Return the `numbers` (float64, equally many on each rank) of every rank, by rank."""
        if self.world_size == 1:
            return [list(numbers)]
        mine = torch.tensor(numbers, dtype=torch.float64)
        parts = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(parts, mine, group=self.control)
        return [part.tolist() for part in parts]

    def gather(self, item: Any) -> list[Any]:
        """Return the JSON-able `item` of every rank, by rank; for rare things, as it is slow. A tuple comes back as a list."""
        return gather_json(item, group=self.control)

    def from_main(self, item: Any) -> Any:
        """Return the main rank's JSON-able `item` on every rank. A tuple comes back as a list."""
        return broadcast_json(item, group=self.control)

    def barrier(self) -> None:
        """Wait for every rank."""
        if self.world_size > 1:
            dist.barrier(group=self.control)


def settle_cublas(*, is_deterministic: bool) -> None:
    """Let cuBLAS, which reads the environment when it starts, repeat its sums exactly where that is asked for."""
    if is_deterministic:
        ENVIRONMENT.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def is_under_torchrun() -> bool:
    """Return True where the environment assigns this process a rank."""
    return "RANK" in ENVIRONMENT and "WORLD_SIZE" in ENVIRONMENT


def asked_world_size() -> int | None:
    """Return the processes of the run that the environment asks for (WORLD_SIZE), None where it does not.

    Raises:
        ConfigError: when that is no number of processes.
    """
    text = ENVIRONMENT.get("WORLD_SIZE")
    if text is None:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"WORLD_SIZE={text!r} in the environment is not a number of processes; unset it, or use 1")
    return int(text)


def local_device(wanted: str, local_rank: int) -> torch.device:
    """Return the device of a host's process `local_rank`: a CUDA device of its own, or the CPU where there is or shall be none.

    Raises:
        ConfigError: when the host has fewer CUDA devices than processes.
    """
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise ConfigError(
            f"LOCAL_RANK={local_rank} has no CUDA device of its own (this host has {count}); use --nproc {max(count, 1)}"
            + ("" if count else " --set train.device=cpu")
        )
    return torch.device("cuda", local_rank)


@contextmanager
def join_world(strategy: str, device: str = "auto") -> Iterator[World]:
    """Join the processes that torchrun started, or stand alone, on `device` (train.device); leave them at the end.

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
    place = local_device(device, int(environment.get("LOCAL_RANK", "0")))
    if place.type == "cuda":
        torch.cuda.set_device(place)
    rank, store = _rendezvous(alone=not environment)
    with contact_kept(rank):
        dist.init_process_group(
            "nccl" if place.type == "cuda" else "gloo",
            store=PrefixStore("run", store),
            rank=rank,
            world_size=world_size,
            timeout=TIMEOUT,
        )
    try:
        with contact_kept(rank):
            yield World(
                device=place,
                rank=rank,
                world_size=world_size,
                control=dist.new_group(backend="gloo", timeout=TIMEOUT),
                store=PrefixStore("stops", store),
                **_starts(environment),
            )
    finally:
        dist.destroy_process_group()


def _starts(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return what torchrun says of this start, as fields of a `World`."""
    count, most = (int(environment.get(f"TORCHELASTIC_{name}", "0")) for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    return {"is_restart": count > 0, "restarts_left": max(0, most - count)}


def _rendezvous(*, alone: bool) -> tuple[int, Any]:
    """Return this process's rank and a store that all ranks share."""
    if alone:
        return 0, HashStore()
    store, rank, _ = next(rendezvous("env://", timeout=TIMEOUT))
    # torchrun's own store outlives the processes: what those before a restart left in it must not be read
    store = PrefixStore(f"start-{ENVIRONMENT.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    return rank, _own_store(store, rank) if ENVIRONMENT.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else store


def _own_store(agents: Any, rank: int) -> Any:
    """Return a store that rank 0 keeps: `agents`, the store of torchrun's agent, ends with the agent, and the ranks outlive it to save."""
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
