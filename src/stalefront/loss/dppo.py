"""DPPO: a trust region of divergences in place of the ratio clip (arXiv 2602.04879)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from stalefront.loss import OnPolicy
from stalefront.loss._families import MaskedRatioLoss

if TYPE_CHECKING:
    from torch import Tensor

    from stalefront.batch import LossInputs
    from stalefront.surrogate import Surrogate


@dataclass(frozen=True)
class DPPO(MaskedRatioLoss):
    """(1/Σ|y|) Σ_bt −A r m + kl_tau (log r)², m = 0 where a token has left the trust region in the direction of A.

    Out, for `tv`: p_θ − p_b > delta_high with A > 0, p_θ − p_b < −delta_low with A < 0. For `kl`: the Bernoulli KL
    divergence of θ from b exceeds delta_high with A > 0 and p_θ > p_b, or delta_low with A < 0 and p_θ < p_b. A clip of
    the ratio stops rare tokens early and common ones late; a divergence treats them alike. `ratio` is that clip, as a
    mask: p_θ/p_b > 1 + delta_high with A > 0, p_θ/p_b < 1 − delta_low with A < 0.

    Attributes
    ----------
    objective
        `ratio`: −A r, with gradient through r. `logp`: −sg[min(r, cap)] A log θ. The gradients are the same.
    cap : float or None
        Largest value of r; at the cap, the token still pulls. None for none.
    kl_tau : float
        Weight of (log r)², on masked tokens too.
    mask_base
        b of the mask: the sampler's (`mu`) or the trainer's (`old`) probability; the ratio is the anchor's.
    smoothing : float
        See `stalefront.trust_region.bernoulli_kl`.
    """

    divergence: Literal["tv", "kl", "ratio"]
    delta_low: float
    delta_high: float
    objective: Literal["ratio", "logp"]
    cap: float | None
    kl_tau: float
    mask_base: Literal["mu", "old"]
    smoothing: float

    def check(self) -> None:
        """Radii, cap and penalty are not negative."""
        super().check()
        for field in ("delta_low", "delta_high", "kl_tau", "smoothing"):
            self.require(getattr(self, field) >= 0, field, "a number of at least 0")
        self.require(self.cap is None or self.cap > 0, "cap", "a number above 0, or null for none")

    @property
    def on_policy(self) -> OnPolicy:
        """A cap below 1 scales every token."""
        return "policy_gradient" if self.on_policy_scale == 1 else "scaled"

    @property
    def on_policy_scale(self) -> float:
        """The cap where it is below 1."""
        return 1.0 if self.cap is None else min(1.0, self.cap)

    @property
    def penalty(self) -> float:
        """Weight of (log r)²."""
        return self.kl_tau

    @property
    def ratio_cap(self) -> float | None:
        """See `cap`."""
        return self.cap

    def surrogate(self, inputs: LossInputs) -> Surrogate:
        """See the class."""
        return super().surrogate(inputs) if self.objective == "ratio" else self.weighted(inputs)

    def outside(self, inputs: LossInputs) -> tuple[Tensor, Tensor]:
        """Tokens that left the trust region downwards with A < 0, and upwards with A > 0."""
        import torch

        from stalefront.trust_region import bernoulli_kl, probability_shift

        theta = inputs.logp_theta_BT.detach()
        base = inputs.logp_behav_BT if self.mask_base == "mu" else inputs.logp_old_BT
        up, down = inputs.advantage_B1 > 0, inputs.advantage_B1 < 0
        if self.divergence == "kl":
            distance = bernoulli_kl(base, theta, self.smoothing)
            left_low, left_high = distance > self.delta_low, distance > self.delta_high
            return down & (theta < base) & left_low, up & (theta > base) & left_high
        shift = probability_shift(theta, base) if self.divergence == "tv" else torch.expm1(theta - base)
        return down & (shift < -self.delta_low), up & (shift > self.delta_high)
