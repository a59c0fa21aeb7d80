"""The state of every random generator that a training step may use, as tensors: Python, numpy, torch on the CPU and on CUDA."""

import hashlib
import random
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_NEEDED = {"torch_cpu", "python.words", "python.gauss"}
_FORMS = {
    "torch_cpu": {(torch.uint8, (len(torch.get_rng_state()),))},
    # a seed and an offset
    "torch_cuda": {(torch.uint8, (16,))},
    "python.words": {(torch.int64, (626,))},
    "python.gauss": {(torch.float64, (0,)), (torch.float64, (1,))},
    "numpy.words": {(torch.int64, (626,))},
    "numpy.gauss": {(torch.float64, (1,))},
}
"""Generator -> the dtypes and shapes that its state may have."""
_PYTHON_VERSION = 3
"""Version number in the state that `random.getstate` returns."""


def seed_rng(seed: int) -> None:
    """Seed every generator of this process with `seed`, so that two runs draw the same numbers from the first step on."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        # numpy takes seeds of at most 32 bits
        numpy.random.seed(seed % 2**32)


def capture_rng() -> dict[str, Tensor]:
    """Return the state of this process's generators; numpy's only if numpy was imported."""
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


def to_json(state: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return `state` as plain values for JSON: name -> dtype and numbers."""
    return {name: [str(value.dtype).removeprefix("torch."), value.tolist()] for name, value in state.items()}


def from_json(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors that `to_json` converted."""
    return {name: torch.tensor(values, dtype=getattr(torch, dtype)) for name, (dtype, values) in state.items()}


def require_rng(state: Mapping[str, Tensor]) -> None:
    """Check that `restore_rng` can set the `state` of a process's generators.

    Raises:
        ValueError: naming the generator that it cannot set.
    """
    forms = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in state.items()}
    for name in sorted(_NEEDED - forms.keys()):
        raise ValueError(f"{name} is missing")
    if ("numpy.words" in forms) != ("numpy.gauss" in forms):
        raise ValueError("numpy.words and numpy.gauss belong together")
    for name, form in forms.items():
        if form not in _FORMS.get(name, ()):
            raise ValueError(f"{name} is no state of a generator: {form[0]} {list(form[1])}")
    # torch refuses wrong bytes
    torch.Generator().set_state(state["torch_cpu"])
    version, *words = state["python.words"].tolist()
    if version != _PYTHON_VERSION or not _is_twister(words):
        raise ValueError("python.words holds numbers that no generator has")
    if "numpy.words" in state:
        *words, has_gauss = state["numpy.words"].tolist()
        if has_gauss not in (0, 1) or not _is_twister(words):
            raise ValueError("numpy.words holds numbers that no generator has")
    for name in ("python.gauss", "numpy.gauss"):
        if name in state and not state[name].isfinite().all():
            raise ValueError(f"{name} is not finite")


def _is_twister(words: Sequence[int]) -> bool:
    """Return whether `words` are 624 numbers of 32 bits and a position among them; numpy would read out of bounds at another position."""
    *keys, position = words
    return all(0 <= key < 2**32 for key in keys) and 0 <= position <= len(keys)


def restore_rng(state: Mapping[str, Tensor]) -> None:
    """Set this process's generators to `state`, from `capture_rng`; generators absent from it are not changed.

    Raises:
        ValueError: if `state` is not such a state; no generator is changed then.
    """
    require_rng(state)
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
    """Seed the generators of a rank that the checkpoint has no state for: repeatably, and differently from every other rank."""
    source = bytes(state_of_rank_0["torch_cpu"].tolist()) + f" {step} {rank}".encode()
    seed_rng(int.from_bytes(hashlib.sha256(source).digest()[:4], "big"))
