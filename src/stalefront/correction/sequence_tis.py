"""Sequence-level truncated importance sampling: the capped product of a sequence's ratios on each of its tokens."""

from __future__ import annotations

from dataclasses import dataclass

from stalefront.correction import TruncatedSequenceRatio


@dataclass(frozen=True)
class SequenceTIS(TruncatedSequenceRatio):
    """w = sg[clamp(Π_t ratio_t, floor, cap)], one weight a sequence; nothing is rejected.

    The product is the exact importance weight of a whole sequence and grows as e^length: in SkyRL, verl, VCPO (cap 8)
    and TRL. Some of them clamp the sum of log-ratios to ±20 first; below a finite cap that is a floor of e^−20.
    """

    aggregate = "sum"
