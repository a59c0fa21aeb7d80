"""A decoder-only language model whose attention is NSA or, as its baseline twin, dense."""
