"""Native Sparse Attention (arXiv 2502.11089): the layer, a reference backend for any device, and the interface for kernels.

Public names are loaded lazily, so `nsa_core.config` and `nsa_core.errors` alone need no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from nsa_core.__about__ import __version__

if TYPE_CHECKING:
    from nsa_core.attention import (
        attend,
        compress_mean,
        compressed_attention,
        nsa_attention,
        select_blocks,
        selected_attention,
        sliding_window_attention,
    )
    from nsa_core.backends.base import (
        BranchBackend,
        BranchOutput,
        BranchRequest,
        Capability,
        FusedOutput,
        Keys,
        Layout,
        Operation,
        Queries,
        Reason,
        ReasonKind,
    )
    from nsa_core.backends.ops import attention_op
    from nsa_core.backends.registry import BackendRegistry, RoutingDecision
    from nsa_core.config import BlockGeometry, NSAConfig, RopeScaling
    from nsa_core.dispatch import explain_routing
    from nsa_core.errors import (
        BackendUnavailableError,
        CacheOverflowError,
        ConfigError,
        DuplicateBackendError,
        InputError,
        NSAError,
    )
    from nsa_core.kv_cache import CacheOptions, NSACache
    from nsa_core.module import NativeSparseAttention
    from nsa_core.plugins.manager import default_plugins, default_registry, load_plugins
    from nsa_core.serialization import config_from_dict, config_from_toml, config_to_dict, config_to_toml
    from nsa_core.telemetry import LayerTelemetry

_HOMES = {
    "attention": (
        *("attend", "compress_mean", "compressed_attention", "nsa_attention"),
        *("select_blocks", "selected_attention", "sliding_window_attention"),
    ),
    "backends.base": (
        *("BranchBackend", "BranchOutput", "BranchRequest", "Capability", "FusedOutput", "Keys", "Layout"),
        *("Operation", "Queries", "Reason", "ReasonKind"),
    ),
    "backends.ops": ("attention_op",),
    "backends.registry": ("BackendRegistry", "RoutingDecision"),
    "config": ("BlockGeometry", "NSAConfig", "RopeScaling"),
    "dispatch": ("explain_routing",),
    "errors": ("BackendUnavailableError", "CacheOverflowError", "ConfigError", "DuplicateBackendError", "InputError", "NSAError"),
    "kv_cache": ("CacheOptions", "NSACache"),
    "module": ("NativeSparseAttention",),
    "plugins.manager": ("default_plugins", "default_registry", "load_plugins"),
    "serialization": ("config_from_dict", "config_from_toml", "config_to_dict", "config_to_toml"),
    "telemetry": ("LayerTelemetry",),
}
"""Module -> the public names that it holds."""

__all__ = [
    "BackendRegistry",
    "BackendUnavailableError",
    "BlockGeometry",
    "BranchBackend",
    "BranchOutput",
    "BranchRequest",
    "CacheOptions",
    "CacheOverflowError",
    "Capability",
    "ConfigError",
    "DuplicateBackendError",
    "FusedOutput",
    "InputError",
    "Keys",
    "LayerTelemetry",
    "Layout",
    "NSACache",
    "NSAConfig",
    "NSAError",
    "NativeSparseAttention",
    "Operation",
    "Queries",
    "Reason",
    "ReasonKind",
    "RopeScaling",
    "RoutingDecision",
    "__version__",
    "attend",
    "attention_op",
    "compress_mean",
    "compressed_attention",
    "config_from_dict",
    "config_from_toml",
    "config_to_dict",
    "config_to_toml",
    "default_plugins",
    "default_registry",
    "explain_routing",
    "load_plugins",
    "nsa_attention",
    "select_blocks",
    "selected_attention",
    "sliding_window_attention",
]


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            # cached in the module, so that the next use does not call __getattr__
            found = globals()[name] = getattr(import_module(f"{__name__}.{home}"), name)
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
