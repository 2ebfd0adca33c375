"""Firth's penalised logit: golden values, a case by hand, statsmodels at large n, recovered laws."""

import csv
import json
import math
from pathlib import Path

import numpy as np
import pytest
import statsmodels.api as sm
from scipy import optimize

from stalefront.analysis.fits.base import decided
from stalefront.analysis.fits.firth import contour, fit_firth, group, separated
from stalefront.analysis.fits.logit import maximise, penalised

TOY = Path(__file__).parents[2] / "golden" / "toyB_grid.csv"


def test_table_2(paper, golden):
    definition, frame = paper
    want = golden[definition]["firth"]
    fit = fit_firth(frame, definition=definition, arm="all", centre=(16, 2e-7))
    row = fit.rows[0]
    beta = [row["beta_const"], row["beta_log_S"], row["beta_log_lr"]]
    assert beta == pytest.approx(want["beta_const_lnS_lneta"], abs=5e-4)
    assert fit.constants["slope"].value == pytest.approx(want["slope"], abs=5e-4)
    assert fit.constants["S_eta50"].value == pytest.approx(want["S_eta50"], rel=2e-3)
    for s, value in want["eta50"].items():
        assert fit.constants[f"eta50[S={s}]"].value == pytest.approx(value, rel=5e-3)
        assert contour(fit, np.array([float(s)])) == pytest.approx([value], rel=5e-3)
    assert fit.tests["lr_one_over_S"] == pytest.approx(want["LR_one_over_S"], abs=1e-3)
    assert fit.tests["lr_flat"] == pytest.approx(want["LR_flat"], abs=1e-3)
    for key in ("pll_full", "pll_one_over_S", "pll_flat"):
        if key in want:
            assert fit.tests[key] == pytest.approx(want[key], abs=1e-4)
    assert (fit.n, fit.n_events, fit.n_right) == (12, golden_events(golden, definition), 12 - fit.n_events)
    assert any("separates" in n for n in fit.notes) == (definition == "first_zero")


def golden_events(golden, definition):
    collapsed = golden["first_zero"]["n_collapse"]
    return collapsed if definition == "first_zero" else collapsed - len(golden["design"]["recovering"])


def test_table_2_profile_interval_of_the_slope(paper):
    """Ends checked by maximising the penalised likelihood with a general optimiser at the slope of the end."""
    definition, frame = paper
    fit = fit_firth(frame, definition=definition, arm="all")
    ends = fit.constants["slope"].interval
    g = group(decided(frame))
    X = np.column_stack([np.ones_like(g.x), g.x, g.y])
    for end in (ends.lo, ends.hi):

        def loss(gamma, a=end):
            return -penalised(X, g.m, g.k, np.array([gamma[0], -a * gamma[1], gamma[1]]))[0]

        options = {"maxiter": 4000, "xatol": 1e-9, "fatol": 1e-11}
        best = min(optimize.minimize(loss, x, method="Nelder-Mead", options=options).fun for x in ([0, 0.1], [0.5, 1]))
        assert 2 * (fit.tests["pll_full"] + best) == pytest.approx(3.8415, abs=2e-3)
    # Neither definition rejects 1/S or flat at these n; both ends are far apart.
    assert ends.lo < -6
    assert ends.hi == pytest.approx({"first_zero": 0.14, "remains_zero": 0.40}[definition], abs=0.01)


def test_a_two_by_two_table_by_hand():
    """Two groups, saturated: Firth adds ½ to each of the four counts, so β = (log(.5/3.5), log(4.5/.5) − …)."""
    X = np.array([[1.0, 0.0], [1.0, 1.0]])
    m, k = np.array([3.0, 4.0]), np.array([0.0, 4.0])
    found = maximise(X, m, k, np.eye(2))
    first, second = math.log(0.5 / 3.5), math.log(4.5 / 0.5)
    assert found.converged
    assert found.beta == pytest.approx([first, second - first], abs=1e-7)


def test_score_is_the_gradient_of_the_penalised_likelihood():
    rng = np.random.default_rng(0)
    X = np.column_stack([np.ones(7), rng.standard_normal((7, 2))])
    m = rng.integers(1, 5, 7).astype(float)
    k = np.minimum(m, rng.integers(0, 5, 7))
    beta = rng.standard_normal(3)
    numeric = optimize.approx_fprime(beta, lambda b: penalised(X, m, k, b)[0], 1e-7)
    assert penalised(X, m, k, beta)[1] == pytest.approx(numeric, abs=1e-5)


def simulated(outcome_frame, *, slope, constant, n_seeds, sharpness=4.0):
    """Logistic outcomes around log η50 = log constant + slope·log S."""
    rng = np.random.default_rng(5)
    rows = []
    for s in (1, 2, 4, 8, 16, 32):
        for eta in constant * 2.0 ** np.arange(-8, 4, 0.5):
            p = 1 / (1 + math.exp(-sharpness * (math.log(eta / constant) - slope * math.log(s))))
            rows += [(s, float(eta), seed, bool(rng.random() < p)) for seed in range(n_seeds)]
    return outcome_frame(rows)


@pytest.mark.parametrize("slope", [0.0, -0.4, -1.0])
def test_known_slopes_are_recovered(outcome_frame, slope):
    fit = fit_firth(simulated(outcome_frame, slope=slope, constant=0.1, n_seeds=3), definition="d", arm="all")
    found = fit.constants["slope"]
    assert found.interval.contains(slope)
    assert found.interval.hi - found.interval.lo < 0.4
    assert fit.constants["eta50[S=8]"].interval.contains(0.1 * 8**slope)
    if slope == -1.0:
        assert fit.constants["S_eta50"].interval.contains(0.1)
    assert (fit.tests["p_flat"] > 0.01) == (slope == 0.0)
    assert (fit.tests["p_one_over_S"] > 0.01) == (slope == -1.0)


def test_thousands_of_rows_agree_with_plain_maximum_likelihood(outcome_frame):
    frame = simulated(outcome_frame, slope=-0.7, constant=0.1, n_seeds=40, sharpness=2.0)
    fit = fit_firth(frame, definition="d", arm="all")
    known = decided(frame)
    row = fit.rows[0]
    X = sm.add_constant(np.column_stack([np.log(known["S"] / row["S0"]), np.log(known["lr"] / row["lr0"])]))
    plain = sm.Logit(known["collapsed"].to_numpy(dtype=float), X).fit(disp=0)
    beta = [row["beta_const"], row["beta_log_S"], row["beta_log_lr"]]
    assert len(known) > 5000
    assert beta == pytest.approx(list(plain.params), rel=5e-3)


@pytest.mark.parametrize(("mode", "slope", "constant"), [("reuse", -1.17, 54), ("lag", -1.22, 80)])
def test_toy_grid(outcome_frame, mode, slope, constant):
    with TOY.open(newline="") as handle:
        rows = [r for r in csv.DictReader(handle) if r["mode"] == mode]
    frame = outcome_frame((int(r["S"]), float(r["eta"]), int(r["seed"]), r["remains_zero"] == "1") for r in rows)
    fit = fit_firth(frame, definition="remains_zero", arm=mode)
    assert fit.constants["slope"].value == pytest.approx(slope, abs=0.01)
    assert fit.constants["slope"].interval.contains(slope)
    assert fit.constants["S_eta50"].value == pytest.approx(constant, rel=0.02)
    assert not fit.constants["slope"].interval.contains(-1.0)
    assert fit.tests["p_one_over_S"] < 1e-3


def test_centre_moves_the_constant_only(paper):
    _, frame = paper
    here, there = (fit_firth(frame, definition="d", arm="all", centre=c) for c in (None, (1.0, 1e-3)))
    assert here.constants["slope"].value == pytest.approx(there.constants["slope"].value, rel=1e-6)
    assert here.constants["S_eta50"].value == pytest.approx(there.constants["S_eta50"].value, rel=1e-6)
    assert here.tests == pytest.approx(there.tests, rel=1e-6)


def test_an_unbounded_end_is_no_number(outcome_frame):
    rows = [(1, 1e-3, 0, False), (1, 2e-3, 0, True), (2, 1e-3, 0, False), (2, 2e-3, 0, True)]
    fit = fit_firth(outcome_frame(rows), definition="d", arm="all")
    interval = fit.constants["slope"].interval
    assert interval.lo is None
    assert interval.hi is None
    assert "Infinity" not in json.dumps(fit.to_json())


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ([], "no decided cell"),
        ([(1, 1e-3, 0, None)], "no decided cell"),
        ([(s, e, 0, False) for s in (1, 4) for e in (1e-3, 2e-3)], "no cell of 4 collapsed"),
        ([(s, e, 0, True) for s in (1, 4) for e in (1e-3, 2e-3)], "every cell of 4 collapsed"),
        ([(4, e, 0, e > 1e-3) for e in (1e-3, 2e-3)], "two values of S"),
        ([(s, 1e-3, 0, s > 1) for s in (1, 4)], "two learning rates"),
        ([(1, 1e-3, 0, False), (2, 2e-3, 0, True), (4, 4e-3, 0, True)], "collinear"),
    ],
)
def test_what_cannot_be_fitted_says_why(outcome_frame, rows, why):
    fit = fit_firth(outcome_frame(rows), definition="d", arm="all")
    assert fit.constants == {}
    assert why in fit.notes[0]


def test_collapse_that_falls_with_the_rate_gets_no_contour(outcome_frame):
    rows = [(s, e, i, e < 2e-3) for s in (1, 4) for e in (1e-3, 2e-3, 4e-3) for i in range(3)]
    fit = fit_firth(outcome_frame(rows), definition="d", arm="all")
    assert fit.constants == {}
    assert "likelier" in fit.notes[-1]
    assert contour(fit, np.array([1.0])) is None


def test_separation_is_seen(outcome_frame):
    tidy = [(s, e, 0, s * e > 3e-3) for s in (1, 4) for e in (1e-3, 2e-3, 4e-3)]
    assert separated(group(decided(outcome_frame(tidy))))
    assert not separated(group(decided(outcome_frame([*tidy, (1, 1e-3, 1, True), (4, 4e-3, 1, False)]))))
