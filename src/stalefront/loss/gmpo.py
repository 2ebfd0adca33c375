"""GMPO: the geometric mean of clipped token ratios is the sequence's ratio (arXiv 2507.20673)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stalefront.loss import RatioLoss

if TYPE_CHECKING:
    from torch import Tensor

    from stalefront.batch import LossInputs
    from stalefront.surrogate import Surrogate


@dataclass(frozen=True)
class GMPO(RatioLoss):
    """(1/B) Σ_b −A exp((1/|y_b|) Σ_t l′_t), l′ = min(l, ε₊) where A > 0, max(l, −ε₋) where A < 0.

    l = log r. The clip acts on single tokens and in nats: ε = .4 allows ratios from e^−.4 to e^.4.

    Attributes
    ----------
    epsilon, epsilon_high : float
        ε₋ and ε₊; null for ε₊ = ε₋.
    length_epsilon : float
        Added to |y_b| in the means, as verl has it (1e-8): below float32's resolution, but not below float64's.
    """

    epsilon: float
    epsilon_high: float | None
    length_epsilon: float

    reduction = "sequence_mean"

    def check(self) -> None:
        """Widths are at least 0."""
        super().check()
        self.require(self.epsilon >= 0, "epsilon", "nats of at least 0, or inf for no clip")
        high = self.epsilon_high
        self.require(high is None or high >= 0, "epsilon_high", "nats of at least 0, inf, or null for epsilon")
        self.require(0 <= self.length_epsilon < 1, "length_epsilon", "a number from 0 up to 1", "0 is the usual value.")

    def surrogate(self, inputs: LossInputs) -> Surrogate:
        """Every token of a sequence carries the sequence's value; its advantage is the mean over its tokens."""
        import torch

        from stalefront.surrogate import Surrogate

        shape = inputs.mask_BT.shape
        high = self.epsilon if self.epsilon_high is None else self.epsilon_high
        log_ratio, advantage = self.log_ratio_BT(inputs), inputs.advantage_B1.expand(shape)
        bounded = torch.where(advantage > 0, log_ratio.clamp(max=high), log_ratio.clamp(min=-self.epsilon))
        # A token of no advantage has no side to be clipped on, and leaves the mean alone.
        bounded = torch.where(advantage == 0, torch.zeros_like(bounded), bounded)
        mean_advantage = inputs.advantage_B1
        if inputs.advantage_B.dim() == 2 or self.length_epsilon:
            mean_advantage = self._mean(advantage, inputs.mask_BT)
        loss = -mean_advantage * torch.exp(self._mean(bounded, inputs.mask_BT))
        over, under = (log_ratio > high) & (advantage > 0), (log_ratio < -self.epsilon) & (advantage < 0)
        return Surrogate(loss.expand(shape), under, over)

    def _mean(self, value_BT: Tensor, mask_BT: Tensor) -> Tensor:
        """Mean over a sequence, (B, 1); see `length_epsilon`."""
        from stalefront.ratios import over_sequence

        mean = over_sequence(value_BT, mask_BT, "mean")
        if not self.length_epsilon:
            return mean
        length = mask_BT.sum(-1, keepdim=True, dtype=mean.dtype)
        return mean * (length / (length + self.length_epsilon))
