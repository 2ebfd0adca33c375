"""Token mask: tokens whose statistic lies outside of a band leave the loss; the others keep their weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stalefront.correction import RatioCorrection, Statistic

if TYPE_CHECKING:
    from stalefront.batch import LossInputs, Weights


@dataclass(frozen=True)
class TokenMask(RatioCorrection):
    """Keep a token iff low ≤ s_t ≤ high; a kept token's weight is left alone (SkyRL's token mask, verl's `token_k*`).

    Attributes
    ----------
    statistic
        `ratio` r; `inverse_ratio` 1/r, which is what verl's `k1` bounds act on; `k2` (log r)²/2; `k3` r − 1 − log r;
        `inverse_k3` 1/r − 1 + log r (AReaL's k3);
        `difference` of the two probabilities (ROLL; prime-rl's IPO with ±ε).
    low, high : float or None
        Bounds; None for none.
    inclusive : bool
        A value on a bound is kept.
    """

    statistic: Statistic
    low: float | None
    high: float | None
    inclusive: bool

    level = "token"
    looks_at = "option"
    bounds = "option"
    kept_weight = "1"

    def check(self) -> None:
        """The band holds what both policies agree on."""
        super().check()
        largest = 1.0 if self.statistic == "difference" else float("inf")
        self.require_bounds(self.low, self.high, self.statistic, inclusive=self.inclusive, largest=largest)

    def __call__(self, inputs: LossInputs, so_far: Weights) -> Weights:
        """Tokens outside are dropped."""
        from stalefront.ratios import in_units_of_bounds, inside

        value = in_units_of_bounds(self.statistic_BT(inputs, self.statistic), self.statistic)
        return so_far.keeping(inside(value, self.low, self.high, inclusive=self.inclusive))
