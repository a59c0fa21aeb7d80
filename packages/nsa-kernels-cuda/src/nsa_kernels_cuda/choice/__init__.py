"""The choice of blocks from their importance (Eq. 10, 11): a warp to a row."""
