"""FlashAttention of other libraries as the backend `flash_attn` of compressed and sliding-window attention."""
