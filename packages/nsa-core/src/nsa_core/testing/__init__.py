"""Tools for whoever writes a backend: inputs, tolerances, explicit masks, hypothesis strategies, the conformance kit."""
