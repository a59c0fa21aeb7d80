"""When, on what machine, with which versions and from which commit a result was made. Importing this loads no torch."""

import os
import platform
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

OURS = "nsa-"


def describe_environment(packages: Iterable[str], folder: Path) -> dict[str, Any]:
    """Return what `nsa-bench env` prints, as JSON values; missing ones are None.

    `compute_capability` is "9.0" for (9, 0), `gpu` the first device's name, `cuda` the version that torch was built
    for, `commit` that of `folder`, with `-dirty` where files differ from it. `packages` holds the installed ones of `packages`.
    """
    import torch

    has_gpu = torch.cuda.is_available()
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpu": cpu_name(),
        "num_cores": os.cpu_count(),
        "num_threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name(0) if has_gpu else None,
        "num_gpus": torch.cuda.device_count(),
        "compute_capability": dotted(torch.cuda.get_device_capability(0)) if has_gpu else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": version_of("triton"),
        "cuda": torch.version.cuda,
        "commit": commit_of(folder),
        "packages": {name: found for name in packages if (found := version_of(name))},
    }


def dotted(capability: tuple[int, int]) -> str:
    """Return a compute capability as text: "9.0"."""
    return ".".join(map(str, capability))


def version_of(package: str) -> str | None:
    """Return the version of a package, or None if it is not installed.

    A package of this project states its version itself, also in a checkout that is not installed.
    """
    if package.startswith(OURS):
        with suppress(ModuleNotFoundError):
            return str(import_module(f"{package.replace('-', '_')}.__about__").__version__)
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def version_lines(packages: Iterable[str]) -> str:
    """Return the output of a command's `--version`: a line for each package, its own first, then Python and the platform."""
    lines = (f"{name} {version_of(name) or 'not installed'}" for name in packages)
    return "\n".join([*lines, f"Python {platform.python_version()}", platform.platform()])


def commit_of(folder: Path) -> str | None:
    """Return the git commit of `folder`, with `-dirty` where files differ from it; None outside a checkout."""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() or None if result.returncode == 0 else None


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str | None:
    """Return the processor's name; on Linux the platform module lacks it."""
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or None
