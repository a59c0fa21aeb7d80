"""Find the backend that serves each attention operation of a run before it starts, also for a machine that is not present."""

from collections.abc import Callable, Iterable, Mapping

import torch
from attrs import evolve

from nsa_core import BranchRequest, Layout, NSAConfig, Operation, RoutingDecision, default_plugins, default_registry, explain_routing
from nsa_train.host.machine import Machine, machine_of, processes_of
from nsa_train.settings.config import RunConfig, listed

NEEDED_BY = {Operation.CMP: {"cmp", "slc"}, Operation.SELECT: {"slc"}, Operation.SLC: {"slc"}, Operation.WIN: {"win"}}
"""Operation -> the branches that need it."""
STEP_OPERATIONS = (Operation.APPEND, Operation.ROTATE)
"""Operations that a step over a cache runs in addition. Samples need them; training does not."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""train.precision -> the dtype in which the attention computes."""
SAMPLER = Machine(device_type="cpu", name="cpu")
"""The machine of `nsa-train sample`, unless its options name a GPU."""
AUTO = "auto"
NO_BACKEND = "none"
"""Name in messages if no backend serves an optional operation."""

Uses = Mapping[str, tuple[BranchRequest, ...]]
"""Name of a use of an operation in messages -> the requests of that use."""


def routing_decisions(config: RunConfig, where: torch.device | Machine) -> dict[str, list[RoutingDecision]]:
    """Return operation -> decisions for the training batches of `config`; empty for the dense twin.

    There is one decision, or one for each kind of layer if their sizes differ. `nsa`, all of Eq. 5 in one, is among the operations
    if all branches are trained and a backend of it is installed or named.
    """
    machine = where if isinstance(where, Machine) else machine_of(where)
    return {
        operation.value: [explain_routing(request, backend_of(config, operation)) for request in _requests(config, operation, machine)]
        for operation in _operations(config)
    }


def chosen_of(decisions: Iterable[RoutingDecision]) -> str:
    """Return the backend that `decisions` chose; if layers differ, list all as `a|b`, with "none" for no backend; empty: no backend at all."""
    names = sorted({decision.chosen or NO_BACKEND for decision in decisions})
    return "" if names == [NO_BACKEND] else "|".join(names)


def backend_of(config: RunConfig, operation: str) -> str:
    """Return the backend that `config` names for `operation`, or "auto"."""
    return config.nsa_config().backends.get(operation, AUTO)


def named_backends(config: RunConfig) -> dict[Operation, str]:
    """Return operation -> backend for the operations whose backend `config` names; empty for the dense twin, which runs none of them."""
    if config.model.attention == "dense":
        return {}
    return {Operation(operation): name for operation, name in config.nsa_config().backends.items() if name != AUTO}


def refused_backends(config: RunConfig, uses: Callable[[Operation], Uses], *, advice: str = "use 'auto'") -> dict[str, str]:
    """Return operation -> why the backend that `config` names for it cannot serve one of its `uses`.

    A name that no plug-in has is refused even for an operation that does not run: it is mistyped, or its package is missing.
    """
    found = {}
    for operation, name in named_backends(config).items():
        key = f"nsa.backends.{operation.value}={name!r}"
        for use, requests in uses(operation).items():
            decisions = [explain_routing(request, name) for request in requests]
            known = [candidate.name for candidate in decisions[0].candidates]
            if name not in known:
                broken = "".join(f"; plug-in {plugin.name!r} is broken: {plugin.error}" for plugin in default_plugins().broken)
                found[operation.value] = f"{key} is not installed (there is {listed(known) or 'none'}{broken}); {advice}"
                break
            reasons = reasons_against(name, (decision for decision in decisions if decision.chosen is None))
            if reasons and operation in _used_operations(config):
                found[operation.value] = f"{key} cannot serve {use} ({name}: {reasons}); {advice}"
                break
    return found


def overruled_backends(config: RunConfig, uses: Callable[[Operation], Uses]) -> dict[str, str]:
    """Return operation -> a warning about a backend that `config` names against policy and that can serve."""
    found = {}
    for operation, name in named_backends(config).items():
        decisions = [explain_routing(request, name) for requests in uses(operation).values() for request in requests]
        reasons = reasons_against(name, decisions)
        if reasons and all(decision.chosen for decision in decisions) and operation in _used_operations(config):
            key = f"nsa.backends.{operation.value}"
            found[operation.value] = f"{operation.value} -> {name}, because {key} names it, against {reasons}"
    return found


def uses_of_run(config: RunConfig, machine: Machine) -> Callable[[Operation], Uses]:
    """Return a function from an operation to its uses by a run of `config` on `machine`: training, evaluation and samples."""

    def uses(operation: Operation) -> Uses:
        samples: dict[str, tuple[BranchRequest, ...]] = {}
        if config.train.samples:
            samples["the samples of this run"] = _sampling_requests(_requests(config, operation, machine, needs_grad=False))
        if operation in STEP_OPERATIONS:
            return samples
        passes = (_requests(config, operation, machine, needs_grad=needs_grad) for needs_grad in (True, False))
        return {"this run": tuple(request for requests in passes for request in requests), **samples}

    return uses


def uses_of_sample(config: RunConfig, machine: Machine = SAMPLER) -> Callable[[Operation], Uses]:
    """Return a function from an operation to its use by a sample of the model of `config` on `machine`, in `sample_dtype`."""
    dtype = sample_dtype(config, machine.device_type)

    def uses(operation: Operation) -> Uses:
        requests = _requests(config, operation, machine, needs_grad=False)
        return {"a sample": _sampling_requests(evolve(request, dtype=dtype, kv_dtype=dtype) for request in requests)}

    return uses


def sample_dtype(config: RunConfig, device_type: str) -> torch.dtype:
    """Return the dtype in which a sample computes: float32 on a CPU, that of training on a GPU."""
    return torch.float32 if device_type == "cpu" else DTYPES[config.train.precision]


def with_backend(config: RunConfig, backend: str) -> RunConfig:
    """Return `config` with `backend` for every operation that a sample runs; with "auto", without any named backend."""
    return evolve(config, nsa=evolve(config.nsa, backends={} if backend == AUTO else {name.value: backend for name in NEEDED_BY}))


def ignored_backends(config: RunConfig) -> dict[str, str]:
    """Return operation -> a warning about a backend that `config` names for an operation that it does not run."""
    running = _used_operations(config)
    of_layers = " and model.layers" if config.model.layers else ""
    branches = f"nsa.branches={list(config.nsa.branches)}{of_layers} {'run' if of_layers else 'runs'} no"
    why = {Operation.CHOOSE: "other backends ask for it, a layer does not"}
    return {
        operation.value: f"nsa.backends.{operation.value}={name!r} is not used ({why.get(operation, f'{branches} {operation.value}')})"
        for operation, name in named_backends(config).items()
        if operation not in running
    }


def _operations(config: RunConfig) -> list[Operation]:
    """Return the operations that a training step of `config` runs, and `nsa` if one backend may run them all at once."""
    # blocks are chosen by compressed scores, so the selected branch needs both operations
    operations = [operation for operation in NEEDED_BY if _layers_with(config, operation)]
    is_offered = any(backend.operation is Operation.NSA for backend in default_registry().backends)
    if _layers_with(config, Operation.NSA) and (is_offered or Operation.NSA in named_backends(config)):
        operations.append(Operation.NSA)
    return operations


def _used_operations(config: RunConfig) -> set[Operation]:
    """Return the operations that training, evaluation and samples of `config` run; without samples nothing is appended to a cache."""
    return {*_operations(config), *(STEP_OPERATIONS if config.train.samples else ())}


def _layers_with(config: RunConfig, operation: Operation) -> list[NSAConfig]:
    """Return the NSA layers of `config`'s pattern that run `operation`."""
    layers = [layer.config for layer in config.pattern() if layer.attention == "nsa"]
    if operation is Operation.NSA:
        return [layer for layer in layers if layer.can_be_fused()]
    return [layer for layer in layers if NEEDED_BY.get(operation, set(layer.branches)) & set(layer.branches)]


def reasons_against(name: str, decisions: Iterable[RoutingDecision]) -> str:
    """Return every reason against the backend `name` in `decisions`, each once; empty if there is none."""
    candidates = (candidate for decision in decisions for candidate in decision.candidates if candidate.name == name)
    return ", ".join(dict.fromkeys(str(reason) for candidate in candidates for reason in candidate.reasons))


def _requests(config: RunConfig, operation: Operation, machine: Machine, *, needs_grad: bool = True) -> tuple[BranchRequest, ...]:
    """Return the requests of a pass over a training batch for `operation`; equal requests of several layers are listed once."""
    # if no layer runs the operation, its backend is checked for a layer with the sizes of table `nsa`
    layers = _layers_with(config, operation) or [config.nsa_config()]
    return tuple(dict.fromkeys(_request(config, layer, operation, machine, needs_grad=needs_grad) for layer in layers))


def _request(config: RunConfig, layer: NSAConfig, operation: Operation, machine: Machine, *, needs_grad: bool) -> BranchRequest:
    train, model = config.train, config.model
    dtype = DTYPES[train.precision]
    rows = max(1, train.batch_size // processes_of(config, machine))
    return BranchRequest(
        operation=operation,
        geometry=layer.geometry,
        device_type=machine.device_type,
        compute_capability=machine.compute_capability,
        dtype=dtype,
        kv_dtype=dtype,
        batch=1,
        num_sequences=rows,
        num_queries=rows * train.seq_len,
        num_keys=train.seq_len,
        # rows that a step appends have as many heads as the keys
        num_heads=model.n_kv_heads if operation is Operation.APPEND else model.n_heads,
        num_kv_heads=model.n_kv_heads,
        head_dim_qk=model.head_dim_qk,
        head_dim_v=model.head_dim_v if operation.value in (*layer.branches, "nsa", "append") else model.head_dim_qk,
        layout=Layout.PACKED,
        needs_grad=needs_grad and operation in (Operation.CMP, Operation.SLC, Operation.WIN, Operation.NSA),
        deterministic=train.deterministic,
    )


def _sampling_requests(requests: Iterable[BranchRequest]) -> tuple[BranchRequest, ...]:
    """Return the requests of a prompt and of each token after it, given the requests of a pass over a training batch without gradients."""
    prompts = [evolve(request, layout=Layout.CACHED, num_sequences=1, num_queries=request.num_keys) for request in requests]
    return tuple(one for prompt in prompts for one in (prompt, evolve(prompt, num_queries=1)))
