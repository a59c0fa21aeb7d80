"""The smoke rules: whether the records of a run show what a sound run shows. `nsa-bench smoke` prints the verdicts."""

import math
from pathlib import Path
from typing import NamedTuple

from nsa_train.errors import ConfigError
from nsa_train.smoke.records import Records, Verdict, read_records
from nsa_train.smoke.rules import check_baseline, check_run


class Judgement(NamedTuple):
    """The records of a run, and the verdict of every rule on them."""

    records: Records
    verdicts: list[Verdict]

    @property
    def has_failed(self) -> bool:
        """Return True where a rule does not hold."""
        return any(verdict.is_passed is False for verdict in self.verdicts)


def judge_run(folder: Path, *, baseline: Path | None = None, tolerance: float = 5.0) -> Judgement:
    """Return the judgement of the run in `folder`; against `baseline`, a metrics.json, worse by at most `tolerance` per cent.

    Raises:
        ConfigError: when `folder` is no run, or the baseline or the tolerance cannot be used.
    """
    if not 0 <= tolerance < math.inf:
        raise ConfigError(f"--tolerance={tolerance} is not a finite percentage >= 0; use 5")
    records = read_records(folder)
    verdicts = check_run(records)
    if baseline is not None:
        verdicts += check_baseline(records, baseline, tolerance)
    return Judgement(records, verdicts)
