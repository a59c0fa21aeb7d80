"""What is checked before a run, and alone by `nsa-train preflight`: every rule is judged, each failure names its mend.

`findings.py` holds what was found, and the files beside it the rules: `machine.py`, `places.py`, `schedule.py`, `disk.py`, `data.py`.
`memory.py` estimates, and `mends.py` finds what makes a run fit.
"""

from nsa_train.preflight.findings import Preflight
from nsa_train.preflight.judge import run_preflight

__all__ = ["Preflight", "run_preflight"]
