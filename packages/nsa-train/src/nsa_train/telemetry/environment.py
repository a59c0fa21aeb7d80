"""env.json: when, on what, with which versions and from which commit a run was made."""

import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from nsa_train.versions import version_of

PACKAGES = (
    *("nsa-core", "nsa-train", "nsa-kernels-triton", "nsa-kernels-cuda", "torch", "torchdata", "triton", "datasets", "numpy"),
    *("safetensors", "attrs", "cattrs", "tensorboard"),
)


def describe_environment(device: torch.device, routing: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return the content of env.json; `routing`: operation -> the decision, readable; `more`: what the caller adds."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": version_of("triton"),
        "cuda": torch.version.cuda,
        "platform": platform.platform(),
        "host": platform.node(),
        "machine": platform.machine(),
        "device": device.type,
        "threads": torch.get_num_threads(),
        **_gpu(device),
        "commit": commit_of(Path(__file__).parent),
        "packages": {name: found for name in PACKAGES if (found := version_of(name))},
        "routing": routing,
        **more,
    }


def commit_of(folder: Path) -> str | None:
    """Return the git commit of `folder`, with `-dirty` where files differ from it; None outside a checkout."""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() or None if result.returncode == 0 else None


def peak_memory_mib(device: torch.device) -> float:
    """Return the most memory held so far, in MiB: of the GPU where there is one, else of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    status = Path("/proc/self/status")
    if status.exists():
        # the process's own peak in kibibytes; ru_maxrss would start at what its parent held when it was forked
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) / 2**10
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


def _gpu(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {"gpu": None, "compute_capability": None}
    properties = torch.cuda.get_device_properties(device)
    return {"gpu": properties.name, "compute_capability": f"{properties.major}.{properties.minor}"}
