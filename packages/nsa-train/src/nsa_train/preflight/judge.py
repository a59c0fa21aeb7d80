"""All rules in their order; those about the data and about the weights that a run begins with stand here."""

from collections.abc import Sequence
from pathlib import Path

from nsa_train.checkpoint.resuming import initial_checkpoint
from nsa_train.data.probe import needs_of, probe
from nsa_train.errors import ConfigError
from nsa_train.host.environment import missing_report
from nsa_train.host.machine import Machine, processes_of, target_machine
from nsa_train.model.decoder import count_parameters, introduced
from nsa_train.preflight.disk import check_disk
from nsa_train.preflight.findings import Preflight
from nsa_train.preflight.machine import check_machine, check_memory, check_routes
from nsa_train.preflight.memory import MemoryFixes, estimate_memory
from nsa_train.preflight.places import check_out_dir
from nsa_train.preflight.schedule import check_schedule
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
    fixes = MemoryFixes(config=config, parameters=parameters, world_sizes=sizes, resuming=resuming)
    check_memory(findings, where, memory, fixes)
    check_disk(findings, config, out_dir, parameters)
    if missing := missing_report():
        findings.warned.append(f"report: {missing}")
    check_data(findings, config)
    return findings


def check_init_from(findings: Preflight, config: RunConfig, *, resuming: bool) -> None:
    """Judge that `train.init_from` names whole weights that fit; a run that is resumed does not read them."""
    if config.train.init_from is None or resuming:
        return
    try:
        checkpoint = initial_checkpoint(config)
    except ConfigError as error:
        findings.failed.append(str(error))
        return
    findings.passed.append(f"train.init_from: the weights of {checkpoint.path} after {checkpoint.step} steps")
    learned, now = (data.tokenizer for data in (checkpoint.config.data, config.data))
    if learned != now:
        findings.warned.append(f"train.init_from: those weights learned the ids of data.tokenizer={learned!r}, and this run reads {now!r}")


def check_data(findings: Preflight, config: RunConfig) -> None:
    """Judge the data of `config` by opening them."""
    findings.needs += needs_of(config.data)
    found = probe(config)
    findings.passed += found.passed
    findings.warned += found.warned
    findings.failed += found.failed
    findings.dataset = found.dataset
