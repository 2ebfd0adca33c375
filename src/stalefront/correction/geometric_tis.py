"""Truncated importance sampling with the length-normalised ratio of whole sequences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stalefront.correction import Over, TruncatedRatio, counted_BT

if TYPE_CHECKING:
    from stalefront.batch import LossInputs, Weights


@dataclass(frozen=True)
class GeometricTIS(TruncatedRatio):
    """w = sg[clamp(exp(mean_t log ratio_t), floor, cap)], one weight a sequence; nothing is rejected.

    ROLL's `geometric` weight; with both bounds AReaL's clamp of sequences.

    Attributes
    ----------
    over
        `valid`: all tokens of a sequence enter; `kept`: those that the rules before left, as in SkyRL.
    """

    over: Over

    level = "sequence"
    looks_at = "ratio"

    def __call__(self, inputs: LossInputs, so_far: Weights) -> Weights:
        """The same weight on every token of a sequence; 1 where no token enters."""
        from stalefront.correction.token_tis import truncated_ratio
        from stalefront.ratios import over_sequence

        log_ratio_B1 = over_sequence(self.log_ratio_BT(inputs), counted_BT(inputs, so_far, self.over), "mean")
        return so_far.times(truncated_ratio(log_ratio_B1, cap=self.cap, floor=self.floor))
