"""Resamples of seeds for a cluster bootstrap: every one with its probability where they are few, else random ones."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stalefront.analysis.verdicts.base import FloatArray as Array

MIN_SEEDS = 3
# Up to this many seeds the C(2n − 1, n) distinct draws are enumerated: 10 for three, 126 for five.
MAX_ENUMERATED = 5
N_BOOTSTRAP = 1000
BOOTSTRAP_SEED = 20260702


@dataclass(frozen=True)
class Draws:
    """Resamples of n seeds: how often each seed is in a draw, shape (D, n), and the draw's probability, shape (D,)."""

    seeds: tuple[Any, ...]
    counts: Array
    weight: Array


def draws_of(seeds: Sequence[Any]) -> Draws | None:
    """Every resample of up to five seeds with its probability, a thousand random ones of more; None below three."""
    n = len(seeds)
    if n < MIN_SEEDS:
        return None
    if n > MAX_ENUMERATED:
        rng = np.random.default_rng(BOOTSTRAP_SEED)
        counts = rng.multinomial(n, np.full(n, 1 / n), size=N_BOOTSTRAP).astype(np.float64)
        return Draws(tuple(seeds), counts, np.full(N_BOOTSTRAP, 1 / N_BOOTSTRAP))
    picks = itertools.combinations_with_replacement(range(n), n)
    table = np.array([np.bincount(p, minlength=n) for p in picks], dtype=np.float64)
    ways = np.array([math.factorial(n) / math.prod(math.factorial(int(c)) for c in row) for row in table])
    return Draws(tuple(seeds), table, ways / n**n)


def weighted_quantile(values: Array, weight: Array, q: float) -> float:
    """Smallest value that at least a share q of the weight does not exceed; a small slack for sums of weights."""
    order = np.argsort(values, kind="stable")
    total = np.cumsum(weight[order])
    return float(values[order][np.searchsorted(total, q - 1e-12)])
