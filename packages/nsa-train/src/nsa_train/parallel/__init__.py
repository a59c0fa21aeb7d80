"""Several processes as one run: the world they form, how they share a model, how torchrun starts them, how they end."""
