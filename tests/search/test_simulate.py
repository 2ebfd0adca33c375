"""The search on made-up runs: error against a grid of equal budget, coverage, and the edge of the window."""

import math

import numpy as np
import pytest

from stalefront.search import simulate
from stalefront.search.bisection import Answer, estimate, posterior

BASE = {"right": 0.85, "per_decade": 8, "replicates": 100, "seed": 0}


def test_smaller_errors_than_a_grid_of_the_same_budget():
    """The margin is far outside the noise of 500 arms; the width is that of the noisier column of the first trial."""
    found = simulate.scores(simulate.logistic(0.15), runs=8, **BASE)
    for reading in ("grid", "grid, middle"):
        assert found["search"].rms < 0.85 * found[reading].rms
        assert found["search"].p90 < 0.85 * found[reading].p90


def test_a_sharp_boundary_is_found_to_the_distance_between_candidates():
    found = simulate.scores(simulate.logistic(0.0), runs=8, **{**BASE, "replicates": 40})
    assert found["search"].rms == pytest.approx(0.125 / math.sqrt(12), rel=0.15)
    assert found["search"].rms < found["grid"].rms / 3


def test_intervals_cover_when_runs_are_as_assumed_and_too_rarely_when_the_boundary_is_soft():
    few = {**BASE, "replicates": 40}
    assumed = simulate.scores(simulate.flipped(0.85), runs=8, **few)
    # 200 arms: two standard errors of a share of .9 are .04.
    assert assumed["search"].coverage >= 0.86
    soft = simulate.scores(simulate.logistic(0.3), runs=8, **few)
    assert soft["search"].coverage < 0.86


def test_a_boundary_outside_the_window_is_reported_as_a_bound():
    rule = simulate.make_rule(8, 0.85, 8)
    for b, bound in ((-7.0, "≤"), (-1.0, "≥")):
        answers = simulate.search(rule, lambda x, b=b: x > b)
        assert len(answers) == 8
        assert estimate(rule.x_K, posterior(rule.x_K, answers, 0.85), 0.9).bound == bound


def test_the_middle_of_a_grid():
    answers = [Answer(-5.0, False), Answer(-4.0, True), Answer(-3.0, False), Answer(-2.5, True)]
    assert simulate.middle(answers) == pytest.approx(-3.5)
    assert simulate.middle([Answer(-3.0, True)]) == pytest.approx(-4.5)


def test_noises():
    rng = np.random.default_rng(0)
    assert [simulate.logistic(0.0)(rng, -3.0)(x) for x in (-3.1, -2.9)] == [False, True]
    assert not simulate.logistic(1e-3)(rng, 10.0)(-10.0)
    shown = np.mean([simulate.flipped(0.85)(rng, -3.0)(-2.0) for _ in range(2000)])
    assert shown == pytest.approx(0.85, abs=0.03)


def test_the_table_is_printed(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["simulate", "--replicates", "1", "--runs", "2"])
    simulate.main()
    assert "| 2 | w = 0.15 dex | search |" in capsys.readouterr().out
