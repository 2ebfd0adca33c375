"""ESTR: the more uncertain the behaviour policy was, the more a token's log-ratio may have moved (2607.22186)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stalefront.correction import RatioCorrection

if TYPE_CHECKING:
    from stalefront.batch import LossInputs, Weights


@dataclass(frozen=True)
class ESTR(RatioCorrection):
    """Keep a token iff (log ratio)² / (H + ε) ≤ τ, H = entropy of the behaviour policy's full distribution there.

    The method takes θ/μ and an ordinary clipped surrogate on θ/μ. It has no public code, and its τ is not published.

    Attributes
    ----------
    tau : float
        Bound, in nats.
    epsilon : float
        Added to the entropy, so that a certain token has a band at all, in nats.
    """

    tau: float
    epsilon: float

    level = "token"
    looks_at = "(log ratio)² / entropy"
    bounds = "inclusive"
    kept_weight = "1"
    needs = ("entropy_behav_BT",)

    def check(self) -> None:
        """Both are sizes."""
        super().check()
        self.require(self.tau >= 0, "tau", "a number of at least 0, in nats")
        self.require(0 < self.epsilon < float("inf"), "epsilon", "a finite number above 0, in nats")

    def __call__(self, inputs: LossInputs, so_far: Weights) -> Weights:
        """Tokens beyond their band are dropped."""
        from stalefront.ratios import inside

        assert inputs.entropy_behav_BT is not None, "a cell whose rules need the behaviour entropy records it"
        square = self.log_ratio_BT(inputs).square()
        return so_far.keeping(inside(square / (inputs.entropy_behav_BT + self.epsilon), None, self.tau))
