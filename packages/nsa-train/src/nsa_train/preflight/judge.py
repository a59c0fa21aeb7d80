"""All rules in their order."""

from collections.abc import Sequence
from pathlib import Path

from nsa_train.host.environment import missing_report
from nsa_train.host.machine import Machine, processes_of, target_machine
from nsa_train.model.decoder import count_parameters, introduced
from nsa_train.preflight.data import check_data
from nsa_train.preflight.disk import check_disk
from nsa_train.preflight.findings import Preflight
from nsa_train.preflight.machine import check_machine, check_memory, check_routes
from nsa_train.preflight.memory import estimate_memory
from nsa_train.preflight.mends import MemoryMends
from nsa_train.preflight.places import check_out_dir
from nsa_train.preflight.schedule import check_schedule
from nsa_train.preflight.weights import check_init_from
from nsa_train.settings.config import RunConfig


def run_preflight(
    config: RunConfig,
    out_dir: Path,
    *,
    resuming: bool = False,
    machine: Machine | None = None,
    world_sizes: Sequence[int] | None = None,
) -> Preflight:
    """Return what stands for and against running `config` into `out_dir`. Writes nothing, touches no GPU's memory.

    `resuming`: the directory holds the run that goes on. `machine`: judged in place of the one at hand. `world_sizes`: how
    many processes the run may have on all hosts together; by default those of one host.
    """
    findings, where = Preflight(), machine or target_machine(config)
    sizes = world_sizes or [processes_of(config, where)]
    counts = count_parameters(config)
    parameters = getattr(counts, config.model.attention)
    # where hosts may leave, the fewest processes have the most to hold
    memory = estimate_memory(config, parameters, min(sizes))
    findings.memory_gib = memory.total_gib
    findings.passed.append(introduced(config))
    check_out_dir(findings, out_dir, resuming=resuming)
    check_init_from(findings, config, resuming=resuming)
    check_schedule(findings, config, where, parameters, sizes)
    check_machine(findings, config, where, memory, is_asked_for=machine is not None)
    check_routes(findings, config, where)
    mends = MemoryMends(config=config, parameters=parameters, world_sizes=sizes, resuming=resuming)
    check_memory(findings, where, memory, mends)
    check_disk(findings, config, out_dir, parameters)
    if missing := missing_report():
        findings.warned.append(f"report: {missing}")
    check_data(findings, config)
    return findings
