"""What kind of mismatch there is between sampler and trainer, from the moments of l = log old/μ over sampled tokens.

Notation: n tokens drawn by the sampler, r = e^l, K1 = mean(−l), K2 = mean(l²)/2, K3 = mean(r − 1 − l), m = mean(r) − 1.
By definition m = K3 − K1, so two of the three are free. sd = standard deviation of l, χ² = mean((r − 1)²).

=================  ==================================================  ======================
kind               why                                                 what it leaves
=================  ==================================================  ======================
sampler            μ is another distribution with old's support:       m = 0, K1 = K3
                   E_μ[r] = Σ_a μ(a) old(a)/μ(a) = 1
logging noise      the tokens are from old, the number written down    K1 = 0, m = K3
                   has noise of mean 0: E[r] = e^{σ²/2}
truncated support  μ = old/kept on what was kept: l = log kept on      m = kept − 1,
                   every token, and r = kept                           K1 = −log kept ≫ K3
=================  ==================================================  ======================

Terms of the means are uncorrelated from token to token up to how E[l | prefix] varies, so se(K1) = sd/√n and
se(m) = √(χ² − m²)/√n. For a small l the kinds differ by K3 ≈ sd²/2 alone, which shows from n ≈ (z·sd/K3)² ≈ (2z/sd)²
tokens on; below that the answer is ``undecided``. K1 to K3: Schulman, "Approximating KL divergence" (2020); the
table follows from the three definitions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stalefront.analysis.settings import SignatureSettings
from stalefront.analysis.verdicts.base import FloatArray

KINDS = ("none", "sampler", "logging noise", "truncated support", "undecided")


@dataclass(frozen=True)
class Moments:
    """Pooled moments of log old/μ over ``n`` tokens; ``left_out`` batches are not finite.

    ``abs_mean`` is the mean of ``|l|``, ``second`` the mean of l².
    """

    n: int = 0
    k1: float = math.nan
    k3: float = math.nan
    abs_mean: float = math.nan
    second: float = math.nan
    chi2: float = math.nan
    left_out: int = 0

    @property
    def k2(self) -> float:
        """mean(l²)/2."""
        return self.second / 2

    @property
    def excess(self) -> float:
        """m = mean(r) − 1 = K3 − K1."""
        return self.k3 - self.k1

    @property
    def ratio_mean(self) -> float:
        """mean(r)."""
        return 1 + self.excess

    @property
    def sd(self) -> float:
        """Standard deviation of l; rounding may bring the difference of squares below 0."""
        return math.sqrt(max(self.second - self.k1**2, 0.0)) if self.n else math.nan

    @property
    def k1_se(self) -> float:
        """Standard error of K1."""
        return self.sd / math.sqrt(self.n) if self.n else math.nan

    @property
    def excess_se(self) -> float:
        """Standard error of m."""
        return math.sqrt(max(self.chi2 - self.excess**2, 0.0) / self.n) if self.n else math.nan


@dataclass(frozen=True)
class Signature:
    """The kind, and why in words that hold no number; where too few tokens were seen, ``needed`` would tell."""

    kind: str
    why: str
    needed: int | None = None


def of_batches(
    tokens: FloatArray, k1: FloatArray, k3: FloatArray, abs_mean: FloatArray, sd: FloatArray, chi2: FloatArray
) -> Moments:
    """Moments of all tokens of some batches, each given by its own means (B,), weighted by its tokens.

    Batches whose K1, K3 or mean ``|l|`` is not finite are counted and left out: one would make everything NaN. Where sd
    or χ² is absent (NaN) it is absent in the whole.
    """
    finite = np.isfinite(k1) & np.isfinite(k3) & np.isfinite(abs_mean) & (tokens > 0)
    n = float(tokens[finite].sum())
    left_out = int((~finite).sum())
    if not n:
        return Moments(left_out=left_out)
    columns = {"k1": k1, "k3": k3, "abs_mean": abs_mean, "second": sd**2 + k1**2, "chi2": chi2}
    means = {name: float(tokens[finite] @ column[finite]) / n for name, column in columns.items()}
    return Moments(n=int(n), left_out=left_out, **means)


def pooled(parts: Sequence[Moments]) -> Moments:
    """Moments of all tokens of the parts."""
    n, left_out = sum(part.n for part in parts), sum(part.left_out for part in parts)
    if not n:
        return Moments(left_out=left_out)
    names = ("k1", "k3", "abs_mean", "second", "chi2")
    means = {name: math.fsum(part.n * getattr(part, name) for part in parts if part.n) / n for name in names}
    return Moments(n=n, left_out=left_out, **means)


def signature(moments: Moments, settings: SignatureSettings | None = None) -> Signature:
    """Kind of mismatch that the moments show, one of ``KINDS``.

    Parameters
    ----------
    moments : Moments
        Of log old/μ over tokens that the sampler drew.
    settings : SignatureSettings, optional
        Rounding, standard errors that count, and how far apart K1 and K3 must be.

    Returns
    -------
    Signature
    """
    settings = settings or SignatureSettings()
    if not moments.n:
        return Signature("undecided", "no finite record of log old/μ")
    if not math.isfinite(moments.second):
        return Signature("undecided", "the records hold no standard deviation of log old/μ")
    if math.sqrt(moments.second) <= settings.rounding_nats:
        return Signature("none", "log old/μ is of the size of rounding")
    k1_there = _sign(moments.k1, moments.k1_se, settings.z)
    excess_there = _sign(moments.excess, moments.excess_se, settings.z)
    far = moments.k3 < settings.share * moments.k1
    if k1_there > 0 and excess_there < 0 and far:
        return Signature("truncated support", "K1 is far above K3 and the mean ratio below 1: the kept mass")
    if k1_there > 0 and excess_there == 0 and not far:
        return Signature("sampler", "K1 agrees with K3 and the mean ratio with 1")
    if k1_there == 0 and excess_there > 0:
        return Signature("logging noise", "K1 agrees with 0 and the mean ratio is above 1 by K3")
    if k1_there == 0 and excess_there == 0:
        needed = (settings.z * moments.sd / moments.k3) ** 2 if moments.k3 > 0 else math.inf
        return Signature("undecided", "too few tokens to tell the kinds apart", _count(needed))
    return Signature("undecided", "K1 and the mean ratio fit none of the kinds alone")


def _sign(value: float, error: float, z: float) -> int:
    """−1 or 1 where ``value`` is more than ``z`` standard errors below or above 0, 0 otherwise."""
    return 0 if abs(value) <= z * error else int(math.copysign(1, value))


def _count(tokens: float) -> int | None:
    return math.ceil(tokens) if math.isfinite(tokens) else None
