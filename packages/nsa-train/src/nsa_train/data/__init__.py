"""The data pipeline, from files to packed batches: sources -> tokenizer -> lanes -> packing -> pipeline."""
