"""The environment of this process: its variables, its packages, and the content of env.json. Imports no torch."""

import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nsa_core.environment import describe_environment as core_environment
from nsa_core.environment import version_of

if TYPE_CHECKING:
    import torch

ENVIRONMENT = os.environ  # noqa: TID251 - torchrun and our launcher speak to a worker through it

PACKAGES = (
    *("nsa-core", "nsa-train", "nsa-kernels-triton", "nsa-kernels-cuda", "torch", "torchdata", "triton", "datasets", "numpy"),
    *("safetensors", "attrs", "cattrs", "tensorboard"),
)
"""Packages that env.json names."""


DRAWN_BY = ("jinja2", "matplotlib", "tensorboard")
"""Packages of the extra `report`, which draw runs."""
RUNS_ON = ("nsa-train", "nsa-core", "nsa-kernels-triton", "torch", "triton")
"""Packages that `--version` names, its own first."""


def is_under_torchrun() -> bool:
    """Return True if the environment assigns this process a rank."""
    return "RANK" in ENVIRONMENT and "WORLD_SIZE" in ENVIRONMENT


def proc_fields(path: str) -> dict[str, str]:
    """Return the fields of a file of /proc with a line `name: value` for each; empty if there is no such file."""
    try:
        lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def missing_report() -> str:
    """Return why runs are not drawn, and a command that fixes it; empty if the packages of the extra `report` are installed."""
    missing = [name for name in DRAWN_BY if version_of(name) is None]
    if not missing:
        return ""
    return (
        f"{', '.join(missing)} not installed (the extra nsa-train[report] draws curves.png, report.html and tb/); "
        f"use pip install {' '.join(missing)}"
    )


def describe_environment(device: "torch.device", routing: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return the content of env.json; `routing`: operation -> the decision, readable; `more`: what the caller adds."""
    found = core_environment(PACKAGES, Path(__file__).parent)
    own = {"host": platform.node(), "device": device.type, "threads": found["num_threads"]}
    # a run on the CPU lists no GPU, even if the host has some
    gpu = {} if device.type == "cuda" else {"gpu": None, "compute_capability": None}
    return {**found, **own, **gpu, "routing": routing, **more}
