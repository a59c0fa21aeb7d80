"""Attention over chosen blocks (Eq. 12), KV-major: a block stays in shared memory while the kernel loops over the queries that chose it."""
