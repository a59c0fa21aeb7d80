"""Options of a conversion, and the gate logits that follow from them."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from attrs import field, frozen
from torch import Tensor

from nsa_core.config import BRANCHES, KeysValues, NSAConfig
from nsa_core.errors import ConfigError
from nsa_transformers.conversion.tensor_files import SHARD_BYTES

Gates = Literal["open", "selected"]
OPENED, CLOSED = 20.0, -104.0
"""Gate logits whose sigmoid in float32 is 1 and 0."""
FROM_SOURCE = ("rope_theta", "rope_scaling", "qk_norm", "qk_norm_eps", "qkv_bias")
"""Keys of `nsa` that the source's config.json decides."""


def _choice(choices: tuple[str, ...]) -> Any:
    def check(instance: object, attribute: Any, value: object) -> None:
        if value not in choices:
            names = ", ".join(repr(name) for name in choices)
            raise ConfigError(f"--{attribute.name}={value!r} is unknown (the rule: one of {names}); use {choices[0]!r}")

    return check


@frozen(kw_only=True)
class ConversionOptions:
    """Settings of an NSA model that a dense checkpoint does not determine.

    Raises:
        ConfigError: for an invalid option, which the message names.
    """

    kv: KeysValues = field(default="shared", validator=_choice(("shared", "separate")))
    """`shared`: the source's K and V serve all branches. `separate`: each branch has a copy."""
    gates: Gates = field(default="open", validator=_choice(get_args(Gates)))
    """`open`: all branches of a layer have the same gate. `selected`: only the selected branch is open, or the window in layers without one."""
    nsa: Mapping[str, Any] = field(factory=dict)
    """Keys of the table `nsa` of config.json: sizes of blocks, phi, gate, branches."""
    layers: Sequence[Any] | None = None
    """The pattern `layers` of config.json, which is repeated a whole number of times; None: all layers are sparse."""
    shard_bytes: int = SHARD_BYTES
    """Maximum number of bytes of tensors in a file."""

    def __attrs_post_init__(self) -> None:
        if self.layers is not None and not (isinstance(self.layers, list | tuple) and self.layers):
            raise ConfigError(f"--layers={self.layers!r} is no pattern (the rule: a list of at least one entry); use '[\"nsa\"]'")
        for key in self.nsa:
            if key == "kv":
                raise ConfigError(f"--nsa kv={self.nsa[key]} is a separate option; use --kv {self.nsa[key]}")
            if key == "backends":
                raise ConfigError(
                    f"--nsa backends={self.nsa[key]!r} is not kept (each machine chooses its backends); leave it out, and set nsa.backends of the run"
                )
            if key in FROM_SOURCE:
                raise ConfigError(f"--nsa {key}={self.nsa[key]!r} is decided by the source's config.json; leave it out")


def dense_branch(config: NSAConfig) -> str:
    """Return the branch that equals dense attention on short sequences: "slc", or "win" in a layer without "slc".

    Raises:
        ConfigError: for a layer with only the compressed branch.
    """
    found = [branch for branch in ("slc", "win") if branch in config.branches]
    if not found:
        raise ConfigError(
            f"branches={list(config.branches)} reads no token as the dense layer did (nothing could be verified); use branches=['cmp', 'win']"
        )
    return found[0]


def gate_logits(config: NSAConfig, gates: Gates) -> Tensor:
    """Return gate logits (3,) for cmp, slc and win, float32, that open one branch of a layer, or give all of them the same gate.

    With k branches, `open` gives each the gate 1/k: a sigmoid of ln(1 / (k - 1)), or a softmax of zeros.
    """
    opened, value = config.branches, 0.0
    if gates == "selected" or len(opened) == 1:
        opened, value = (dense_branch(config),), OPENED
    elif config.gate == "sigmoid":
        value = -math.log(len(opened) - 1)
    logits = torch.tensor([value if branch in opened else CLOSED for branch in BRANCHES])
    return logits * config.gate_temperature
