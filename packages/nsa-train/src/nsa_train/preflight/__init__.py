"""The checks before a run, which `nsa-train preflight` runs alone: every rule is checked, and each failure names its fix.

`findings.py` holds the findings. The rules are in `judge.py`, `machine.py`, `directories.py` and `data.py`.
`memory.py` estimates memory, and finds fixes for a run that does not fit.
"""
