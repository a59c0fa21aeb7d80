"""Versions of the packages that a command runs on, by their installed metadata: no package is imported."""

import platform
from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("nsa-core", "nsa-train", "nsa-kernels-triton", "torch", "triton")


def version_of(package: str) -> str | None:
    """Return the version of an installed package; None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def version_lines(package: str, own_version: str) -> str:
    """Return the output of `--version`: `package` and its version, then a line for each package it runs on, Python and the platform."""
    others = (f"{name} {version_of(name) or 'not installed'}" for name in PACKAGES if name != package)
    return "\n".join([f"{package} {own_version}", *others, f"Python {platform.python_version()}", platform.platform()])
