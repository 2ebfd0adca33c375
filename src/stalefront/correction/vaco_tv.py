"""VACO's filter: in sequences far off-policy, tokens whose update would lead further away leave the loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stalefront.correction import Over, RatioCorrection, counted_BT

if TYPE_CHECKING:
    from stalefront.batch import LossInputs, Weights


@dataclass(frozen=True)
class VACO(RatioCorrection):
    """Where mean_t |ratio_t − 1| > upper, drop the tokens with A · log ratio > 0; the others stay.

    The mean estimates twice the total variation of the two policies over a sequence (arXiv 2603.01365); a token is
    dropped when its gradient would raise it. In open-instruct, with old/μ and a truncated ratio as the weight.

    Attributes
    ----------
    upper : float
        Bound on the mean; a sequence on it is left alone.
    lower : float or None
        Below it the same tokens are dropped, in open-instruct as an option; None for no bound.
    over
        `valid`: all tokens of a sequence enter the mean; `kept`: those that the rules before left.
    """

    upper: float
    lower: float | None
    over: Over

    level = "token"
    looks_at = "sequence mean of |ratio − 1|"
    bounds = "inclusive"
    kept_weight = "1"

    def check(self) -> None:
        """The mean is a size."""
        super().check()
        self.require(self.upper >= 0, "upper", "a number of at least 0, or inf for no bound")
        self.require(self.lower is None or 0 <= self.lower <= self.upper, "lower", "a number from 0 to upper, or null")

    def __call__(self, inputs: LossInputs, so_far: Weights) -> Weights:
        """Tokens that would lead further away are dropped where their sequence is beyond the bound."""
        from stalefront.ratios import inside, over_sequence

        log_ratio_BT = self.log_ratio_BT(inputs)
        distance = over_sequence(log_ratio_BT.expm1().abs(), counted_BT(inputs, so_far, self.over), "mean")
        back = inputs.advantage_B1 * log_ratio_BT <= 0
        return so_far.keeping(back | inside(distance, self.lower, self.upper))
