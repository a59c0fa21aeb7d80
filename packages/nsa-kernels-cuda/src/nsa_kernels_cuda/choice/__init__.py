"""The choice of blocks from their importance (Eq. 10, 11), with one warp per row."""
