"""Early stopping: how many evaluations in a row brought nothing better."""

import math
from collections.abc import Mapping
from typing import Any


class Patience:
    """Counts evaluations without a better validation loss; 0 never ends."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.best = math.inf
        self.num_worse = 0

    @property
    def is_over(self) -> bool:
        """True once `most` evaluations in a row brought nothing better."""
        return 0 < self.most <= self.num_worse

    def observe(self, loss: float) -> None:
        """Note an evaluation."""
        self.num_worse = 0 if loss < self.best else self.num_worse + 1
        self.best = min(self.best, loss)

    def state_dict(self) -> dict[str, Any]:
        """Return the counts, JSON-able."""
        return {"best": None if math.isinf(self.best) else self.best, "num_worse": self.num_worse}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the counts that `state_dict` returned."""
        self.best, self.num_worse = (math.inf if state["best"] is None else state["best"]), state["num_worse"]

    def __str__(self) -> str:
        return f"no better validation loss than {self.best:.4f} in {self.num_worse} evaluations"
