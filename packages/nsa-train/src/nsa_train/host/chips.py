"""A table of chips: their peaks, for MFU, and their memory, so that preflight can check a machine that is not present."""

import re

import torch
from attrs import frozen


@frozen
class Chip:
    """A GPU, with figures from its maker's data sheet."""

    name: str
    compute_capability: tuple[int, int]
    memory_gib: float
    dense_bf16_tflops: float
    """Peak of dense bf16 matrix products with float32 accumulation, in TFLOP/s. If a data sheet gives the rate with sparsity, it is half of that."""


CHIPS = {
    "a100": Chip("NVIDIA A100 80GB", (8, 0), 79.3, 312.0),
    "a100-40gb": Chip("NVIDIA A100 40GB", (8, 0), 39.4, 312.0),
    "a10g": Chip("NVIDIA A10G", (8, 6), 22.1, 70.0),
    "rtx3090": Chip("NVIDIA GeForce RTX 3090", (8, 6), 23.7, 71.0),
    "l4": Chip("NVIDIA L4", (8, 9), 22.1, 121.0),
    "l40s": Chip("NVIDIA L40S", (8, 9), 44.4, 362.0),
    "rtx4090": Chip("NVIDIA GeForce RTX 4090", (8, 9), 23.6, 165.2),
    "h100-pcie": Chip("NVIDIA H100 PCIe", (9, 0), 79.1, 756.0),
    "h100-nvl": Chip("NVIDIA H100 NVL", (9, 0), 93.1, 835.0),
    "h100": Chip("NVIDIA H100 SXM", (9, 0), 79.1, 989.0),
    "h20": Chip("NVIDIA H20", (9, 0), 95.6, 148.0),
    "h200": Chip("NVIDIA H200", (9, 0), 139.8, 989.0),
    "h200-nvl": Chip("NVIDIA H200 NVL", (9, 0), 139.8, 835.0),
    "gh200": Chip("NVIDIA GH200", (9, 0), 94.5, 989.0),
    "b200": Chip("NVIDIA B200", (10, 0), 178.4, 2250.0),
}
"""Chips by the names that `nsa-train preflight --machine` accepts."""

_MARKS = (
    *(("GH200", "gh200"), ("H200 NVL", "h200-nvl"), ("H200", "h200"), ("H20", "h20"), ("B200", "b200")),
    *(("H100 NVL", "h100-nvl"), ("H100 PCIe", "h100-pcie"), ("H100", "h100")),
    *(("A100", "a100"), ("A10G", "a10g"), ("L40S", "l40s"), ("L4", "l4"), ("RTX 4090", "rtx4090"), ("RTX 3090", "rtx3090")),
)
"""Pairs of a part of a device's name and the chip; the first pair that matches counts."""


def chip_named(device_name: str) -> Chip | None:
    """Return the chip of a device with that name; None if the table lacks it."""
    return next((CHIPS[key] for mark, key in _MARKS if re.search(rf"(?<!\w){mark}(?!\w)", device_name)), None)


def chip_of(device: torch.device) -> Chip | None:
    """Return the chip of a CUDA device; None on a CPU, or if the table lacks it."""
    return chip_named(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def reason_without_peak(device: torch.device) -> str | None:
    """Return why MFU cannot be computed on `device`; None if it can."""
    if device.type != "cuda":
        return f"no peak is defined for device {device.type}"
    if chip_of(device) is None:
        return f"the table of peaks has no {torch.cuda.get_device_name(device)} (nsa_train/host/chips.py)"
    return None
