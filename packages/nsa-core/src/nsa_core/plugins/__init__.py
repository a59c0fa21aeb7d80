"""Plug-ins: other packages offer backends through one pluggy hook and the entry-point group `nsa`."""

from nsa_core.plugins.hookspecs import hookimpl

__all__ = ["hookimpl"]
