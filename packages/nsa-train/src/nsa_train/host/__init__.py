"""The machine of a run: its chips, its packages, and the backends that serve it."""
