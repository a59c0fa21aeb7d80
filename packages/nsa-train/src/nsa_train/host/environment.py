"""The process's environment: its variables, its packages, its commit, and env.json, which describes all of it. Imports no torch at once."""

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

ENVIRONMENT = os.environ  # noqa: TID251 - torchrun and our launcher speak to a worker through it

PACKAGES = (
    *("nsa-core", "nsa-train", "nsa-kernels-triton", "nsa-kernels-cuda", "torch", "torchdata", "triton", "datasets", "numpy"),
    *("safetensors", "attrs", "cattrs", "tensorboard"),
)
"""Packages that env.json names."""


DRAWN_BY = ("jinja2", "matplotlib", "tensorboard")
"""Packages of the extra `report`."""
RUNS_ON = ("nsa-core", "nsa-train", "nsa-kernels-triton", "torch", "triton")
"""Packages that `--version` names."""


def version_of(package: str) -> str | None:
    """Return the version of an installed package; None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def version_lines(package: str, own_version: str) -> str:
    """Return the output of `--version`: `package` and its version, then a line for each package it runs on, Python and the platform."""
    others = (f"{name} {version_of(name) or 'not installed'}" for name in RUNS_ON if name != package)
    return "\n".join([f"{package} {own_version}", *others, f"Python {platform.python_version()}", platform.platform()])


def missing_report() -> str:
    """Return what keeps runs from being drawn, and what to do; empty where the packages of the extra `report` are installed."""
    missing = [name for name in DRAWN_BY if version_of(name) is None]
    if not missing:
        return ""
    return (
        f"{', '.join(missing)} not installed (the extra nsa-train[report] draws curves.png, report.html and tb/); "
        f"use pip install {' '.join(missing)}"
    )


def describe_environment(device: "torch.device", routing: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return the content of env.json; `routing`: operation -> the decision, readable; `more`: what the caller adds."""
    import torch

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


def _gpu(device: "torch.device") -> dict[str, Any]:
    if device.type != "cuda":
        return {"gpu": None, "compute_capability": None}
    import torch

    properties = torch.cuda.get_device_properties(device)
    return {"gpu": properties.name, "compute_capability": f"{properties.major}.{properties.minor}"}
