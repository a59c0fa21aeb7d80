"""The seam between the mathematics and its implementations."""
