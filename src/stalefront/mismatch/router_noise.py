"""Noise on the gates of the sampler's routers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stalefront.mismatch import Routing
from stalefront.noise import normals

if TYPE_CHECKING:
    from torch import Tensor

    from stalefront.routing import RouterChange

# Routers of a model are numbered below this in the counter of their random numbers.
LAYERS = 1024


@dataclass(frozen=True)
class RouterNoise(Routing):
    """Gate logits + strength · sigma · z: another choice of experts here and there, and other weights for all.

    Attributes
    ----------
    sigma : float
        Standard deviation.
    """

    sigma: float

    def check(self) -> None:
        """A scale."""
        super().check()
        self.require_scale("sigma")

    def change(self, key_N: Tensor, position_N: Tensor) -> RouterChange:
        """Noise keyed by row, position and layer."""
        return NoisyGates(self.strength * self.sigma, key_N, position_N)


class NoisyGates:
    """Router change of `RouterNoise`."""

    def __init__(self, sigma: float, key_N: Tensor, position_N: Tensor) -> None:
        self.sigma, self.key_N, self.position_N = sigma, key_N, position_N

    def logits(self, logits_NE: Tensor, layer: int) -> Tensor:
        """Gate logits with noise."""
        noise = normals(self.key_N, self.position_N * LAYERS + layer, logits_NE.shape[-1])
        return logits_NE + self.sigma * noise.to(logits_NE.dtype)

    def choose(self, scores_NE: Tensor, own_NK: Tensor, layer: int) -> Tensor:
        """The router's own choice."""
        return own_NK
