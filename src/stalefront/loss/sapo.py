"""SAPO: a soft gate in place of the clip, centred on the on-policy ratio (arXiv 2511.20347)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from stalefront.loss import RatioLoss

if TYPE_CHECKING:
    from torch import Tensor

    from stalefront.batch import LossInputs
    from stalefront.surrogate import Surrogate


@dataclass(frozen=True)
class SAPO(RatioLoss):
    """(1/B) Σ_b (1/|y_b|) Σ_t −(4/τ) σ(τ (r − 1)) A, τ = tau_pos where A > 0 and tau_neg elsewhere.

    The slope with respect to log θ is 4 σ (1 − σ) r A: 1 times A on-policy, falling off smoothly on both sides, faster
    for a larger τ. The value at r = 1 is 2/τ A and not A, so that losses of the two signs do not compare.

    Attributes
    ----------
    level
        `token`: each token's ratio. `sequence`: their geometric mean, with its gradient (an option in TRL and AReaL).
    advantage
        `token`: each token's own. `sequence`: the mean over a sequence's tokens (AReaL at sequence level).
    """

    tau_pos: float
    tau_neg: float
    level: Literal["token", "sequence"]
    advantage: Literal["token", "sequence"]

    reduction = "sequence_mean"

    def check(self) -> None:
        """Temperatures are positive."""
        super().check()
        for field in ("tau_pos", "tau_neg"):
            self.require(getattr(self, field) > 0, field, "a number above 0")

    def surrogate(self, inputs: LossInputs) -> Surrogate:
        """The gate is never closed, so nothing counts as clipped."""
        import torch

        from stalefront.surrogate import unclipped

        advantage, ratio = self.advantage_of(inputs), self.gated_ratio(inputs)
        tau = torch.where(advantage > 0, ratio.new_tensor(self.tau_pos), ratio.new_tensor(self.tau_neg))
        loss = -torch.sigmoid(tau * (ratio - 1)) * (4 / tau) * advantage
        return unclipped(loss.expand(inputs.mask_BT.shape))

    def gated_ratio(self, inputs: LossInputs) -> Tensor:
        """The ratio that the gate looks at: (B, T), or (B, 1) of sequences."""
        from stalefront.surrogate import sequence_log_ratio_B1

        if self.level == "token":
            return self.kept_log_ratio_BT(inputs).exp()
        return sequence_log_ratio_B1(self.log_ratio_BT(inputs), inputs.mask_BT).exp()

    def advantage_of(self, inputs: LossInputs) -> Tensor:
        """(B, 1), or (B, T) where tokens of a sequence have their own."""
        from stalefront.ratios import over_sequence

        if self.advantage == "token" or inputs.advantage_B.dim() == 1:
            return inputs.advantage_B1
        return over_sequence(inputs.advantage_B1, inputs.mask_BT, "mean")

    def ratio_BT(self, inputs: LossInputs) -> Tensor:
        """The surrogate's ratio, on every token."""
        ratio = super().ratio_BT(inputs) if self.level == "token" else self.gated_ratio(inputs)
        return ratio.expand(inputs.mask_BT.shape)
