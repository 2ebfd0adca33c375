"""IcePop: tokens whose ratio lies within a band keep it as their weight, the others have none (Ring-1T, 2510.18855)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from stalefront.correction import RatioCorrection

if TYPE_CHECKING:
    from stalefront.batch import LossInputs, Weights


@dataclass(frozen=True)
class IcePop(RatioCorrection):
    """w_t = sg[ratio_t] where low ≤ ratio_t ≤ high, and 0 elsewhere.

    With `anchor=theta/mu` and strict bounds on `loss=reinforce` it is GLM-5's double-sided importance sampling.

    Attributes
    ----------
    low, high : float or None
        Bounds; None for none.
    inclusive : bool
        A ratio on a bound is kept.
    outside
        `drop`: such a token leaves the loss, and denominators where `reduction.denominator` says so; `zero`: it stays,
        with weight 0, and counts in every denominator (verl).
    """

    low: float | None
    high: float | None
    inclusive: bool
    outside: Literal["drop", "zero"]

    level = "token"
    looks_at = "ratio"
    bounds = "option"
    kept_weight = "ratio"

    def check(self) -> None:
        """The band holds 1."""
        super().check()
        self.require_bounds(self.low, self.high, "ratio", inclusive=self.inclusive)

    @property
    def unbounded(self) -> bool:
        """Without an upper bound or a clamp."""
        return self.high in (None, float("inf")) and self.clamp_nats is None

    def __call__(self, inputs: LossInputs, so_far: Weights) -> Weights:
        """The ratio is the weight inside of the band."""
        from stalefront.ratios import inside

        ratio = self.log_ratio_BT(inputs).exp()
        keep = inside(ratio, self.low, self.high, inclusive=self.inclusive)
        weights = so_far.times(ratio.where(keep, 0.0))
        return weights.keeping(keep) if self.outside == "drop" else weights
