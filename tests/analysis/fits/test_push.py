"""Push of a contour: known pushes recovered, identities, censoring, and the bootstrap against brute force."""

import itertools
import math

import numpy as np
import pytest

from stalefront.analysis.fits.base import decided
from stalefront.analysis.fits.firth import group
from stalefront.analysis.fits.logit import maximise, maximise_many
from stalefront.analysis.fits.push import Span, difference, fit_push, locate
from stalefront.analysis.fits.seeds import draws_of

RATES = tuple(float(v) for v in 2.5e-4 * 2.0 ** np.arange(6))


@pytest.fixture
def runs(outcome_frame):
    """Logistic outcomes around η50 = constant·S^slope; a sharpness of None is a step."""

    def make(constant, *, seeds=3, S=(1, 4, 16), slope=-0.3, sharpness=4.0, rates=RATES, stream=0):
        rng = np.random.default_rng(stream)
        rows = []
        for s in S:
            for eta in rates:
                at = math.log(eta / constant) - slope * math.log(s)
                p = float(at > 0) if sharpness is None else 1 / (1 + math.exp(-sharpness * at))
                rows += [(s, eta, seed, bool(rng.random() < p)) for seed in range(seeds)]
        return outcome_frame(rows)

    return make


def located(frame, draws=None):
    return locate(frame, definition="d", arm="a", draws=draws, level=0.95)


def pushed(arm, reference, seeds):
    draws = draws_of(range(seeds))
    a, r = located(arm, draws), located(reference, draws)
    return fit_push(arm, a, r, draws, definition="d", labels=("arm", "ref"))


@pytest.mark.parametrize("seeds", [1, 2, 3, 6])
def test_a_known_push_is_recovered(runs, seeds):
    fit = pushed(runs(3e-3, seeds=seeds, stream=1), runs(1.5e-3, seeds=seeds, stream=2), seeds)
    found = fit.constants["push"]
    assert found.interval.contains(2.0)
    assert found.value == pytest.approx(2.0, rel=0.5 if seeds < 3 else 0.3)
    assert found.interval.kind == ("profile" if seeds < 3 else "outer of profile and bootstrap")
    assert fit.rows[-1]["over"] == [1, 4, 16]


def test_sharp_frontiers_a_grid_step_apart(runs):
    """Steps between the grid's rates: half the runs collapse midway, so a shift by two rates is a push of four."""
    low = [runs(c, slope=0.0, sharpness=None) for c in (7e-4, 2.8e-3)]
    fit = pushed(low[1], low[0], 3)
    assert fit.constants["push"].value == pytest.approx(4.0, rel=0.1)
    assert fit.constants["push[S=4]"].value == pytest.approx(4.0, rel=0.1)
    # Seeds that all agree give a bootstrap without width; what is shown still knows the grid's step.
    bootstrap, outer = (fit.rows[-1]["push"][k] for k in ("bootstrap", "outer"))
    assert bootstrap[0] == pytest.approx(bootstrap[1], rel=1e-2)
    assert outer[1] / outer[0] > 1.5


def test_the_push_over_S_is_the_geometric_mean_of_those_at_each(runs):
    fit = pushed(runs(2e-3, slope=-0.6, stream=3), runs(1.5e-3, stream=4), 3)
    each = [fit.constants[f"push[S={s}]"].value for s in (1, 4, 16)]
    assert fit.constants["push"].value == pytest.approx(math.exp(np.mean(np.log(each))), rel=1e-6)


def test_an_arm_does_not_push_itself_and_swapping_inverts(runs):
    a, b = runs(2e-3, stream=5), runs(1.2e-3, stream=6)
    same = pushed(a, a, 3)
    assert same.constants["push"].value == pytest.approx(1.0)
    assert same.rows[-1]["push"]["bootstrap"] == pytest.approx([1.0, 1.0])
    there, back = pushed(a, b, 3).constants["push"], pushed(b, a, 3).constants["push"]
    assert there.value * back.value == pytest.approx(1.0)
    assert there.interval.lo * back.interval.hi == pytest.approx(1.0, rel=1e-3)


def test_profile_intervals_combine_by_hand():
    """Half-widths .3 and .4 towards one side give .5 (3-4-5)."""

    class At:
        level = 0.95

        def __init__(self, span):
            self.span = span

        def mean(self, S):
            return self.span

        def mean_draws(self, S):
            return None

    arm, ref = At(Span(-2.0, -2.0, (-2.3, -1.6))), At(Span(-3.0, -3.0, (-3.3, -2.6)))
    found = difference(arm, ref, (1.0,), None)
    assert (found.lo, found.hi) == pytest.approx((1.0, 1.0))
    assert found.profile == pytest.approx((1 - 0.5, 1 + 0.5))


def test_the_bootstrap_is_that_of_every_ordered_draw(runs):
    arm, ref = runs(2e-3, stream=7), runs(1.5e-3, stream=8)
    fit = pushed(arm, ref, 3)
    values = []
    for picks in itertools.product(range(3), repeat=3):
        values.append(brute(arm, picks, 4.0) - brute(ref, picks, 4.0))
    ends = np.quantile(values, [0.025, 0.975], method="inverted_cdf")
    row = next(r for r in fit.rows if r["S"] == 4)
    assert np.log10(row["push"]["bootstrap"]) == pytest.approx(ends, abs=1e-4)


def brute(frame, picks, s):
    """log10 η50 at S of the frame made of the picked seeds, by the single-set maximiser."""
    known = decided(frame)
    whole = group(known)
    X = np.column_stack([np.ones_like(whole.x), whole.x, whole.y])
    m, k = np.zeros(len(X)), np.zeros(len(X))
    for seed in picks:
        g = group(known[known["seed"] == seed], (whole.S0, whole.lr0))
        m, k = m + g.m, k + g.k
    beta = maximise(X, m, k, np.eye(3)).beta
    return math.log10(whole.lr0) - (beta[0] + beta[1] * math.log(s / whole.S0)) / beta[2] / math.log(10)


def test_many_sets_at_once_are_maximised_as_one_by_one():
    rng = np.random.default_rng(0)
    X = np.column_stack([np.ones(8), rng.standard_normal((8, 2))])
    m = rng.integers(1, 5, (6, 8)).astype(float)
    k = np.minimum(m, rng.integers(0, 5, (6, 8)))
    k[0], k[1] = 0, m[1]
    beta, converged = maximise_many(X, m, k)
    assert converged.all()
    for i in range(6):
        assert beta[i] == pytest.approx(maximise(X, m[i], k[i], np.eye(3)).beta, abs=1e-4)
    singular = np.zeros((1, 8))
    singular[0, :2] = 1
    assert not maximise_many(X, singular, singular * 0)[1][0]


@pytest.mark.parametrize(("n", "distinct"), [(3, 10), (4, 35), (5, 126), (6, 1000)])
def test_draws(n, distinct):
    draws = draws_of(range(n))
    assert len(draws.counts) == distinct
    assert (draws.counts.sum(axis=1) == n).all()
    assert draws.weight.sum() == pytest.approx(1.0)
    if n == 3:
        all_distinct = (draws.counts == 1).all(axis=1)
        assert draws.weight[all_distinct] == pytest.approx([6 / 27])


def test_fewer_than_three_seeds_are_not_resampled():
    assert draws_of(range(2)) is None


ALL, NONE = 1e-5, 1.0


@pytest.mark.parametrize(
    ("arm", "reference", "censoring", "sign"),
    [
        (NONE, 1.5e-3, "right", 1),
        (ALL, 1.5e-3, "left", -1),
        (1.5e-3, NONE, "left", -1),
        (1.5e-3, ALL, "right", 1),
        (NONE, NONE, "both", 0),
        (ALL, ALL, "both", 0),
        (NONE, ALL, "right", 1),
    ],
)
def test_censored_pushes(runs, arm, reference, censoring, sign):
    fit = pushed(runs(arm, stream=1), runs(reference, stream=2), 3)
    push = fit.rows[-1]["push"]
    constant = fit.constants["push"]
    assert push["censoring"] == censoring
    assert constant.value is None
    if sign == 0:
        assert fit.rows[-1]["over"] == []
        return
    bound, end = (push["lo"], constant.interval.lo) if sign > 0 else (push["hi"], constant.interval.hi)
    assert (constant.interval.hi if sign > 0 else constant.interval.lo) is None
    assert math.log(bound) * sign > 0
    assert math.log(end) * sign <= math.log(bound) * sign + 1e-9
    if {arm, reference} == {NONE, ALL}:
        assert bound == pytest.approx(RATES[-1] / RATES[0])


def test_a_bound_is_the_edge_of_the_grid_over_the_reference(runs):
    reference = runs(1.5e-3, stream=2)
    fit = pushed(runs(NONE), reference, 3)
    eta50 = 10 ** located(reference).spans[1].lo
    row = next(r for r in fit.rows if r["S"] == 4)
    assert row["push"]["lo"] == pytest.approx(RATES[-1] / eta50)
    assert fit.constants["S_eta50[S=4]"].interval.lo == pytest.approx(4 * RATES[-1])
    assert fit.n_right == 3


def test_an_estimate_beyond_the_grid_is_a_bound(runs):
    """One of many runs collapses at the largest rate: the fit's η50 is extrapolated and not believed."""
    frame = runs(NONE, S=(4,))
    frame.loc[len(frame) - 1, "collapsed"] = True
    span = located(frame).spans[0]
    assert span.censoring == "right"
    assert 10**span.lo == pytest.approx(RATES[-1])


def test_S_that_only_one_side_bounds_make_a_bound_of_the_whole(runs):
    """The arm leaves the grid at S = 1 alone; dropping that S would drop the largest push."""
    arm, ref = runs(2e-2, slope=-1.0, sharpness=None), runs(4e-3, slope=-1.0, sharpness=None)
    fit = pushed(arm, ref, 3)
    by_s = {r["S"]: r["push"]["censoring"] for r in fit.rows if r["S"]}
    assert by_s == {1: "right", 4: "none", 16: "none"}
    assert fit.rows[-1]["push"]["censoring"] == "right"
    assert fit.rows[-1]["over"] == [1, 4, 16]


def test_a_single_S_is_fitted_by_itself(runs):
    fit = pushed(runs(3e-3, S=(4,), slope=0, seeds=8), runs(1.5e-3, S=(4,), slope=0, seeds=8, stream=9), 8)
    assert fit.constants["push"].value == pytest.approx(2.0, rel=0.3)
    assert fit.constants["push"].interval.contains(2.0)
    # A perfect step between two rates: by symmetry half the runs collapse at their geometric middle.
    span = located(runs(1.4e-3, S=(4,), slope=0, sharpness=None, rates=(1e-3, 2e-3))).spans[0]
    assert 10**span.lo == pytest.approx(math.sqrt(2) * 1e-3, rel=1e-4)


def test_collapse_that_falls_with_the_rate_is_not_comparable(outcome_frame, runs):
    odd = outcome_frame((s, e, i, e < 1e-3) for s in (1, 4, 16) for e in RATES for i in range(3))
    fit = pushed(odd, runs(1.5e-3), 3)
    assert fit.rows[-1]["push"]["censoring"] == "both"
    assert fit.constants["push"].value is None
