"""Rules about the machine: its devices, the backends of each operation, and whether the run fits in memory."""

from nsa_train.host.machine import Machine, processes_of
from nsa_train.host.routing import (
    backend_of,
    chosen_of,
    ignored_backends,
    overruled_backends,
    reasons_against,
    refused_backends,
    routing_decisions,
    uses_of_run,
)
from nsa_train.preflight.findings import Preflight
from nsa_train.preflight.memory import MemoryEstimate, MemoryFixes
from nsa_train.settings.config import RunConfig

TIGHT = 0.9
"""Share of the memory from which an estimate is worth a warning."""
OLDEST_CAPABILITY = (8, 0)
"""The oldest compute capability that computes in bf16."""


def check_machine(findings: Preflight, config: RunConfig, machine: Machine, memory: MemoryEstimate, *, is_asked_for: bool) -> None:
    """Check that the devices of the recipe exist; with `is_asked_for` the machine is only described, and counts as present."""
    train, wanted = config.train, processes_of(config, machine)
    if machine.device_type == "cuda" or train.device == "cuda":
        findings.needs.append(
            f"device: {wanted} CUDA GPU(s) of compute capability 8.0 or newer with about {memory.total_gib:.1f} GiB each, by estimate, "
            f"on each host; {_there(machine, is_asked_for=is_asked_for)}"
        )
    if not machine.is_here and not is_asked_for:
        findings.failed.append(
            f"train.device='cuda' finds no CUDA GPU here (it needs {wanted} of compute capability 8.0 or newer with about "
            f"{memory.total_gib:.1f} GiB); run it on such a machine, judge one by preflight --machine h200, "
            "or use --set train.device=cpu"
        )
        findings.warned.append(f"device: routes and memory are judged for one that is not here, {machine.name}")
        return
    if train.device == "cuda" and machine.device_type != "cuda":
        findings.failed.append(f"train.device='cuda' is not what machine {machine.name!r} has; use --set train.device=auto")
        return
    problems = []
    if machine.device_type == "cuda" and machine.num_gpus < wanted:
        problems.append(
            f"train.nproc_per_node={wanted} is more than the {machine.num_gpus} GPU(s) of this machine; "
            f"use --set train.nproc_per_node={machine.num_gpus}"
        )
    capability = machine.compute_capability
    if capability is not None and capability < OLDEST_CAPABILITY and train.precision == "bf16":
        problems.append(
            f"{machine.name} has compute capability {capability[0]}.{capability[1]} (bf16 needs 8.0); use --set train.precision=fp16"
        )
    findings.failed += problems
    if not problems:
        findings.passed.append(f"device: {machine.name}{'' if machine.is_here else ' (described, not here)'}")


def check_routes(findings: Preflight, config: RunConfig, machine: Machine) -> None:
    """Check that a backend serves every operation of the run on `machine`; a named backend must serve all uses of its operation."""
    uses = uses_of_run(config, machine)
    refused = refused_backends(config, uses)
    findings.failed += refused.values()
    for operation, decisions in routing_decisions(config, machine).items():
        asked = backend_of(config, operation)
        if operation in refused:
            continue
        if chosen := chosen_of(decisions):
            findings.routes[operation] = chosen
            findings.passed.append(f"route: {operation} -> {chosen}")
        for decision in decisions:
            reasons = {one.name: reasons_against(one.name, [decision]) for one in decision.candidates}
            if machine.device_type == "cuda" and decision.chosen == "sdpa" and asked == "auto":
                why = "; ".join(f"{name}: {against}" for name, against in reasons.items() if name != "sdpa")
                missing = "nsa-kernels-triton is not installed; in a checkout: pip install ./packages/nsa-kernels-triton"
                findings.warned.append(f"route: {operation} -> sdpa, the reference, which is slow on a GPU; {why or missing}")
            elif decision.chosen is None and operation != "nsa":
                # the fused operation is optional
                text = "; ".join(f"{name}: {against}" for name, against in reasons.items()) or "none is installed"
                findings.failed.append(f"nsa.backends.{operation}='auto' cannot serve this run ({text}); use 'sdpa'")
    findings.warned += (f"route: {line}" for line in overruled_backends(config, uses).values())
    findings.warned += (f"route: {line}" for operation, line in ignored_backends(config).items() if operation not in refused)


def check_memory(findings: Preflight, machine: Machine, estimate: MemoryEstimate, fixes: MemoryFixes) -> None:
    """Check that the estimated peak fits in the machine's memory."""
    there = machine.memory_gib
    if there is None:
        findings.passed.append(f"memory: about {estimate} (how much there is, is not known)")
        return
    where = f"the {there:.1f} GiB of {machine.name}" if machine.device_type == "cuda" else f"the {there:.1f} GiB free here"
    if estimate.total_gib > there:
        findings.failed.append(f"memory: about {estimate} does not fit in {where}; {fixes.offered(machine, TIGHT * there, there)}")
    elif estimate.total_gib > TIGHT * there:
        findings.warned.append(f"memory: about {estimate} may not fit in {where}; {fixes.offered(machine, TIGHT * there)}")
    else:
        findings.passed.append(f"memory: about {estimate} in {where}")


def _there(machine: Machine, *, is_asked_for: bool) -> str:
    if machine.device_type != "cuda" or not (machine.is_here or is_asked_for):
        return "there is none here"
    return f"{'here' if machine.is_here else 'described'}: {machine.num_gpus} x {machine.name} with {machine.memory_gib or 0:.1f} GiB"
