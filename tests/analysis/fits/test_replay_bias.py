"""The lag from which replay biases: by hand, identities, the bootstrap against brute force, what is missing."""

import itertools
import math

import numpy as np
import pandas as pd
import pytest

from stalefront.analysis.fits.replay_bias import COLUMNS, fit_replay_bias, start_lag

REMOVED = 1e-3


def rows(gaps, *, removed=REMOVED, seeds=(0,), replay="r2", lags=None, n=10, jitter=None):
    """Frame of runs with the given mean gap at each lag, and of runs without replay; jitter: factor a seed."""
    out = []
    for seed in seeds:
        factor = 1.0 if jitter is None else jitter[seed]
        for kind in (replay, "none"):
            for lag, gap in zip(lags if lags is not None else range(len(gaps)), gaps, strict=True):
                row = {"cell_id": f"{kind}-{seed}", "replay": kind, "S": 16, "lr": 1e-3, "seed": seed, "lag": lag}
                for name in COLUMNS.values():
                    row[f"{name}_sum"], row[f"{name}_n"] = 0.0, 0
                if kind != "none":
                    row |= {"gap_sum": n * gap * factor, "gap_n": n, "drift_sum": n * 0.1 * lag, "drift_n": n}
                row |= {"old_mu_sum": n * removed, "old_mu_n": n}
                out.append(row)
    return pd.DataFrame(out)


def fitted(frame, replay="r2"):
    return fit_replay_bias(frame, replay=replay, arm="S=16")


def test_by_hand():
    """The gap grows by 3e-4 an update; what age has added first exceeds 1e-3 at lag 4."""
    fit = fitted(rows([3e-4 * i for i in range(8)]))
    c = fit.constants
    assert c["start_updates"].value == 4
    assert c["start_updates"].interval is None
    assert c["removed_nats"].value == pytest.approx(REMOVED)
    assert c["gap_last_nats"].value == pytest.approx(2.1e-3)
    assert c["drift_last_frac"].value == pytest.approx(0.7)
    assert (fit.n, fit.n_events, fit.n_right) == (2, 1, 0)
    assert fit.rows[3] == {"lag": 3, "gap_nats": pytest.approx(9e-4), "n": 10, "drift_frac": pytest.approx(0.3)}


def test_a_gap_at_lag_zero_is_no_effect_of_age():
    gaps = [1.2e-3 + 3e-4 * i for i in range(8)]
    c = fitted(rows(gaps)).constants
    assert c["start_updates"].value == 4
    assert c["start_whole_updates"].value == 0


@pytest.mark.parametrize("gaps", [[0.0] * 5, [5e-4] * 5, [2e-3] * 5, [1e-3, 9e-4, 8e-4]])
def test_a_gap_that_does_not_grow_never_biases(gaps):
    fit = fitted(rows(gaps))
    assert fit.constants["start_updates"].value is None
    assert (fit.n_events, fit.n_right) == (0, 1)


def test_scaling_both_sides_changes_nothing():
    gaps = [1e-4, 4e-4, 9e-4, 1.6e-3, 2.5e-3]
    one, other = fitted(rows(gaps)), fitted(rows([1e3 * g for g in gaps], removed=1e3 * REMOVED))
    assert one.constants["start_updates"] == other.constants["start_updates"]


def by_min_max(y, w):
    """Isotonic regression by its definition: at i, the largest over j ≤ i of the smallest mean of j … k over k ≥ i."""
    n = len(y)
    mean = {(j, k): np.average(y[j : k + 1], weights=w[j : k + 1]) for j in range(n) for k in range(j, n)}
    return np.array([max(min(mean[j, k] for k in range(i, n)) for j in range(i + 1)) for i in range(n)])


def test_the_start_is_that_of_an_isotonic_fit():
    rng = np.random.default_rng(0)
    for _ in range(20):
        lags = np.arange(12.0)
        gap, weight = lags * 2e-4 + rng.normal(0, 6e-4, 12), rng.integers(1, 9, 12).astype(float)
        fit = by_min_max(gap, weight)
        for whole, base in ((True, 0.0), (False, fit[0])):
            above = np.flatnonzero(fit - base > REMOVED)
            expected = lags[above[0]] if len(above) else math.inf
            assert start_lag(lags, gap, weight, REMOVED, whole=whole) == expected


def test_three_seeds_are_resampled_as_every_ordered_draw():
    gaps, jitter = [2e-4 * i for i in range(16)], {0: 0.6, 1: 1.0, 2: 1.7}
    fit = fitted(rows(gaps, seeds=(0, 1, 2), jitter=jitter))
    starts = []
    for picks in itertools.product(range(3), repeat=3):
        mean = np.mean([jitter[p] for p in picks])
        starts.append(next(i for i, g in enumerate(gaps) if g * mean > REMOVED))
    ends = np.quantile(starts, [0.025, 0.975], method="inverted_cdf")
    interval = fit.constants["start_updates"].interval
    assert (interval.lo, interval.hi, interval.kind) == (*ends, "bootstrap")
    assert interval.lo < fit.constants["start_updates"].value < interval.hi


def test_two_seeds_give_their_range():
    fit = fitted(rows([2e-4 * i for i in range(16)], seeds=(0, 1), jitter={0: 1.0, 1: 0.1}))
    interval = fit.constants["start_updates"].interval
    assert (interval.lo, interval.hi, interval.level) == (6, None, None)
    assert (fit.n_events, fit.n_right) == (1, 1)


def test_gaps_that_are_not_finite_exceed_and_are_named():
    fit = fitted(rows([0.0, 1e-4, math.inf, math.nan]))
    assert fit.constants["start_updates"].value == 2
    assert "not finite at 2 of 4 lags" in " ".join(fit.notes)
    assert fit.to_json()["rows"][3]["gap_nats"] is None


def test_nothing_exceeds_a_mismatch_that_is_not_finite():
    fit = fitted(rows([0.0, 1.0, math.inf], removed=math.nan))
    assert fit.constants["start_updates"].value is None
    assert "nothing exceeds it" in fit.notes[-1]


def test_lags_that_begin_above_zero_are_named():
    fit = fitted(rows([1e-4, 1e-3, 3e-3], lags=[3, 7, 11]))
    assert fit.constants["start_updates"].value == 11
    assert fit.constants["start_whole_updates"].value == 11
    assert "smallest lag on record is 3" in fit.notes[0]


def test_lags_that_no_step_measured_are_not_zero():
    frame = rows([0.0, 0.0, 5e-4, 0.0, 2e-3])
    frame.loc[frame["lag"].isin((1, 3)), ["gap_sum", "gap_n"]] = 0
    fit = fitted(frame)
    assert [r["lag"] for r in fit.rows] == [0, 2, 4]
    assert fit.constants["start_updates"].value == 4


@pytest.mark.parametrize(
    ("drop", "note"),
    [("r2", "measured the replay gap"), ("none", "no run without replay"), ("seed", "no seed has both")],
)
def test_what_is_missing_is_said(drop, note):
    frame = rows([0.0, 2e-3], seeds=(0, 1))
    if drop == "seed":
        frame = frame[(frame["replay"] == "none") == (frame["seed"] == 0)]
    fit = fitted(frame[frame["replay"] != drop])
    assert fit.constants == {}
    assert note in fit.notes[0]
    assert fit.n == 0
