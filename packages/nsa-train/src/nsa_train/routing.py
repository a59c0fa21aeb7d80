"""Which backend serves each attention operation of a run, known before it starts, also for a machine that is not here."""

import torch

from nsa_core import BranchRequest, Layout, Operation, RoutingDecision, default_registry, explain_routing
from nsa_train.config import RunConfig
from nsa_train.machine import Machine, machine_of, processes_of

NEEDED_BY = {Operation.CMP: {"cmp", "slc"}, Operation.SELECT: {"slc"}, Operation.SLC: {"slc"}, Operation.WIN: {"win"}}
"""The branches that run each operation."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""By train.precision: what the attention computes in."""


def routing_decisions(config: RunConfig, where: torch.device | Machine) -> dict[str, RoutingDecision]:
    """Return operation -> decision for the training batches of `config`; empty for the dense twin.

    `nsa`, all of Eq. 5 in one, is among them where a backend of it is installed and all branches are trained.
    """
    if config.model.attention == "dense":
        return {}
    nsa, machine = config.nsa_config(), where if isinstance(where, Machine) else machine_of(where)
    # blocks are chosen by compressed scores, so the selected branch brings both operations along
    operations = [operation for operation, branches in NEEDED_BY.items() if branches & set(nsa.branches)]
    if len(nsa.branches) == 3 and any(backend.operation is Operation.NSA for backend in default_registry().backends):
        operations.append(Operation.NSA)
    return {
        operation.value: explain_routing(_request(config, operation, machine), nsa.backends.get(operation.value, "auto"))
        for operation in operations
    }


def _request(config: RunConfig, operation: Operation, machine: Machine) -> BranchRequest:
    train, model = config.train, config.model
    dtype = DTYPES[train.precision]
    rows = max(1, train.batch_size // processes_of(config, machine))
    return BranchRequest(
        operation=operation,
        geometry=config.nsa_config().geometry,
        device_type=machine.device_type,
        compute_capability=machine.compute_capability,
        dtype=dtype,
        kv_dtype=dtype,
        batch=1,
        num_sequences=rows,
        num_queries=rows * train.seq_len,
        num_keys=train.seq_len,
        num_heads=model.n_heads,
        num_kv_heads=model.n_kv_heads,
        head_dim_qk=model.head_dim_qk,
        head_dim_v=model.head_dim_v if operation.value in (*config.nsa.branches, "nsa") else model.head_dim_qk,
        layout=Layout.PACKED,
        needs_grad=operation is not Operation.SELECT,
        deterministic=train.deterministic,
    )
