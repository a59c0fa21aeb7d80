"""Measure and explain the attention of nsa_core on this machine; `nsa-bench --help` lists the commands."""
