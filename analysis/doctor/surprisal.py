"""What the sampled tokens alone say: are they as surprising, and as often from the tail, as tokens of old would be?

Notation: x = −log old(token) − entropy, with mean 0 if old is sampled from; T = share of tokens with probability below
0.01 under old, with mean E = their mass. For any f, E_old[f] − E_μ[f] = E_μ[(r − 1) f], r = old/μ, so by
Cauchy–Schwarz |mean x| ≤ √χ² · sd(x), χ² = mean((r − 1)²). What lies beyond cannot come from the mismatch that was
logged: the tokens are from another distribution than the log says. A cut tail has no such r, but μ/old = 1/kept on what
was kept: there χ²(μ‖old) = 1/kept − 1 ≈ K1 bounds it in the same way, with the standard deviation under old, which is
larger than that of the tokens. 2·K1 stands for both (assumed).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from stalefront.analysis.doctor.records import Records
from stalefront.analysis.signature import Moments


@dataclass(frozen=True)
class Surprisal:
    """Pooled over the rollout batches of a cell; the tail is NaN where its mass was not recorded."""

    n: int
    gap: float
    sd: float
    tail_expected: float
    tail_observed: float
    moments: Moments

    @property
    def gap_se(self) -> float:
        """Standard error of the gap, sd/√n."""
        return self.sd / math.sqrt(self.n) if self.n else math.nan

    @property
    def reach(self) -> float:
        """√max(χ², 2·K1): how far a mean can be off by what was logged, in standard deviations."""
        chi2 = 0.0 if math.isnan(self.moments.chi2) else self.moments.chi2
        return math.sqrt(max(chi2, 2 * self.moments.k1, 0.0)) if self.moments.n else math.nan

    @property
    def gap_explained(self) -> float:
        """Largest ``|gap|`` that the logged mismatch allows."""
        return self.reach * self.sd

    @property
    def alignment(self) -> float:
        """``|gap|`` / (√mean(l²) · sd(x)): 1 to first order where log old/μ follows the surprisal (a temperature)."""
        size = math.sqrt(self.moments.second) * self.sd
        return abs(self.gap) / size if size else math.nan

    @property
    def tail_sd(self) -> float:
        """Largest standard deviation of "from the tail": √(E(1 − E))."""
        return math.sqrt(max(self.tail_expected * (1 - self.tail_expected), 0.0))

    @property
    def tail_se(self) -> float:
        """Largest standard error of the observed tail."""
        return self.tail_sd / math.sqrt(self.n) if self.n else math.nan

    def gap_unexplained(self, z: float) -> bool:
        """Whether the gap is beyond chance and beyond what was logged."""
        return abs(self.gap) > z * self.gap_se + self.gap_explained

    def tail_cut(self, z: float, share: float) -> bool:
        """Whether the tail lacks more than chance and log allow, and less than ``share`` of it is left."""
        lacking = self.tail_expected - self.tail_observed
        beyond = lacking > z * self.tail_se + self.reach * self.tail_sd
        return beyond and self.tail_observed < share * self.tail_expected

    def tail_there(self, z: float, share: float) -> bool:
        """Whether more than ``share`` of the expected tail was seen, beyond chance."""
        return self.tail_observed - share * self.tail_expected > z * self.tail_se


def surprisal(records: Records) -> Surprisal:
    """Pool the columns of a cell; batches that are not finite are left out (`Moments.left_out` counts them)."""
    tokens = records.tokens_of("surprisal_gap_nats")
    gap, error = (records.batches(c) for c in ("surprisal_gap_nats", "surprisal_gap_se_nats"))
    ok = np.isfinite(gap) & np.isfinite(error) & (tokens > 0)
    tokens, gap, error = tokens[ok], gap[ok], error[ok]
    n = float(tokens.sum())
    mean = float(tokens @ gap) / n if n else math.nan
    second = float(tokens @ (error**2 * tokens + gap**2)) / n if n else math.nan
    sd = math.sqrt(max(second - mean**2, 0.0)) if n else math.nan
    tail = (records.mean("tail_expected_frac"), records.mean("tail_observed_frac"))
    return Surprisal(int(n), mean, sd, *tail, records.moments())
