"""Truncated importance sampling with the length-normalised ratio of each segment (turn) of a sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stalefront.correction import Over, TruncatedRatio, counted_BT

if TYPE_CHECKING:
    from stalefront.batch import LossInputs, Weights


@dataclass(frozen=True)
class SegmentTIS(TruncatedRatio):
    """w = sg[clamp(exp(mean over the segment of log ratio_t), floor, cap)], one weight a segment.

    A segment is a contiguous run of completion tokens: what lies between two of them came from a tool or a user
    (ROLL's `segment` weight). In a sequence of one turn it is `geometric_tis`.

    Attributes
    ----------
    over
        `valid`: all tokens of a segment enter; `kept`: those that the rules before left.
    """

    over: Over

    level = "segment"
    looks_at = "ratio"

    def __call__(self, inputs: LossInputs, so_far: Weights) -> Weights:
        """The same weight on every token of a segment; 1 where no token enters."""
        from stalefront.correction.token_tis import truncated_ratio
        from stalefront.ratios import over_segments

        counted = counted_BT(inputs, so_far, self.over)
        log_ratio_BT = over_segments(self.log_ratio_BT(inputs), inputs.mask_BT, counted)
        return so_far.times(truncated_ratio(log_ratio_BT, cap=self.cap, floor=self.floor))
