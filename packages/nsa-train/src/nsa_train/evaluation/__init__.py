"""Evaluation of a trained model: `nsa-train eval`."""
