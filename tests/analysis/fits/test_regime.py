"""Regime: ballistic and diffusive runs are told apart, with the numbers, and little data is called undecidable."""

import numpy as np
import pytest

from stalefront.analysis.fits.regime import Regime

STEPS = 400


def walk(kind, *, warmup=0, seed=0, dims=200):
    """Parameters of a run that drifts or wanders: dist, lr_sum, cosines; every step on a new batch."""
    rng = np.random.default_rng(seed)
    lr = 1e-3 * np.minimum(1.0, np.arange(1, STEPS + 1) / max(warmup, 1))
    noise = rng.standard_normal((STEPS, dims))
    push = {"ballistic": np.ones(dims) * 5 + noise, "diffusive": noise, "between": np.ones(dims) * 0.6 + noise}[kind]
    path = np.cumsum(lr[:, None] * push, axis=0)
    unit = push / np.linalg.norm(push, axis=1, keepdims=True)
    cos = np.concatenate([[np.nan], np.sum(unit[1:] * unit[:-1], axis=1)])
    return {
        "dist": np.linalg.norm(path, axis=1),
        "lr_sum": np.cumsum(lr),
        "cos_grad": cos,
        "at_refresh": np.ones(STEPS, dtype=bool),
    }


@pytest.mark.parametrize(("kind", "exponent"), [("ballistic", 1.0), ("diffusive", 0.5)])
@pytest.mark.parametrize("warmup", [0, 16])
def test_drift_and_wandering_are_told_apart(kind, exponent, warmup):
    call = Regime()(**walk(kind, warmup=warmup))
    assert call.regime == kind
    assert call.exponent == pytest.approx(exponent, abs=0.1)
    assert call.n_refresh == STEPS - 1


def test_in_between_is_mixed():
    assert Regime()(**walk("between")).regime == "mixed"


def test_cosines_within_the_cycle_do_not_make_a_run_ballistic():
    run = walk("diffusive")
    refresh = np.arange(STEPS) % 8 == 0
    run["cos_grad"] = np.where(refresh, run["cos_grad"], 0.95)
    call = Regime()(**{**run, "at_refresh": refresh})
    assert call.regime == "diffusive"
    assert call.cos_within == pytest.approx(0.95)
    assert call.n_within == STEPS - int(refresh.sum())


def test_too_few_refreshes_or_rows_are_undecidable():
    run = walk("ballistic")
    none = Regime()(**{**run, "at_refresh": np.zeros(STEPS, dtype=bool)})
    assert none.regime == "undecidable"
    assert "0 refreshes" in none.reason
    short = Regime()(**{k: v[:5] for k, v in run.items()})
    assert short.regime == "undecidable"
    assert np.isnan(short.exponent)
    empty = Regime()(**{k: v[:0] for k, v in run.items()})
    assert empty.regime == "undecidable"


def test_non_finite_values_are_counted():
    run = walk("ballistic")
    run["cos_grad"][10] = np.inf
    run["dist"][20:] = np.nan
    call = Regime()(**run)
    assert call.n_non_finite == 1
    assert call.regime == "undecidable"


@pytest.mark.parametrize("fields", [{"cos_diffusive": 0.6}, {"exponent_diffusive": 0.9}, {"skip_fraction": 1.0}])
def test_thresholds_that_overlap_are_refused(fields):
    with pytest.raises(ValueError, match=next(iter(fields))):
        Regime(**fields)
