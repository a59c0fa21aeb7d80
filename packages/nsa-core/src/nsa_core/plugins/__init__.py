"""How backends from other packages are found: one pluggy hook, entry-point group `nsa`."""

from nsa_core.plugins.hookspecs import hookimpl

__all__ = ["hookimpl"]
