"""Noise on the logits that tokens are drawn from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stalefront.mismatch import Noise, Processing

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class LogitNoise(Processing):
    """ℓ + strength · sigma · z, z standard normal for every token of the vocabulary, new at every place.

    A real sampler difference: E_μ[π/μ] = 1, and K1 ≈ K2 ≈ K3 ≈ σ²/2 · (1 − Σp²). `logp_noise` is not one.

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

    def __call__(self, logits_BV: Tensor, noise: Noise) -> Tensor:
        """Logits with noise."""
        return logits_BV + self.strength * self.sigma * noise.normals(logits_BV.shape[-1])
