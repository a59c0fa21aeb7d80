"""The version, read by the build and by `nsa_transformers.__version__`."""

__version__ = "0.1.0"
