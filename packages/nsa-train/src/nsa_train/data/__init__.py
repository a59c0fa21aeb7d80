"""From files to packed batches: sources -> tokenizer -> lanes -> packing -> pipeline."""
