"""Probabilistic bisection: by hand, against a brute-force posterior, and what must not change anything."""

import itertools
import math

import numpy as np
import pytest

from stalefront.search.bisection import (
    Answer,
    Point,
    believed_quantile,
    candidates,
    choose,
    deviation,
    edges,
    estimate,
    learning_rate,
    posterior,
    quantile_of,
    resolution,
)

X = (0.0, 1.0, 2.0)
THREE = [Answer(1.0, True), Answer(0.0, False), Answer(1.0, False)]


def test_posterior_after_three_answers_by_hand():
    # Intervals (−∞,0) (0,1) (1,2) (2,∞) under p = .8: .8·.2·.2, .8·.8·.2, .2·.8·.8, .2·.8·.8, over their sum .416.
    assert posterior(X, [], 0.8) == pytest.approx([0.25] * 4)
    assert posterior(X, THREE[:1], 0.8) == pytest.approx([0.4, 0.4, 0.1, 0.1])
    assert posterior(X, THREE, 0.8) == pytest.approx([1 / 13, 4 / 13, 4 / 13, 4 / 13])


def test_answers_may_come_in_any_order_and_opposite_ones_cancel():
    found = [posterior(X, order, 0.8) for order in itertools.permutations(THREE)]
    assert all(mass == pytest.approx(found[0]) for mass in found)
    assert posterior(X, [Answer(1.0, True), Answer(1.0, False)], 0.8) == pytest.approx(posterior(X, [], 0.8))


@pytest.mark.parametrize("seed", range(5))
def test_posterior_agrees_with_brute_force(seed):
    """Reference: Bayes' rule point by point for a boundary spread uniformly over the closed intervals."""
    rng = np.random.default_rng(seed)
    x = np.sort(rng.uniform(-5, -2, 6))
    answers = [Answer(float(v), bool(rng.random() < 0.5)) for v in rng.choice(x, 9)]
    between = float(rng.uniform(x[0], x[-1]))
    found = posterior(x, [*answers, Answer(between, True)], 0.7)
    n = 2000
    likelihood = []
    for low, high in itertools.pairwise(x):
        b = low + (np.arange(n) + 0.5) / n * (high - low)
        chance = np.where(b < between, 0.7, 0.3)
        for place, collapsed in answers:
            chance = chance * np.where((b < place) == collapsed, 0.7, 0.3)
        likelihood.append(chance.mean())
    inner = found[1:-1] / found[1:-1].sum()
    assert inner == pytest.approx(np.array(likelihood) / sum(likelihood), rel=2e-3)


def test_an_answer_from_beyond_the_interval_moves_the_open_end_alone():
    mass = posterior(X, [Answer(-9.0, True)], 0.8)
    assert mass == pytest.approx(np.array([0.5, 0.2, 0.2, 0.2]) / 1.1)
    assert posterior(X, [Answer(9.0, False)], 0.8)[::-1] == pytest.approx(mass)


@pytest.mark.parametrize(("scale", "shift"), [(3.0, 0.0), (0.5, -7.0), (2.302585, 1.0)])
def test_nothing_depends_on_the_unit_of_the_axis(scale, shift):
    rng = np.random.default_rng(0)
    x = np.sort(rng.uniform(-5, -2, 9))
    answers = [Answer(float(v), bool(rng.random() < 0.5)) for v in rng.uniform(-5.5, -1.5, 12)]
    moved = [Answer(scale * a.x + shift, a.collapsed) for a in answers]
    before, after = posterior(x, answers, 0.8), posterior(scale * x + shift, moved, 0.8)
    assert after == pytest.approx(before)
    assert choose(after, 0.5, [0, 1], []) == choose(before, 0.5, [0, 1], [])
    for level in (0.3, 0.5, 0.7):
        expected = scale * quantile_of(x, before, level) + shift
        assert quantile_of(scale * x + shift, after, level) == pytest.approx(expected)
    assert deviation(scale * x + shift, after) == pytest.approx(scale * deviation(x, before))


def test_mirrored_answers_give_the_mirrored_posterior():
    answers = [Answer(0.0, False), Answer(1.0, False), Answer(2.0, True)]
    mirrored = [Answer(2.0 - a.x, not a.collapsed) for a in answers]
    assert posterior(X, mirrored, 0.8)[::-1] == pytest.approx(posterior(X, answers, 0.8))


def test_candidates_are_round_and_do_not_depend_on_the_ends():
    assert candidates(1e-4, 1e-3, 4) == (1e-4, 1.78e-4, 3.16e-4, 5.62e-4, 1e-3)
    assert candidates(1.25e-4, 2e-3, 4) == (1.78e-4, 3.16e-4, 5.62e-4, 1e-3, 1.78e-3)
    assert set(candidates(2e-5, 3e-4, 8)) < set(candidates(1e-6, 1.0, 8))
    assert all(learning_rate(math.log10(lr)) == lr for lr in candidates(1e-9, 1e3, 10))
    assert candidates(1e-4, 1e-3, 50) == tuple(sorted(set(candidates(1e-4, 1e-3, 50))))


def test_the_choice_splits_the_posterior_in_half():
    assert choose(posterior(X, [], 0.8), 0.5, [7], []) == Point(1, 7)
    assert choose(posterior(X, THREE[:1], 0.8), 0.5, [7], []) == Point(0, 7)
    assert choose(np.array([0.05, 0.05, 0.05, 0.85]), 0.5, [7], []) == Point(2, 7)


def test_seeds_are_cycled_and_no_cell_is_asked_twice():
    mass = posterior(X, [], 0.8)
    taken = []
    while (point := choose(mass, 0.5, [3, 5], taken)) is not None:
        taken.append(point)
    assert taken[:3] == [Point(1, 3), Point(1, 5), Point(0, 3)]
    assert len(taken) == len(set(taken)) == 6


def test_runs_at_once_are_spread_over_the_posterior():
    assert [believed_quantile(n) for n in range(5)] == [0.5, 0.25, 0.75, 0.125, 0.625]
    mass = np.full(17, 1 / 17)
    assert [choose(mass, believed_quantile(n), [0], []).candidate for n in range(3)] == [7, 3, 12]


def test_estimates():
    ends = edges(X)
    assert ends.tolist() == [-1, 0, 1, 2, 3]
    found = estimate(X, np.array([0.01, 0.49, 0.49, 0.01]), 0.9)
    assert (found.bound, found.value) == ("", pytest.approx(10.0))
    assert (found.low, found.high) == (pytest.approx(10 ** (0.04 / 0.49)), pytest.approx(10 ** (2 - 0.04 / 0.49)))
    above = estimate(X, np.array([0.1, 0.1, 0.2, 0.6]), 0.9)
    assert (above.bound, above.value, above.low, above.high) == ("≥", 100.0, None, None)
    below = estimate(X, np.array([0.96, 0.02, 0.01, 0.01]), 0.9)
    assert (below.bound, below.value, below.low, below.high) == ("≤", 1.0, None, None)


def test_the_deviation_has_a_floor():
    one = np.array([0.0, 1.0, 0.0, 0.0])
    assert deviation(X, one) == pytest.approx(resolution(1)) == pytest.approx(1 / math.sqrt(12))
