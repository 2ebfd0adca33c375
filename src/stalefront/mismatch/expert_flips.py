"""Experts flipped at a given rate while sampling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stalefront.mismatch import Routing
from stalefront.mismatch.router_noise import LAYERS
from stalefront.noise import uniforms
from stalefront.routers import RoutingError

if TYPE_CHECKING:
    from torch import Tensor

    from stalefront.routing import RouterChange


@dataclass(frozen=True)
class ExpertFlips(Routing):
    """With probability strength · rate the weakest chosen expert is replaced by the strongest that was not chosen.

    What two engines that agree up to rounding do to one another, at a rate that is known: about .1 of the routers of a
    large mixture of experts.

    Attributes
    ----------
    rate : float
        Share of the (token, layer) decisions.
    """

    rate: float

    def check(self) -> None:
        """A probability that the strength does not lift above 1."""
        super().check()
        self.require(0 < self.rate <= 1, "rate", "a probability above 0", "strength=0 flips none.")
        self.require(self.strength * self.rate <= 1, "strength", f"at most {1 / self.rate:g} at rate={self.rate:g}")

    def scaled(self, factor: float) -> ExpertFlips:
        """At most every decision is flipped."""
        return ExpertFlips(strength=min(self.strength * factor, 1 / self.rate), rate=self.rate)

    def change(self, key_N: Tensor, position_N: Tensor) -> RouterChange:
        """Flips keyed by row, position and layer."""
        return Flips(self.strength * self.rate, key_N, position_N)


class Flips:
    """Router change of `ExpertFlips`."""

    def __init__(self, rate: float, key_N: Tensor, position_N: Tensor) -> None:
        self.rate, self.key_N, self.position_N = rate, key_N, position_N

    def logits(self, logits_NE: Tensor, layer: int) -> Tensor:
        """As they are."""
        return logits_NE

    def choose(self, scores_NE: Tensor, own_NK: Tensor, layer: int) -> Tensor:
        """The own choice with its weakest expert replaced where a number below the rate is drawn."""
        if scores_NE.shape[-1] == own_NK.shape[-1]:
            raise RoutingError(f"all {own_NK.shape[-1]} experts are chosen: none is left to flip to")
        scores = scores_NE.float()
        chosen = scores.gather(-1, own_NK)
        weakest_N1 = chosen.argmin(-1, keepdim=True)
        next_N1 = scores.scatter(-1, own_NK, -float("inf")).argmax(-1, keepdim=True)
        flipped_NK = own_NK.scatter(-1, weakest_N1, next_N1)
        flip_N1 = uniforms(self.key_N, self.position_N * LAYERS + layer, 1) < self.rate
        return flipped_NK.where(flip_N1, own_NK)
