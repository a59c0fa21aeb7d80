"""Attention over chosen blocks, keys first: a block stays on the chip while the queries that chose it pass by (Eq. 12)."""
