"""Truncated importance sampling with the length-normalised ratio of whole sequences."""

from __future__ import annotations

from dataclasses import dataclass

from stalefront.correction import TruncatedSequenceRatio


@dataclass(frozen=True)
class GeometricTIS(TruncatedSequenceRatio):
    """w = sg[clamp(exp(mean_t log ratio_t), floor, cap)], one weight a sequence; nothing is rejected.

    ROLL's `geometric` weight; with both bounds AReaL's clamp of sequences.
    """

    aggregate = "mean"
