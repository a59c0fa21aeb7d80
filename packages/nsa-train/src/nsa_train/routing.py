"""Which backend serves each attention operation of a run, known before it starts."""

import torch

from nsa_core import BranchRequest, Layout, Operation, RoutingDecision, explain_routing
from nsa_train.config import RunConfig

NEEDED_BY = {Operation.CMP: {"cmp", "slc"}, Operation.SELECT: {"slc"}, Operation.SLC: {"slc"}, Operation.WIN: {"win"}}
"""The branches that run each operation."""


def pick_device() -> torch.device:
    """Return the first CUDA device, or the CPU where there is none."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def routing_decisions(config: RunConfig, device: torch.device) -> dict[str, RoutingDecision]:
    """Return operation -> decision for the training batches of `config`; empty for the dense twin."""
    if config.model.attention == "dense":
        return {}
    nsa = config.nsa_config()
    # blocks are chosen by compressed scores, so the selected branch brings both operations along
    operations = [operation for operation, branches in NEEDED_BY.items() if branches & set(nsa.branches)]
    return {
        operation.value: explain_routing(_request(config, operation, device), nsa.backends.get(operation.value, "auto"))
        for operation in operations
    }


def _request(config: RunConfig, operation: Operation, device: torch.device) -> BranchRequest:
    train, model = config.train, config.model
    dtype = torch.bfloat16 if train.precision == "bf16" else torch.float32
    total = train.batch_size * train.seq_len
    return BranchRequest(
        operation=operation,
        geometry=config.nsa_config().geometry,
        device_type=device.type,
        compute_capability=torch.cuda.get_device_capability(device) if device.type == "cuda" else None,
        dtype=dtype,
        kv_dtype=dtype,
        batch=1,
        num_sequences=train.batch_size,
        num_queries=total,
        num_keys=train.seq_len,
        num_heads=model.n_heads,
        num_kv_heads=model.n_kv_heads,
        head_dim_qk=model.head_dim_qk,
        head_dim_v=model.head_dim_v if operation.value in config.nsa.branches else model.head_dim_qk,
        layout=Layout.PACKED,
        needs_grad=operation is not Operation.SELECT,
        deterministic=train.deterministic,
    )
