"""Noise on the log-prob that is written down; the sampler itself is the trainer's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stalefront.mismatch import Logging, Noise

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class LogpNoise(Logging):
    """log μ + strength · sigma · z, z standard normal, one a token.

    Not a sampler change: E_μ[π/μ] = e^(σ²/2) ≠ 1, K1 ≈ 0 and K3 ≈ σ²/2. What is written down may lie above 0.

    Attributes
    ----------
    sigma : float
        Standard deviation, nats.
    """

    sigma: float

    def check(self) -> None:
        """A scale."""
        super().check()
        self.require_scale("sigma")

    def __call__(self, logp_B: Tensor, noise: Noise) -> Tensor:
        """The log-prob with noise."""
        return logp_B + self.strength * self.sigma * noise.normals(1).squeeze(-1)
