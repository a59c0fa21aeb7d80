"""RoPE of a step over a cache: the operation ROTATE."""
