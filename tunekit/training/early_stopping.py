"""Early stopping on the evaluation loss."""

import math


class EarlyStopping:
    """Counts evaluations without a lower loss. `triggered` after `patience` of them in a row; None: never."""

    def __init__(self, patience: int | None) -> None:
        self.patience, self.best, self.num_worse = patience, math.inf, 0

    def update(self, loss: float) -> None:
        """Take the loss of one evaluation into account."""
        self.num_worse = 0 if loss < self.best else self.num_worse + 1
        self.best = min(self.best, loss)

    @property
    def triggered(self) -> bool:
        return self.patience is not None and self.num_worse >= self.patience

    def state_dict(self) -> dict[str, float]:
        return {"best": self.best, "num_worse": self.num_worse}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.best, self.num_worse = state["best"], int(state["num_worse"])
