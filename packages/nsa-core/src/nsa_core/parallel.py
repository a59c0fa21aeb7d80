"""Tensor parallelism of the layer: a plan for torch's `parallelize_module`. Each rank holds a share of the heads.

    from torch.distributed.tensor.parallel import parallelize_module
    parallelize_module(layer, mesh, tensor_parallel_plan(layer))

The number of ranks must divide the query heads and the KV heads (`check_shares`). All ranks pass the same x and get the same output.
"""

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from nsa_core.compression import ConvCompressor
from nsa_core.errors import ConfigError
from nsa_core.module import NativeSparseAttention


class ColwiseHeads(ColwiseParallel):
    """`ColwiseParallel` for K and V projections; `new_cache` reads `num_shares`, the number of ranks, to allocate this rank's heads."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        found = super()._apply(module, device_mesh)
        found.num_shares = device_mesh.size()  # type: ignore[assignment]
        return found


class SummedGradients(ParallelStyle):
    """Sums the gradients of all ranks, for a module with equal parameters on all ranks, which each rank applies to its own heads."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        group = device_mesh.get_group()

        def add_up(gradient: Tensor) -> Tensor:
            total = gradient.clone()
            dist.all_reduce(total, group=group)
            return total

        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_hook(add_up)
        return module


class ShardedTaps(ParallelStyle):
    """Shards the filters of `compressor="conv"`: each rank holds the filters of its own heads."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters(recurse=False)):
            shard = distribute_tensor(parameter.detach(), device_mesh, [Shard(0)])
            module.register_parameter(name, nn.Parameter(shard, requires_grad=parameter.requires_grad))
        return module


def tensor_parallel_plan(layer: NativeSparseAttention) -> dict[str, ParallelStyle]:
    """Return a plan for `torch.distributed.tensor.parallel.parallelize_module`: a dict from module names of `layer` to styles."""
    plan: dict[str, ParallelStyle] = {"q_proj": ColwiseParallel(), "gate.down": ColwiseParallel(), "o_proj": RowwiseParallel()}
    for name in ("k_proj", "v_proj"):
        module = getattr(layer, name)
        names = [f"{name}.{branch}" for branch in module] if isinstance(module, nn.ModuleDict) else [name]
        plan |= {name: ColwiseHeads() for name in names}
    for name, module in layer.named_children():
        if name.startswith("compress_") or name in ("q_norm", "k_norm"):
            plan[name] = ShardedTaps() if isinstance(module, ConvCompressor) else SummedGradients()
    return plan


def check_shares(layer: NativeSparseAttention, num_ranks: int) -> None:
    """Raise ConfigError unless `num_ranks` divides the numbers of query heads and KV heads of `layer`."""
    config = layer.config
    for name, count in (("num_heads", config.num_heads), ("num_kv_heads", config.num_kv_heads)):
        if count % num_ranks:
            raise ConfigError(
                f"{name}={count} cannot be shared out among {num_ranks} ranks (each takes whole heads); use a divisor of {count}"
            )
