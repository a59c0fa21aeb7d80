"""Several processes as one run: their process group, and the strategies by which they share a model."""
