"""The checks before a run, which `nsa-train preflight` runs alone: every rule is judged, and each failure names its fix.

`findings.py` holds the findings, and the other files the rules: `judge.py`, `machine.py`, `directories.py`, `data.py`.
`memory.py` estimates, and finds the fixes of a run that does not fit.
"""
