"""The interface between the mathematics and its implementations."""
