"""Rules about the data: reachable, large enough, and no document both in train and in validation."""

from nsa_train.data.needs import needs_of
from nsa_train.data.probe import probe
from nsa_train.preflight.findings import Preflight
from nsa_train.settings.config import RunConfig


def check_data(findings: Preflight, config: RunConfig) -> None:
    """Judge the data of `config` by opening them."""
    findings.needs += needs_of(config.data)
    found = probe(config)
    findings.passed += found.passed
    findings.warned += found.warned
    findings.failed += found.failed
    findings.dataset = found.dataset
