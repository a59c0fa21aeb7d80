"""Rules about the weights that a new run begins with."""

from nsa_train.checkpoint import initial_checkpoint
from nsa_train.errors import ConfigError
from nsa_train.preflight.findings import Preflight
from nsa_train.settings.config import RunConfig


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
