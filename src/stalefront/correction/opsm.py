"""Off-policy sequence mask (DeepSeek-V3.2): bad answers that the policy has moved away from leave the loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from stalefront.correction import Over, RatioCorrection, counted_BT

if TYPE_CHECKING:
    from torch import Tensor

    from stalefront.batch import LossInputs, Weights


@dataclass(frozen=True)
class OPSM(RatioCorrection):
    """Drop a sequence iff its advantage is below 0 and mean_t log(base/θ) > delta, base = old or μ.

    Attributes
    ----------
    anchor
        `theta/mu` or `theta/old`: the base is what stands under θ.
    delta : float
        Bound in nats a token; a mean on it is kept.
    sign
        Whose advantage is tested: that of the `sequence` (its mean over tokens), or of each `token`, so that only those
        below 0 are dropped (slime, TRL). They differ where advantages do within a sequence.
    over
        `valid`: all tokens of a sequence enter the mean; `kept`: those that the rules before left.
    """

    anchor: Literal["theta/mu", "theta/old"]
    delta: float
    sign: Literal["sequence", "token"]
    over: Over

    level = "sequence"
    looks_at = "inverse ratio"
    bounds = "inclusive"
    kept_weight = "1"

    def check(self) -> None:
        """On-policy the mean is 0."""
        super().check()
        self.require(self.delta >= 0, "delta", "a number of at least 0, in nats")

    def __call__(self, inputs: LossInputs, so_far: Weights) -> Weights:
        """Sequences, or their tokens, with a negative advantage are dropped where the policy has left them."""
        from stalefront.ratios import inside, over_sequence

        left = over_sequence(-self.log_ratio_BT(inputs), counted_BT(inputs, so_far, self.over), "mean")
        # A mean that is NaN is inside of no bound: such a sequence goes whatever its advantage.
        spared = (self._advantage(inputs) >= 0) & ~left.isnan()
        return so_far.keeping(spared | inside(left, None, self.delta))

    def _advantage(self, inputs: LossInputs) -> Tensor:
        """The advantage whose sign is tested: (B, T) or (B, 1)."""
        from stalefront.ratios import over_sequence

        advantage = inputs.advantage_B1
        if self.sign == "token" or advantage.shape[-1] == 1:
            return advantage
        return over_sequence(advantage, inputs.mask_BT, "mean")
