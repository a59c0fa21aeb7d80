"""Ablations: a grid of settings and seeds, trained side by side, and what differs, with its standard error."""
