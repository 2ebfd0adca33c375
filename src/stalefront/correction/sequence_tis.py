"""Sequence-level truncated importance sampling: the capped product of a sequence's ratios on each of its tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stalefront.correction import Over, TruncatedRatio, counted_BT

if TYPE_CHECKING:
    from stalefront.batch import LossInputs, Weights


@dataclass(frozen=True)
class SequenceTIS(TruncatedRatio):
    """w = sg[clamp(Π_t ratio_t, floor, cap)], one weight a sequence; nothing is rejected.

    The product is the exact importance weight of a whole sequence and grows as e^length: in SkyRL, verl, VCPO (cap 8)
    and TRL. Some of them clamp the sum of log-ratios to ±20 first; below a finite cap that is a floor of e^−20.

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

        log_ratio_B1 = over_sequence(self.log_ratio_BT(inputs), counted_BT(inputs, so_far, self.over), "sum")
        return so_far.times(truncated_ratio(log_ratio_B1, cap=self.cap, floor=self.floor))
