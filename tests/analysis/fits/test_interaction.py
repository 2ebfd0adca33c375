"""Loss of a level and its dependence on S: known truths recovered, tests at their level, censoring, references."""

import math

import numpy as np
import pytest
import statsmodels.api as sm
from scipy.stats import chi2

from stalefront.analysis.fits.base import decided
from stalefront.analysis.fits.interaction import (
    ADDITIVE,
    GROWS,
    MARGIN_DEX,
    OPEN,
    SHRINKS,
    additive_eta50,
    fit_interaction,
)
from stalefront.analysis.fits.levels import Level, design, fit_model, group_levels, ratio_dex, scores
from stalefront.analysis.fits.logit import maximise
from stalefront.analysis.fits.seeds import draws_of

LEVELS = (Level("none", 0.0), Level("1e-3", 1e-3), Level("0.01", 1e-2), Level("0.1", 1e-1))
RATES = tuple(float(v) for v in 3.5e-4 * 1.68 ** np.arange(5))
STALE = (1, 4, 16)


@pytest.fixture
def runs(outcome_frame):
    """Logistic outcomes around η50 = 1.5e-3·S^−.25·10^−loss(S); the loss changes by ``change`` dex from S = 1 to 16.

    A sharpness of None is a step.
    """

    def make(loss=0.0, change=0.0, *, seeds=3, S=STALE, rates=RATES, sharpness=4.0, stream=0):
        rng = np.random.default_rng(stream)
        rows = []
        for s in S:
            log_s = math.log(s)
            dex = loss + change * (log_s / math.log(16) - 0.5)
            for eta in rates:
                at = math.log(eta / 1.5e-3) + 0.25 * log_s + dex * math.log(10)
                p = float(at > 0) if sharpness is None else 1 / (1 + math.exp(-sharpness * at))
                rows += [(s, eta, seed, bool(rng.random() < p)) for seed in range(seeds)]
        return outcome_frame(rows)

    return make


def fitted(frames, levels=LEVELS, seeds=None):
    draws = draws_of(range(seeds)) if seeds else None
    pairs = list(zip(levels, frames, strict=False))
    return fit_interaction(pairs, axis="target_kl", definition="d", arm="a", draws=draws)


def grid(runs, losses, change=0.0, stream=0, **kwargs):
    """Frames of the levels: ``change`` is that of the last level, in proportion to the score of the others."""
    last = len(losses) - 1
    return [runs(v, change * i / last, stream=100 * stream + i, **kwargs) for i, v in enumerate(losses)]


@pytest.mark.parametrize("seeds", [3, 8])
def test_known_losses_are_covered(runs, seeds):
    losses = (0.0, 0.05, 0.2, 0.4)
    frames = grid(runs, losses, seeds=seeds, stream=1)
    fit = fitted(frames, seeds=seeds)
    found = [fit.constants[f"loss_dex[{v.label}]"] for v in LEVELS[1:]]
    assert all(c.interval.contains(v) for c, v in zip(found, losses[1:], strict=True))
    assert found[2].value == pytest.approx(0.4, abs=0.12)
    assert found[0].interval.kind == "outer of profile and bootstrap"
    assert fit.n == 4 * 15 * seeds
    assert fit.n_events == sum(int(f["collapsed"].sum()) for f in frames)


def test_two_seeds_have_a_profile_interval_alone(runs):
    fit = fitted(grid(runs, (0.0, 0.3), seeds=2, stream=1), LEVELS[:2], seeds=2)
    assert fit.constants["loss_dex[1e-3]"].interval.kind == "profile"
    assert fit.settings["bootstrap"] is None


def test_the_intervals_of_a_loss_cover_as_often_as_they_say(runs):
    hits = []
    for stream in range(150):
        c = group_levels([decided(f) for f in grid(runs, (0.0, 0.3), seeds=2, stream=stream + 1)])
        hits.append(ratio_dex(fit_model(c, design(c, 2), None), 2, 0.95, 1.0, "").interval.contains(0.3))
    # Three standard errors of a share of .95 in 150 are .053.
    assert 0.897 <= np.mean(hits) < 1.0


def p_values(runs, n, **kwargs):
    out = {"all": [], "trend": []}
    for stream in range(n):
        known = [decided(f) for f in grid(runs, (0.0, 0.1, 0.2, 0.3), stream=stream + 1, **kwargs)]
        c = group_levels(known)
        z = np.array(scores(LEVELS))[:, None]
        for name, slopes in (("all", np.eye(4)[:, 1:]), ("trend", z)):
            X = design(c, 4, slopes)
            full, held = (maximise(X, c.m, c.k, b) for b in (np.eye(X.shape[1]), np.eye(X.shape[1])[:, :6]))
            ratio = 2 * (full.ll - held.ll)
            out[name].append(chi2.sf(ratio, X.shape[1] - 6))
    return {name: np.array(v) for name, v in out.items()}


def test_false_alarms_are_near_five_in_a_hundred(runs):
    """300 additive grids: the trend is near its level; all levels at once reject too seldom, never too often."""
    p = p_values(runs, 300, seeds=3)
    # Three standard errors of a share of .05 in 300 are .038.
    assert 0.012 <= (p["trend"] < 0.05).mean() <= 0.088
    assert (p["all"] < 0.05).mean() <= 0.088


def test_the_fit_has_the_tests_of_the_simulation(runs):
    fit = fitted(grid(runs, (0.0, 0.1, 0.2, 0.3), seeds=3, stream=1))
    p = p_values(runs, 1, seeds=3)
    assert fit.tests["p_all"] == pytest.approx(p["all"][0])
    assert fit.tests["p_trend"] == pytest.approx(p["trend"][0])
    assert (fit.tests["df_all"], fit.tests["df_trend"]) == (3, 1)


@pytest.mark.parametrize(("change", "verdict"), [(0.7, GROWS), (-0.7, SHRINKS)])
def test_an_interaction_is_found_with_its_sign(runs, change, verdict):
    fit = fitted(grid(runs, (0.0, 0.1, 0.2, 0.3), change, seeds=8, stream=2), seeds=8)
    assert fit.rows[-1]["verdict"] == verdict
    assert fit.rows[-1]["decided_by"] == "trend"
    assert fit.tests["p_trend"] < 0.01
    assert fit.constants["change_dex[0.1]"].interval.contains(change)
    assert fit.constants["trend_dex"].interval.contains(change / 3)


def test_additive_is_said_only_where_changes_are_small_for_sure(runs):
    few = fitted(grid(runs, (0.0, 0.1, 0.2, 0.3), seeds=2, stream=5))
    many = fitted(grid(runs, (0.0, 0.1, 0.2, 0.3), seeds=30, stream=5))
    assert min(few.tests["p_all"], few.tests["p_trend"]) > 0.05
    assert few.rows[-1]["verdict"] == OPEN
    assert many.rows[-1]["verdict"] == ADDITIVE
    changes = [c for k, c in many.constants.items() if k.startswith("change")]
    assert all(c.interval.lo >= -MARGIN_DEX and c.interval.hi <= MARGIN_DEX for c in changes)


def test_names_without_sizes_are_tested_all_at_once(runs):
    names = [Level("none"), Level("r2"), Level("r3")]
    fit = fitted(grid(runs, (0.0, 0.1, 0.2), 0.9, seeds=10, stream=3), names)
    assert "p_trend" not in fit.tests
    assert "trend_dex" not in fit.constants
    assert fit.rows[-1] == {**fit.rows[-1], "decided_by": "all", "verdict": GROWS}
    assert fit.settings["scores"] is None


@pytest.mark.parametrize(
    ("sizes", "z"),
    [
        ((0.0, 1e-3, 1e-2, 1e-1), [0, 1, 2, 3]),
        ((0.0, 2e-2, 2e-1), [0, 1, 2]),
        ((0.0, 1e-3), None),
        ((1e-3, 1e-2, 1e-1), None),
        ((None, None), None),
        ((0.0, None, 1e-2, 1e-1), None),
        ((0.0, 0.0, 1e-2, 1e-1), None),
    ],
)
def test_scores(sizes, z):
    found = scores([Level(str(i), s) for i, s in enumerate(sizes)])
    assert (found is None) if z is None else found == pytest.approx(z)


def test_sharp_frontiers_a_step_apart_by_hand(runs):
    """At every S the level collapses one rate earlier; by symmetry its loss is one step of the grid, log₁₀ 2."""
    rates = tuple(1e-3 * 2.0 ** np.arange(-4, 5))
    frames = []
    for at in (1.4e-3, 0.7e-3):
        flat = runs(math.log10(1.5e-3 / at), 0.0, S=(4,), rates=rates, sharpness=None)
        frames.append(flat)
    # One S: the frontier of the fixture lies at 1.5e-3·4^−.25·10^−loss; both land midway between rates.
    fit = fitted(frames, LEVELS[:2])
    assert fit.constants["loss_dex[1e-3]"].value == pytest.approx(math.log10(2), rel=0.05)
    assert fit.rows[-1]["verdict"] == OPEN
    assert "two values of S" in " ".join(fit.notes)


def test_a_level_costs_nothing_against_itself_and_swapping_turns_the_sign(runs):
    a, b = runs(0.0, stream=5), runs(0.3, stream=6)
    same = fitted([a, a], LEVELS[:2], seeds=3)
    assert same.constants["loss_dex[1e-3]"].value == pytest.approx(0, abs=1e-6)
    assert same.tests["lr_all"] == pytest.approx(0, abs=1e-6)
    there, back = (fitted(f, LEVELS[:2], seeds=3).constants["loss_dex[1e-3]"] for f in ([a, b], [b, a]))
    assert there.value == pytest.approx(-back.value, abs=1e-5)
    assert there.interval.lo == pytest.approx(-back.interval.hi, abs=1e-3)


def test_the_unit_of_the_learning_rate_and_the_order_of_levels_do_not_matter(runs):
    frames = grid(runs, (0.0, 0.1, 0.3), stream=7)
    scaled = [f.assign(lr=[v * 1e-3 for v in f["lr"]]) for f in frames]
    first = fitted(frames, LEVELS[:3])
    other = fitted(scaled, LEVELS[:3])
    swapped = fitted([frames[0], frames[2], frames[1]], [LEVELS[0], LEVELS[2], LEVELS[1]])
    for name, constant in first.constants.items():
        assert other.constants[name].value == pytest.approx(constant.value, abs=1e-6)
        if name != "trend_dex":
            assert swapped.constants[name].value == pytest.approx(constant.value, abs=1e-5)
    assert swapped.tests["p_all"] == pytest.approx(first.tests["p_all"], abs=1e-5)


def test_with_many_runs_the_numbers_are_those_of_plain_logistic_regression(runs):
    """Firth's penalty vanishes beside 200 runs a cell; statsmodels has no penalty, and its own likelihoods."""
    frames = grid(runs, (0.0, 0.1, 0.3), 0.4, seeds=200, stream=9)
    fit = fitted(frames, LEVELS[:3])
    c = group_levels([decided(f) for f in frames])
    X = design(c, 3, np.eye(3)[:, 1:])
    full, held = (sm.GLM(np.column_stack([c.k, c.m - c.k]), x, sm.families.Binomial()).fit() for x in (X, X[:, :5]))
    loss = held.params[2:4] / held.params[1] / math.log(10)
    change = full.params[5:] / full.params[1] / math.log(10) * math.log(16)
    for i, v in enumerate(LEVELS[1:3]):
        assert fit.constants[f"loss_dex[{v.label}]"].value == pytest.approx(loss[i], abs=2e-3)
        assert fit.constants[f"change_dex[{v.label}]"].value == pytest.approx(change[i], abs=5e-3)
    assert fit.tests["lr_all"] == pytest.approx(2 * (full.llf - held.llf), rel=0.02)


def test_the_contour_of_the_additive_model_is_shifted_by_the_loss(runs):
    fit = fitted(grid(runs, (0.0, 0.2, 0.3), stream=11), LEVELS[:3])
    S = np.array([1.0, 7.0, 16.0])
    ratio = additive_eta50(fit, "none", S) / additive_eta50(fit, "0.01", S)
    assert np.log10(ratio) == pytest.approx(np.full(3, fit.constants["loss_dex[0.01]"].value))


def test_the_loss_at_each_S_is_that_of_levels_fitted_alone(runs):
    fit = fitted(grid(runs, (0.0, 0.3), stream=12), LEVELS[:2])
    rows = {(r["level"], r["S"]): r for r in fit.rows if r["level"]}
    for s in STALE:
        alone = [math.log10(rows[(v, s)]["eta50"]["lo"]) for v in ("none", "1e-3")]
        assert rows[("1e-3", s)]["loss"]["lo"] == pytest.approx(alone[0] - alone[1])
        assert rows[("none", s)]["loss"] is None


FAR, NEAR = -3.0, 3.0


@pytest.mark.parametrize(
    ("losses", "lo_open", "hi_open"),
    [((0.0, FAR), True, False), ((0.0, NEAR), False, True), ((FAR, 0.0), False, True), ((NEAR, 0.0), True, False)],
)
def test_a_level_whose_runs_end_alike_has_a_bound(runs, losses, lo_open, hi_open):
    fit = fitted(grid(runs, losses, stream=13), LEVELS[:2], seeds=3)
    found = fit.constants["loss_dex[1e-3]"]
    assert found.value is None
    assert (found.interval.lo is None, found.interval.hi is None) == (lo_open, hi_open)
    assert fit.rows[-1]["verdict"] == OPEN
    assert "ended alike" in " ".join(fit.notes)
    assert fit.tests == {}


def test_a_level_that_ends_alike_leaves_the_others_their_test(runs):
    frames = grid(runs, (0.0, 0.2, 0.3), seeds=5, stream=14)
    fit = fitted([*frames, runs(NEAR, seeds=5)], LEVELS)
    assert "change_dex[0.1]" not in fit.constants
    assert fit.tests["df_all"] == 2
    assert fit.constants["loss_dex[0.1]"].interval.hi is None
    alone = fitted(frames, LEVELS[:3])
    assert fit.tests["p_all"] == pytest.approx(alone.tests["p_all"])


def test_no_collapse_anywhere(runs):
    fit = fitted(grid(runs, (FAR, FAR), stream=15), LEVELS[:2])
    assert (fit.constants, fit.tests) == ({}, {})
    assert fit.rows[-1]["verdict"] == OPEN
    assert fit.notes == ["no cell of 90 collapsed: the frontier is outside the grid at every level"]
    assert fit.n_right == 6


def test_separated_outcomes_are_finite_and_noted(runs):
    fit = fitted([runs(v, sharpness=None) for v in (0.0, 0.2, 0.4)], LEVELS[:3])
    assert "separates the outcomes" in " ".join(fit.notes)
    assert all(math.isfinite(c.value) for c in fit.constants.values())
    assert fit.constants["loss_dex[0.01]"].interval.contains(0.4)


def test_undecided_cells_are_counted_and_do_not_decide(runs):
    frames = grid(runs, (0.0, 0.3), stream=16)
    marked = [f.assign(collapsed=[None if i < 4 else v for i, v in enumerate(f["collapsed"])]) for f in frames]
    fit = fitted(marked, LEVELS[:2])
    dropped = fitted([f.iloc[4:] for f in frames], LEVELS[:2])
    assert (fit.n_undecided, fit.n) == (8, 82)
    assert fit.constants == dropped.constants


def test_a_level_without_decided_cells_is_named(runs):
    frame = runs(0.0)
    fit = fitted([frame, frame.assign(collapsed=None)], LEVELS[:2])
    assert fit.notes == ["no decided cell at 1e-3"]
    assert fit.constants == {}


def test_collapse_that_falls_with_the_rate_gives_no_loss(outcome_frame):
    odd = outcome_frame((s, e, i, e < 1e-3) for s in STALE for e in RATES for i in range(3))
    fit = fitted([odd, odd], LEVELS[:2])
    assert fit.constants == {}
    assert "does not become likelier" in fit.notes[-1]


def test_a_resample_of_seeds_is_the_fit_of_those_seeds(runs):
    known = [decided(f) for f in grid(runs, (0.0, 0.3), stream=17)]
    draws = draws_of(range(3))
    c = group_levels(known)
    model = fit_model(c, design(c, 2), draws)
    picks = np.flatnonzero((draws.counts == [2, 1, 0]).all(axis=1))[0]
    once = c.m_seed[[0, 0, 1]].sum(axis=0), c.k_seed[[0, 0, 1]].sum(axis=0)
    alone = maximise(model.X, *once, np.eye(4))
    assert model.beta_draws[picks] == pytest.approx(alone.beta, abs=1e-4)


def test_seeds_that_agree_beside_a_separating_plane_keep_their_bootstrap(outcome_frame):
    """Scoring creeps there: the intervals of the change must not open for that."""
    edges = {
        0.0: (9e-3, 2.1e-3, 5.1e-4),
        1e-3: (9e-3, 2.1e-3, 5.1e-4),
        1e-2: (3e-3, 1.1e-3, 5e-4),
        0.1: (2e-3, 9e-4, 2e-4),
    }
    rates = [float(v) for v in 8.8e-5 * 2.0 ** np.arange(8)]
    frames = [
        outcome_frame(
            (s, e, i, e > edge * (1.5 if i == 2 else 1))
            for s, edge in zip(STALE, v, strict=True)
            for e in rates
            for i in range(3)
        )
        for v in edges.values()
    ]
    fit = fitted(frames, seeds=3)
    changes = [c for k, c in fit.constants.items() if k.startswith("change")]
    assert len(changes) == 3
    assert all(c.interval.lo is not None and c.interval.hi is not None for c in changes)


def test_the_hash_knows_levels_and_rows(runs):
    a, b = runs(0.0, stream=18), runs(0.3, stream=19)
    hashes = {fitted(f, v).input_hash for f, v in (([a, b], LEVELS[:2]), ([b, a], LEVELS[:2]), ([a, b], LEVELS[1:3]))}
    assert len(hashes) == 3
