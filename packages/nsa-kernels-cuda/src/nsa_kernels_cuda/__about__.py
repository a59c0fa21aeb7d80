"""The version of nsa-kernels-cuda, kept by hand and by tools/release.py."""

__version__ = "0.1.0"
