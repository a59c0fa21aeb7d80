"""Measure and explain the attention of nsa_core on the machine at hand; `nsa-bench --help` shows the verbs."""
