"""M2PO as AReaL has it: the largest squared log-ratios of a batch leave the loss until their mean fits a budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from stalefront.correction import Over, RatioCorrection, counted_BT

if TYPE_CHECKING:
    from stalefront.batch import LossInputs, Weights


@dataclass(frozen=True)
class M2POMask(RatioCorrection):
    """Keep the tokens with the smallest (log ratio)² of the batch whose mean stays below the budget.

    The authors' own code does something else: it looks at harmful tokens alone and turns the budget into bounds of a
    clip (arXiv 2510.01161).

    Attributes
    ----------
    budget : float
        Bound on the mean of (log ratio)², in nats²; strict. If no subset satisfies it, the smallest stays.
    over
        `valid`: all tokens of the batch enter; `kept`: those that the rules before left.
    ties
        `together`: tokens that tie with the last one dropped go with it, so that the order of rows decides nothing;
        `in_order`: as many as must go, the first of the batch before the others (AReaL).
    """

    budget: float
    over: Over
    ties: Literal["together", "in_order"]

    level = "token"
    looks_at = "(log ratio)²"
    bounds = "strict"
    kept_weight = "1"
    scope = "batch"

    def check(self) -> None:
        """On-policy the mean is 0, which must be below the budget."""
        super().check()
        self.require(self.budget > 0, "budget", "a number above 0, in nats²", "0.04 is the published one.")

    def __call__(self, inputs: LossInputs, so_far: Weights) -> Weights:
        """The tokens with the largest squares are dropped."""
        from stalefront.ratios import last_with_mean_below, smallest_with_mean_below

        counted = counted_BT(inputs, so_far, self.over)
        square = self.log_ratio_BT(inputs).double().square()
        small = smallest_with_mean_below if self.ties == "together" else last_with_mean_below
        return so_far.keeping(small(square, counted, self.budget) | ~counted)
