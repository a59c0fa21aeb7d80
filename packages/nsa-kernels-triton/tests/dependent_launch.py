"""Programmatic dependent launch in the interpreter: what the launch before writes appears to a program only when it waits."""

from collections.abc import Callable
from typing import Any

import pytest


class DependentLaunch:
    """Watches every program: it must wait, and must not write, count as arrived, or let the next launch start before it does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch
        self.has_waited = True
        self.early_products = 0
        """Matrix products before a wait."""

    def install(
        self, at_start: Callable[[], None], at_wait: Callable[[], None], may_store_early: Callable[[], bool] = lambda: False
    ) -> None:
        """Call `at_start` where a program starts and `at_wait` at each of its waits, from here on.

        A program may store before it waits if `may_store_early` returns True; it may never count as arrived before.
        """
        import triton.language as tl
        from triton.runtime.interpreter import InterpreterBuilder

        def wait() -> None:
            self.has_waited = True
            at_wait()

        def before(name: str, call: Callable[[], Any]) -> None:
            method = getattr(InterpreterBuilder, name)

            def watched(builder: Any, *arguments: Any, **options: Any) -> Any:
                call()
                return method(builder, *arguments, **options)

            self.monkeypatch.setattr(InterpreterBuilder, name, watched)

        def start() -> None:
            self.check()
            self.has_waited = False
            at_start()

        def count() -> None:
            self.early_products += not self.has_waited

        before("set_grid_idx", start)
        before("create_dot", count)
        for name in ("create_store", "create_masked_store"):
            before(name, lambda: may_store_early() or self.check())
        before("create_atomic_rmw", self.check)
        self.monkeypatch.setattr(tl.extra.cuda, "gdc_wait", wait)
        self.monkeypatch.setattr(tl.extra.cuda, "gdc_launch_dependents", lambda: None)

    def check(self) -> None:
        """Fail if the program has not waited."""
        assert self.has_waited, "a program wrote, or ended, before it waited for the launch before"
