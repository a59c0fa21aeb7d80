"""Attention of each query over one interval of keys: the compressed branch and the sliding window are two cases of it."""
