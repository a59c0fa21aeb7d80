"""The checks before a run, which `nsa-train preflight` runs alone: every rule is judged, and each failure names its fix.

`findings.py` holds what was found, and the files beside it the rules: `machine.py`, `places.py`, `schedule.py`, `disk.py`, `data.py`.
`memory.py` estimates, and `mends.py` finds what makes a run fit.
"""
