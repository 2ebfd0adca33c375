"""eta_max and s_eta: golden values of Table 2, censoring, inversions, simulated laws."""

import math

import numpy as np
import pytest
from scipy import optimize, stats

from stalefront.analysis.fits.eta_max import brackets, fit_eta_max
from stalefront.analysis.fits.s_eta import Units, common_constant, fit_s_eta, interval_normal_ll, slope_set


def interval(constant):
    """(lo, hi) of a constant's interval, 0 and inf where unbounded below and above."""
    i = constant.interval
    return None if i is None else ((0.0 if i.lo is None else i.lo), (math.inf if i.hi is None else i.hi))


def golden_brackets(golden, definition):
    """S → {rule: (lo, hi)} from the golden file."""
    out = {}
    for key, ends in golden[definition]["eta_max_interval"].items():
        s, _, rule = key.partition("_")
        for r in [rule] if rule else ["conservative", "optimistic"]:
            out.setdefault(int(s), {})[r] = tuple(ends)
    return out


def test_table_2_brackets(paper, golden):
    definition, frame = paper
    pooled, single = brackets(frame)
    assert len(pooled) == len(single) == 3
    for b in pooled:
        expected = golden_brackets(golden, definition)[int(b.S)]
        assert b.conservative == pytest.approx(expected["conservative"])
        assert b.optimistic == pytest.approx(expected["optimistic"])
    assert sum(b.inversions for b in pooled) == golden[definition].get("inversions", 0)


def test_table_2_products_and_slopes(paper, golden):
    definition, frame = paper
    want = golden[definition]
    fit = fit_s_eta(frame, definition=definition, arm="all")
    rows = {int(r["S"]): r for r in fit.rows}
    for key, ends in want["S_eta_max_interval"].items():
        s, _, rule = key.partition("_")
        rule = rule or "conservative"
        if s == "joint":
            found = interval(fit.constants[f"S_eta_max_{rule}"])
            assert found == (None if ends is None else pytest.approx(tuple(ends)))
        else:
            lo, hi = rows[int(s)][f"{rule}_lo"], rows[int(s)][f"{rule}_hi"]
            assert (lo or 0.0, hi) == pytest.approx(tuple(ends))
    for rule in ("conservative", "optimistic"):
        ends = want.get("slope_set") or want[f"slope_set_{rule}"]
        assert interval(fit.constants[f"slope_{rule}"]) == pytest.approx(tuple(ends), abs=0.005)


def test_table_2_interval_normal_likelihoods(golden, paper):
    definition, frame = paper
    tests = fit_s_eta(frame, definition=definition, arm="all").tests
    if definition == "first_zero":
        assert tests["ll_flat_conservative"] == pytest.approx(-3.419, abs=5e-4)
        assert tests["ll_one_over_S_conservative"] == pytest.approx(0.0, abs=1e-3)
        ratio = 2 * (tests["ll_one_over_S_conservative"] - tests["ll_flat_conservative"])
        assert ratio == pytest.approx(golden[definition]["interval_normal"]["LR"], abs=0.01)
    else:
        want = golden[definition]["interval_normal"]
        assert tests["ll_flat_optimistic"] == pytest.approx(want["flat_ll_optimistic"], abs=5e-4)
        assert tests["ll_flat_conservative"] == pytest.approx(want["flat_ll_conservative"], abs=5e-4)
        assert tests["ll_one_over_S_conservative"] == pytest.approx(want["one_over_S_ll_conservative"], abs=5e-4)


def test_one_seed_with_an_inversion_gets_no_single_eta_max(paper):
    definition, frame = paper
    fit = fit_eta_max(frame, definition=definition, arm="all")
    at_32 = fit.constants["eta_max[S=32]"]
    if definition == "first_zero":
        assert interval(at_32) == (0.0, 1e-7)
        assert fit.n_left == 1
    else:
        assert at_32.interval is None
        assert any("S=32" in n and "more seeds" in n for n in fit.notes)


# outcomes at η = 1, 2, 4, 8 (c = collapsed, s = survived, ? = undecided): conservative, optimistic, inversions
GRIDS = {
    "ssss": ((8, math.inf), (8, math.inf), 0),
    "cccc": ((0, 1), (0, 1), 0),
    "sscc": ((2, 4), (2, 4), 0),
    "scsc": ((1, 2), (4, 8), 1),
    "csss": ((0, 1), (8, math.inf), 3),
    "ccss": ((0, 1), (8, math.inf), 4),
    "s?cc": ((1, 4), (1, 4), 0),
    "s??s": ((8, math.inf), (8, math.inf), 0),
    "??cc": ((0, 4), (0, 4), 0),
}


@pytest.mark.parametrize("outcomes", GRIDS)
def test_brackets_of_a_grid(outcome_frame, outcomes):
    conservative, optimistic, inversions = GRIDS[outcomes]
    known = {"c": True, "s": False, "?": None}
    frame = outcome_frame((4, float(2**i), 0, known[c]) for i, c in enumerate(outcomes))
    [b], _ = brackets(frame)
    assert b.conservative == conservative
    assert b.optimistic == optimistic
    assert b.inversions == inversions


def test_seeds_that_differ_are_no_inversion(outcome_frame):
    rows = [(4, 1.0, 0, False), (4, 2.0, 0, True), (4, 1.0, 1, False), (4, 2.0, 1, False), (4, 4.0, 1, True)]
    [b], single = brackets(outcome_frame(rows))
    assert b.inversions == 0
    assert b.conservative == (1.0, 2.0)
    assert b.optimistic == (2.0, 4.0)
    assert [s.conservative for s in single] == [(1.0, 2.0), (2.0, 4.0)]
    fit = fit_eta_max(outcome_frame(rows), definition="d", arm="all")
    assert interval(fit.constants["eta_max[S=4]"]) == (1.0, 4.0)


def test_nothing_decided_gives_nothing(outcome_frame):
    frame = outcome_frame([(4, 1.0, 0, None), (8, 1.0, 0, None)])
    assert fit_eta_max(frame, definition="d", arm="all").constants == {}
    fit = fit_s_eta(frame, definition="d", arm="all")
    assert fit.constants == {}
    assert fit.n_undecided == 2


def test_delayed_quadratic_with_reuse_has_s_eta_max_two_over_lambda(outcome_frame):
    """x ← x − S·η·λ·x each cycle of a frozen gradient: stable iff S·η < 2/λ, an exact 1/S frontier."""
    curvature = 0.5

    def diverges(s, eta):
        x = 1.0
        for _ in range(200):
            x -= s * eta * curvature * x
        return abs(x) > 1.0

    rows = [(s, 8.0 * 2 ** (-i / 2), 0, diverges(s, 8.0 * 2 ** (-i / 2))) for s in (1, 2, 4, 8, 16) for i in range(16)]
    fit = fit_s_eta(outcome_frame(rows), definition="d", arm="all")
    lo, hi = interval(fit.constants["S_eta_max_conservative"])
    assert lo <= 2 / curvature * (1 + 1e-9)
    assert hi >= 2 / curvature * (1 - 1e-9)
    assert hi / lo < 1.5
    lo, hi = interval(fit.constants["slope_conservative"])
    assert lo <= -1 <= hi


def test_slope_set_ends_are_the_tangent_lines():
    """Two brackets: the steepest lines join the upper end of one with the lower end of the other."""
    units = Units(np.array([1.0, 4.0]), np.array([8.0, 1.0]), np.array([16.0, 2.0]))
    assert slope_set(units) == pytest.approx((-2.0, -1.0))
    open_ends = Units(np.array([1.0, 4.0]), np.array([8.0, 0.0]), np.array([16.0, 2.0]))
    lo, hi = slope_set(open_ends)
    assert lo == -math.inf
    assert hi == pytest.approx(-1.0)
    bent = Units(np.array([1.0, 2.0, 4.0]), np.array([1.0, 8.0, 1.0]), np.array([2.0, 16.0, 2.0]))
    assert slope_set(bent) is None
    nowhere = Units(np.array([1.0, 2.0]), np.zeros(2), np.full(2, math.inf))
    assert slope_set(nowhere) == (-math.inf, math.inf)


def test_products_that_only_touch_have_nothing_in_common():
    assert common_constant(Units(np.array([1.0, 2.0]), np.array([1.0, 1.0]), np.array([2.0, 2.0]))) is None
    assert common_constant(Units(np.array([1.0, 2.0]), np.array([1.0, 0.6]), np.array([2.0, 1.1]))) == (1.2, 2.0)


@pytest.mark.parametrize("slope", [0.0, -1.0, None])
def test_interval_normal_likelihood_against_a_general_optimiser(slope):
    rng = np.random.default_rng(3)
    s = np.repeat([1.0, 4.0, 16.0, 64.0], 6)
    true = np.log(0.1) - 0.6 * np.log(s) + 0.5 * rng.standard_normal(len(s))
    lo = 2.0 ** np.floor(true / math.log(2))
    hi = np.where(np.arange(len(s)) % 7 == 0, math.inf, 2 * lo)

    def loss(theta):
        mu = theta[0] + (theta[2] if slope is None else slope) * np.log(s)
        sigma = 0.02 + math.exp(theta[1])
        return -np.log(stats.norm.cdf((np.log(hi) - mu) / sigma) - stats.norm.cdf((np.log(lo) - mu) / sigma)).sum()

    start = [np.log(0.1), -0.7, *([-0.6] if slope is None else [])]
    best = optimize.minimize(loss, start, method="Nelder-Mead", options={"maxiter": 4000, "fatol": 1e-10}).fun
    assert interval_normal_ll(Units(s, lo, hi), slope) == pytest.approx(-best, abs=1e-4)


def test_many_seeds_tell_a_flat_frontier_from_one_over_s(outcome_frame):
    rng = np.random.default_rng(1)
    rows = []
    for s in (1, 4, 16, 64):
        for seed in range(5):
            limit = 0.02 * math.exp(0.3 * rng.standard_normal())
            rows += [(s, eta, seed, eta > limit) for eta in 0.08 * 2.0 ** -np.arange(6)]
    tests = fit_s_eta(outcome_frame(rows), definition="d", arm="all").tests
    assert tests["p_flat_conservative"] > 0.05
    assert tests["p_one_over_S_conservative"] < 1e-6
