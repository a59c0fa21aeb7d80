"""The machine that a run stands on: its chips, its packages, and the backends that serve it."""
