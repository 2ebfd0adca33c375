"""TOPR: good answers are imitated, bad ones are pushed away only as far as the policy still gives them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stalefront.loss import OnPolicy, RatioLoss

if TYPE_CHECKING:
    from stalefront.batch import LossInputs
    from stalefront.surrogate import Surrogate


@dataclass(frozen=True)
class TOPR(RatioLoss):
    """(1/B) Σ_b (1/|y_b|) Σ_t −w A log θ, w = positive_weight where the reward is above 0, else
    negative_weight · sg[clamp(r, 0, 1)].

    Tapered off-policy REINFORCE (arXiv 2503.14286, eq. 8), whose ratio is one of whole answers; here it is the token's,
    as in ROLL. Which case holds is decided by the reward and not by the sign of the advantage.
    """

    positive_weight: float
    negative_weight: float

    reduction = "sequence_mean"
    needs = ("reward_B",)

    def check(self) -> None:
        """Weights are not negative."""
        super().check()
        for field in ("positive_weight", "negative_weight"):
            self.require(getattr(self, field) >= 0, field, "a number of at least 0")

    @property
    def on_policy(self) -> OnPolicy:
        """The policy gradient, unless the two kinds of answers weigh differently from 1."""
        return "policy_gradient" if self.positive_weight == self.negative_weight == 1 else "other"

    @property
    def unbounded(self) -> bool:
        """Good answers have no ratio: −A log θ is infinite at log θ = −∞."""
        return True

    def surrogate(self, inputs: LossInputs) -> Surrogate:
        """A bad token above the anchor's probability counts as clipped high."""
        import torch

        from stalefront.surrogate import Surrogate, weighted_logp

        assert inputs.reward_B is not None, "declared in `needs`"
        good_B1 = (inputs.reward_B > 0)[:, None]
        ratio = torch.exp(self.kept_log_ratio_BT(inputs)).detach()
        tapered = self.negative_weight * ratio.clamp(0, 1)
        weight = torch.where(good_B1, torch.full_like(ratio, self.positive_weight), tapered)
        loss = weighted_logp(inputs.logp_theta_BT, weight, inputs.advantage_B1)
        high = (ratio > 1) & ~good_B1
        return Surrogate(loss, torch.zeros_like(high), high)
