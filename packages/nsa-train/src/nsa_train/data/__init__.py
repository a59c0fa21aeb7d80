"""From files to packed batches: sources -> tokenizer -> packing -> pipeline."""
