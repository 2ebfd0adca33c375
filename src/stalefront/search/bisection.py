"""Probabilistic bisection: where a run begins to collapse, from answers that are sometimes wrong.

Hypotheses about one arm are the K + 1 intervals that its K candidate learning rates cut the log axis into: below all
of them, between two neighbours, above all of them. An answer at x says on which side of x the boundary b lies. It is
taken to be right with probability p, wherever x lies:

    P(collapsed | x, b) = p if b < x, 1 − p if b > x.

Horstein, IEEE Trans. Inf. Theory 9 (1963) 136; Waeber, Frazier, Henderson, SIAM J. Control Optim. 51 (2013) 2261.

Notation: ``K`` candidates in increasing order, ``C`` = K + 1 intervals, x = log10 of the learning rate.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]

# Candidates carry this many significant digits, so that a learning rate reads the same wherever it is written.
DIGITS = 3
# Learning rates closer than this, relatively, are one.
SLACK = 1e-9
# Probabilities that differ by less are a tie, which goes to the smaller learning rate.
TIE_DIGITS = 9


class Answer(NamedTuple):
    """What one run said: it was at `x` and `collapsed` or not."""

    x: float
    collapsed: bool


class Point(NamedTuple):
    """A place to ask: number of the candidate, from 0, and the seed."""

    candidate: int
    seed: int


def learning_rate(x: float) -> float:
    """Learning rate at `x` = log10 lr, to three significant digits."""
    return float(f"{10.0**x:.{DIGITS - 1}e}")


def candidates(low: float, high: float, per_decade: int) -> tuple[float, ...]:
    """Learning rates 10^(k / per_decade) within [low, high], to three significant digits, increasing.

    They do not depend on the ends of the interval, so that searches and grids over other intervals share their cells.
    """
    first = math.floor(math.log10(low) * per_decade)
    last = math.ceil(math.log10(high) * per_decade)
    rates = (learning_rate(k / per_decade) for k in range(first, last + 1))
    return tuple(lr for lr in dict.fromkeys(rates) if low * (1 - SLACK) <= lr <= high * (1 + SLACK))


def edges(x_K: Sequence[float]) -> FloatArray:
    """Ends of the C intervals, shape (C + 1,). The two open ones are given the width of their neighbours."""
    x = np.asarray(x_K, dtype=np.float64)
    return np.concatenate([[2 * x[0] - x[1]], x, [2 * x[-1] - x[-2]]])


def posterior(x_K: Sequence[float], answers: Iterable[Answer], right: float) -> FloatArray:
    """Probability of each interval after `answers`, shape (C,); uniform before any.

    mass_c ∝ Π (f p + (1 − f)(1 − p)) over answers, where p is replaced by 1 − p for runs that did not collapse, and f
    is the share of interval c below x: 1 or 0 for a candidate. Half of an open interval counts as below an x in it.

    Parameters
    ----------
    right : float
        p, the probability that an answer is right.
    """
    ends = edges(x_K)
    low, high = ends[:-1], ends[1:]
    told = list(answers)
    x_N1 = np.array([answer.x for answer in told]).reshape(-1, 1)
    p_N1 = np.where([answer.collapsed for answer in told], right, 1.0 - right).reshape(-1, 1)
    below_NC = np.clip((x_N1 - low) / (high - low), 0.0, 1.0)
    below_NC[:, :1] = np.where(x_N1 >= high[0], 1.0, 0.5)
    below_NC[:, -1:] = np.where(x_N1 <= low[-1], 0.0, 0.5)
    log_mass = np.log(below_NC * p_N1 + (1.0 - below_NC) * (1.0 - p_N1)).sum(0)
    mass = np.exp(log_mass - log_mass.max())
    return np.asarray(mass / mass.sum())


def believed_quantile(pending: int) -> float:
    """Quantile to ask at while `pending` runs of the arm have not answered: ½, ¼, ¾, ⅛, ⅝ … (van der Corput, base 2).

    One run asks at the median. More of them at once spread over the posterior, without a guess at what they will say.
    """
    n, place, value = pending + 1, 0.5, 0.0
    while n:
        n, digit = divmod(n, 2)
        value += digit * place
        place /= 2
    return value


def choose(mass_C: FloatArray, quantile: float, seeds: Sequence[int], taken: Collection[Point]) -> Point | None:
    """Where to ask next: the free candidate that splits the posterior nearest to `quantile`.

    Seeds are cycled through, so that successive runs of an arm differ in theirs. A run that was asked before would
    only repeat its answer: a candidate whose seeds are all taken is passed over. None when nothing is free.
    """
    below_K = np.cumsum(mass_C)[:-1]
    order = np.argsort(np.round(np.abs(below_K - quantile), TIE_DIGITS), kind="stable")
    first = len(taken) % len(seeds)
    turn = [*seeds[first:], *seeds[:first]]
    for index in order:
        for seed in turn:
            point = Point(int(index), seed)
            if point not in taken:
                return point
    return None


def quantile_of(x_K: Sequence[float], mass_C: FloatArray, level: float) -> float:
    """The x below which the boundary lies with probability `level`; −inf or inf within the open intervals."""
    ends, cumulated = edges(x_K), np.concatenate([[0.0], np.cumsum(mass_C)])
    interval = int(np.clip(np.searchsorted(cumulated, level, side="left") - 1, 0, len(mass_C) - 1))
    if interval == 0:
        return -math.inf
    if interval == len(mass_C) - 1:
        return math.inf
    share = (level - cumulated[interval]) / mass_C[interval]
    return float(ends[interval] + share * (ends[interval + 1] - ends[interval]))


def deviation(x_K: Sequence[float], mass_C: FloatArray) -> float:
    """Standard deviation of the boundary, uniform within intervals; the open ones count with their stand-in width."""
    ends = edges(x_K)
    middle, width = (ends[:-1] + ends[1:]) / 2, np.diff(ends)
    mean = float(mass_C @ middle)
    return math.sqrt(float(mass_C @ ((middle - mean) ** 2 + width**2 / 12)))


def resolution(per_decade: int) -> float:
    """Deviation that no number of answers gets below: a boundary uniform between two neighbours, in dex."""
    return 1.0 / (per_decade * math.sqrt(12))


@dataclass(frozen=True)
class Estimate:
    """η50 of an arm with its interval, as learning rates.

    Attributes
    ----------
    value : float
        Posterior median; the first or last candidate where the median lies beyond it.
    bound : str
        `≤` or `≥` where the median lies beyond a candidate, else empty.
    low, high : float or None
        Ends of the equal-tailed interval; None is open.
    deviation_dex : float
        Posterior standard deviation of log10 η50.
    """

    value: float
    bound: str
    low: float | None
    high: float | None
    deviation_dex: float


def estimate(x_K: Sequence[float], mass_C: FloatArray, level: float) -> Estimate:
    """Median and equal-tailed interval of a posterior."""
    low, middle, high = (quantile_of(x_K, mass_C, q) for q in ((1 - level) / 2, 0.5, (1 + level) / 2))
    bound = "≤" if middle == -math.inf else "≥" if middle == math.inf else ""
    value = min(max(middle, x_K[0]), x_K[-1])
    lr_low, lr_high = (10.0**end if math.isfinite(end) else None for end in (low, high))
    return Estimate(10.0**value, bound, lr_low, lr_high, deviation(x_K, mass_C))
