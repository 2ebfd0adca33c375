"""Sequence mask: sequences whose statistic lies outside of a band leave the loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from stalefront.correction import Aggregate, Over, RatioCorrection, Statistic, counted_BT

if TYPE_CHECKING:
    from torch import Tensor

    from stalefront.batch import LossInputs, Weights


@dataclass(frozen=True)
class SequenceMask(RatioCorrection):
    """Keep a sequence iff low ≤ S ≤ high, S = mean, sum or maximum over its tokens of a statistic.

    Ratios are aggregated as logs: a mean is the geometric one, a sum the product. A sequence without a token that
    enters has S = 1 (or 0, for what is no ratio), and passes.

    Attributes
    ----------
    statistic
        As in `token_mask`.
    aggregate
        How it is taken over a sequence.
    low, high : float or None
        Bounds; None for none.
    inclusive : bool
        A value on a bound is kept.
    over
        `valid`: all tokens of a sequence enter; `kept`: those that the rules before left, as in SkyRL.
    weight
        What the tokens of a kept sequence are multiplied by: `one`; the `geometric` mean of their ratios (AReaL); their
        `product` (TRL's default); or each `token` its own ratio (NeMo-RL and OpenRLHF). None is clipped.
    outside
        `drop`: a rejected sequence leaves the loss; `zero`: its weight is 0, and it counts in every denominator.
    """

    statistic: Statistic
    aggregate: Aggregate
    low: float | None
    high: float | None
    inclusive: bool
    over: Over
    weight: Literal["one", "geometric", "product", "token"]
    outside: Literal["drop", "zero"]

    level = "sequence"
    looks_at = "option"
    bounds = "option"
    kept_weight = "option"

    def check(self) -> None:
        """The band holds what both policies agree on."""
        super().check()
        largest = 1.0 if self.statistic == "difference" and self.aggregate != "sum" else float("inf")
        self.require_bounds(self.low, self.high, self.statistic, inclusive=self.inclusive, largest=largest)

    @property
    def is_weight(self) -> bool:
        """Unless the kept have weight 1."""
        return self.weight != "one"

    @property
    def unbounded(self) -> bool:
        """Where an infinite ratio can pass."""
        if not self.is_weight or self.clamp_nats is not None:
            return False
        if self.statistic == "inverse_ratio":
            return not self.low
        return self.statistic == "difference" or self.high in (None, float("inf"))

    def __call__(self, inputs: LossInputs, so_far: Weights) -> Weights:
        """Sequences outside are dropped; those inside get their weight."""
        from stalefront.ratios import in_units_of_bounds, inside, over_sequence

        counted = counted_BT(inputs, so_far, self.over)
        value = over_sequence(self.statistic_BT(inputs, self.statistic), counted, self.aggregate)
        keep_B1 = inside(in_units_of_bounds(value, self.statistic), self.low, self.high, inclusive=self.inclusive)
        weights = so_far
        if self.is_weight:
            weights = weights.times(self._weight(inputs, counted).where(keep_B1, 0.0))
        elif self.outside == "zero":
            weights = weights.times(keep_B1.to(so_far.weight_BT.dtype))
        return weights.keeping(keep_B1) if self.outside == "drop" else weights

    def _weight(self, inputs: LossInputs, counted: Tensor) -> Tensor:
        """Weight of the kept: (B, T) or (B, 1)."""
        from stalefront.ratios import over_sequence

        log_ratio_BT = self.log_ratio_BT(inputs)
        if self.weight == "token":
            return log_ratio_BT.exp()
        return over_sequence(log_ratio_BT, counted, "mean" if self.weight == "geometric" else "sum").exp()
