"""Tools for authors of backends: inputs, tolerances, explicit masks, hypothesis strategies, the conformance kit."""
