"""When, on what and from which commit a result was made; every result file carries it."""

import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import nsa_core
from nsa_bench.__about__ import __version__
from nsa_core.environment import commit_of, version_of
from nsa_train.__about__ import __version__ as nsa_train_version

# these state their versions themselves, also in a checkout that is not installed
OURS = {"nsa-core": nsa_core.__version__, "nsa-train": nsa_train_version, "nsa-bench": __version__}
OTHERS = ("nsa-kernels-triton", "nsa-kernels-cuda", "torch", "triton", "numpy", "flash-attn", "transformers")


def describe_environment() -> dict[str, Any]:
    """Return what `nsa-bench env` prints, as JSON values; what this machine lacks is None.

    `compute_capability` is "9.0" for (9, 0), `gpu` the first device's name, `cuda` the version that torch was built
    for, `commit` that of the checkout, with `-dirty` where files differ from it. `packages` holds installed ones only.
    """
    has_gpu = torch.cuda.is_available()
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpu": _cpu_name(),
        "num_cores": os.cpu_count(),
        "num_threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name(0) if has_gpu else None,
        "num_gpus": torch.cuda.device_count(),
        "compute_capability": dotted(torch.cuda.get_device_capability(0)) if has_gpu else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": version_of("triton"),
        "cuda": torch.version.cuda,
        "commit": commit_of(Path(__file__).parent),
        "packages": OURS | {name: found for name in OTHERS if (found := version_of(name))},
    }


def dotted(capability: tuple[int, int]) -> str:
    """Return a compute capability as people write it: "9.0"."""
    return f"{capability[0]}.{capability[1]}"


def _cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str | None:
    """Return the processor's name; the platform module has it everywhere but on Linux."""
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or None
