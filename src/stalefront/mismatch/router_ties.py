"""A top-k over gates that is not deterministic: near ties are broken at random."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from stalefront.choice import OptionError
from stalefront.mismatch import Routing
from stalefront.mismatch.router_noise import LAYERS
from stalefront.noise import uniforms

if TYPE_CHECKING:
    from torch import Tensor

    from stalefront.cell import Cell
    from stalefront.routing import RouterChange


@dataclass(frozen=True)
class RouterTies(Routing):
    """Scores within strength · tolerance of the weakest chosen one count as equal, and chance decides among them.

    `model.deterministic_topk=true` is the cure.

    Attributes
    ----------
    tolerance : float
        In units of the scores that the family's top-k looks at (probabilities for most).
    """

    tolerance: float

    def check(self) -> None:
        """A scale."""
        super().check()
        self.require_scale("tolerance")

    def refuse(self, cell: Cell) -> None:
        """A deterministic top-k leaves nothing to chance."""
        if cell.model.deterministic_topk:
            legal = "false with mismatch=[router_ties]"
            raise OptionError("model.deterministic_topk", True, legal, "With it the entry would never act.")

    def change(self, key_N: Tensor, position_N: Tensor) -> RouterChange:
        """Chance keyed by row, position and layer."""
        return Ties(self.strength * self.tolerance, key_N, position_N)


class Ties:
    """Router change of `RouterTies`."""

    def __init__(self, tolerance: float, key_N: Tensor, position_N: Tensor) -> None:
        self.tolerance, self.key_N, self.position_N = tolerance, key_N, position_N

    def logits(self, logits_NE: Tensor, layer: int) -> Tensor:
        """As they are."""
        return logits_NE

    def choose(self, scores_NE: Tensor, own_NK: Tensor, layer: int) -> Tensor:
        """Everything clearly above the weakest chosen score, and a random pick of what ties with it."""
        scores = scores_NE.double()
        weakest_N1 = scores.gather(-1, own_NK).amin(-1, keepdim=True)
        tied = (scores - weakest_N1).abs() <= self.tolerance
        chance = uniforms(self.key_N, self.position_N * LAYERS + layer, scores.shape[-1])
        # Ties sort by chance, below every clear winner and above every clear loser.
        rank = torch.where(tied, chance, torch.where(scores > weakest_N1, scores - weakest_N1 + 1, -1.0))
        return rank.topk(own_NK.shape[-1], dim=-1).indices
