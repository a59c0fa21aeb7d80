"""The backend `flash_attn`: compressed and sliding-window attention by other libraries' FlashAttention."""
