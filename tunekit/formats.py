"""How weights are stored: as the checkpoint has them."""

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Plain:
    """Numbers as they come; `precision` says in which dtype."""

    def apply(self, model: nn.Module) -> None:
        """Every layer stays what it is."""
