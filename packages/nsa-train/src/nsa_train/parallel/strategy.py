"""Strategies by which the processes of a run share a model: one process, copies with averaged gradients (DDP), or shards (FSDP2).

The trainer is the same for all. A strategy wraps the decoder and decides when gradients are exchanged.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from nsa_train.model.decoder import Decoder
from nsa_train.parallel.world import World


class Single:
    """One process. The other strategies have the same interface."""

    factor = 1.0
    """Factor of a rank's loss before the backward pass. It cancels the average over ranks, because the loss is a sum over ranks."""

    def __init__(self, model: Decoder, world: World) -> None:
        self.forward: Any = model
        """Called like the decoder; its backward pass combines the gradients."""

    def accumulating(self, *, is_last: bool) -> AbstractContextManager[Any]:
        """Return the context of one micro-batch; gradients are exchanged only in the last micro-batch of a step."""
        return nullcontext()


class Ddp(Single):
    """Every rank holds the whole model."""

    def __init__(self, model: Decoder, world: World) -> None:
        # the blocks are compiled one by one, so there is nothing to split, and recomputation cannot be split
        torch._dynamo.config.optimize_ddp = False
        self.forward: Any = DistributedDataParallel(
            model,
            device_ids=[world.device] if world.device.type == "cuda" else None,
            gradient_as_bucket_view=True,
        )
        self.factor = float(world.world_size)

    def accumulating(self, *, is_last: bool) -> AbstractContextManager[Any]:
        """Return DDP's `no_sync` for all micro-batches except the last."""
        context: AbstractContextManager[Any] = nullcontext() if is_last else self.forward.no_sync()
        return context


class Fsdp(Single):
    """Every rank holds a shard of each weight, its gradient and its optimizer state; a block is gathered while it runs."""

    def __init__(self, model: Decoder, world: World) -> None:
        # imported here, because these modules take a second to load
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(world.device.type, (world.world_size,), mesh_dim_names=("shard",))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        self.forward: Any = model
        self.factor = float(world.world_size)

    @contextmanager
    def accumulating(self, *, is_last: bool) -> Iterator[None]:
        """Reduce and scatter gradients only after the last micro-batch."""
        self.forward.set_requires_gradient_sync(is_last)
        yield


STRATEGIES: dict[str, type[Single]] = {"single": Single, "ddp": Ddp, "fsdp": Fsdp}
"""Strategies by the names that `train.strategy` allows."""
