"""Every random generator that a training step may draw from, as tensors: Python's, numpy's, torch's CPU's and CUDA's."""

import hashlib
import random
import sys
from collections.abc import Mapping

import torch
from torch import Tensor


def seed_rng(seed: int) -> None:
    """Start every generator of this process from `seed`, so that two runs draw the same from the first step on."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        # it reads no more than 32 bits
        numpy.random.seed(seed % 2**32)


def capture_rng() -> dict[str, Tensor]:
    """Return the state of this process's generators; numpy's only where something imported it."""
    version, words, gauss = random.getstate()
    state = {
        "torch_cpu": torch.get_rng_state(),
        "python.words": torch.tensor([version, *words], dtype=torch.int64),
        "python.gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        _, keys, position, has_gauss, cached = numpy.random.get_state()
        state["numpy.words"] = torch.tensor([*keys.tolist(), position, has_gauss], dtype=torch.int64)
        state["numpy.gauss"] = torch.tensor([cached], dtype=torch.float64)
    if torch.cuda.is_available():
        state["torch_cuda"] = torch.cuda.get_rng_state()
    return state


def restore_rng(state: Mapping[str, Tensor]) -> None:
    """Put this process's generators where `state`, from `capture_rng`, was taken; those absent from it are left alone."""
    torch.set_rng_state(state["torch_cpu"])
    version, *words = state["python.words"].tolist()
    gauss = state["python.gauss"].tolist()
    random.setstate((version, tuple(words), gauss[0] if gauss else None))
    if "numpy.words" in state:
        import numpy

        *keys, position, has_gauss = state["numpy.words"].tolist()
        numpy.random.set_state(("MT19937", numpy.array(keys, dtype=numpy.uint32), position, has_gauss, state["numpy.gauss"].item()))
    if "torch_cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["torch_cuda"])


def seed_fresh_rng(*, step: int, rank: int, state_of_rank_0: Mapping[str, Tensor]) -> None:
    """Seed the generators of a rank that the checkpoint does not know: repeatable, and unlike every other rank's."""
    source = bytes(state_of_rank_0["torch_cpu"].tolist()) + f" {step} {rank}".encode()
    seed_rng(int.from_bytes(hashlib.sha256(source).digest()[:4], "big"))
