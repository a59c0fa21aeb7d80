"""Peaks are dense bf16, found by what a device calls itself."""

import pytest
import torch

from nsa_train.host.chips import CHIPS, chip_named, chip_of, reason_without_peak


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989.0),
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H100 NVL", 835.0),
        ("NVIDIA H200 NVL", 835.0),
        ("NVIDIA GH200 480GB", 989.0),
        ("NVIDIA H20", 148.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A10G", 70.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA B200", 2250.0),
    ],
)
def test_a_device_has_its_peak(name: str, peak: float) -> None:
    chip = chip_named(name)
    assert chip is not None
    assert chip.dense_bf16_tflops == peak


def test_an_unknown_chip_has_none() -> None:
    assert chip_named("Tesla V100-SXM2-16GB") is None
    assert chip_named("NVIDIA L400") is None
    assert chip_of(torch.device("cpu")) is None
    assert reason_without_peak(torch.device("cpu")) == "no peak is defined for device cpu"


def test_every_chip_computes_in_bf16() -> None:
    assert all(chip.compute_capability >= (8, 0) for chip in CHIPS.values())
