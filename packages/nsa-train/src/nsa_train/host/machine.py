"""The machine of a run: this one, or one described by name, so that preflight works without it."""

import difflib
import sys

import torch
from attrs import frozen

from nsa_train.errors import ConfigError
from nsa_train.host.chips import CHIPS
from nsa_train.host.environment import proc_fields
from nsa_train.settings.config import RunConfig, listed

DEFAULT_CHIP = "a100"
"""The chip that preflight assumes if a recipe needs a GPU and there is none."""


@frozen(kw_only=True)
class Machine:
    """The properties of a machine that preflight checks."""

    device_type: str
    name: str
    compute_capability: tuple[int, int] | None = None
    """(major, minor) of its GPUs; None without a GPU."""
    memory_gib: float | None = None
    """Memory of one GPU, or of the host without a GPU; None: not known."""
    num_gpus: int = 0
    is_here: bool = True
    """False: the machine is only described."""


def machine_of(device: torch.device) -> Machine:
    """Return this machine, as seen from `device`."""
    if device.type != "cuda":
        available = proc_fields("/proc/meminfo").get("MemAvailable")
        memory_gib = int(available.split()[0]) / 2**20 if available else None
        return Machine(device_type=device.type, name=device.type, memory_gib=memory_gib)
    properties = torch.cuda.get_device_properties(device)
    return Machine(
        device_type="cuda",
        name=properties.name,
        compute_capability=(properties.major, properties.minor),
        memory_gib=properties.total_memory / 2**30,
        num_gpus=torch.cuda.device_count(),
    )


def described_machine(name: str, num_gpus: int = 1) -> Machine:
    """Return the machine that `name` describes: "cpu" or a chip of `nsa_train.host.chips`.

    Raises:
        ConfigError: for an unknown name.
    """
    if name == "cpu":
        return Machine(device_type="cpu", name="cpu", is_here=False)
    if name not in CHIPS:
        near = difflib.get_close_matches(name, CHIPS, n=1)
        advice = f"did you mean {near[0]}?" if near else f"use one of {listed(('cpu', *CHIPS))}"
        raise ConfigError(f"--machine={name!r} is not a machine that preflight can describe; {advice}")
    chip = CHIPS[name]
    return Machine(
        device_type="cuda",
        name=chip.name,
        compute_capability=chip.compute_capability,
        memory_gib=chip.memory_gib,
        num_gpus=num_gpus,
        is_here=False,
    )


def target_machine(config: RunConfig) -> Machine:
    """Return the machine that a run of `config` would use here; if it needs a GPU that is missing, a described machine."""
    wanted = config.train.device
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return machine_of(torch.device("cpu"))
    if torch.cuda.is_available():
        return machine_of(torch.device("cuda", 0))
    return described_machine(DEFAULT_CHIP, max(1, config.train.nproc_per_node))


def processes_of(config: RunConfig, machine: Machine) -> int:
    """Return the number of processes of one host: train.nproc_per_node, or one per GPU if that is 0."""
    if config.train.strategy == "single":
        return 1
    return config.train.nproc_per_node or machine.num_gpus or 1


def peak_memory_mib(device: torch.device) -> float:
    """Return the peak memory so far, in MiB: of the GPU if there is one, else of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    # the process's own peak in kibibytes; ru_maxrss would start at the parent's memory at the fork
    if peak := proc_fields("/proc/self/status").get("VmHWM"):
        return int(peak.split()[0]) / 2**10
    import resource

    # kibibytes, but bytes on macOS
    unit = 1 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


def gpu_memory(device: torch.device) -> dict[str, float | None]:
    """Return the heartbeat's memory fields, in the units of their names; None without a GPU."""
    units = {"mib": 2**20, "gib": 2**30}
    if device.type != "cuda":
        return {f"gpu_mem_{name}_{unit}": None for name in ("alloc", "reserved") for unit in units}
    sizes = {"alloc": torch.cuda.memory_allocated(device), "reserved": torch.cuda.memory_reserved(device)}
    return {f"gpu_mem_{name}_{unit}": size / factor for name, size in sizes.items() for unit, factor in units.items()}
