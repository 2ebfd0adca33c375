"""Kinds of sampler mismatch: moments by hand, draws of each kind at several sizes, and how often it is wrong."""

import math

import numpy as np
import pytest

from stalefront.analysis.settings import SignatureSettings
from stalefront.analysis.signature import KINDS, Moments, of_batches, pooled, signature

VOCABULARY = 40


def moments(log_ratio):
    ratio = np.exp(log_ratio)
    return Moments(
        n=len(log_ratio),
        k1=float(-log_ratio.mean()),
        k3=float((ratio - 1 - log_ratio).mean()),
        abs_mean=float(np.abs(log_ratio).mean()),
        second=float((log_ratio**2).mean()),
        chi2=float(((ratio - 1) ** 2).mean()),
    )


def log_softmax(logits):
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def tokens_of(logp, random):
    """One token of each of n distributions, shape (n, V)."""
    edges = np.exp(logp).cumsum(-1)
    return (random.random((len(logp), 1)) * edges[:, -1:] < edges).argmax(-1)


def policy(n, random):
    return log_softmax(2 * random.standard_normal((n, VOCABULARY)))


def sampler(n, size, random):
    """The sampler's logits carry noise of standard deviation `size`."""
    old = policy(n, random)
    mu = log_softmax(old + size * random.standard_normal(old.shape))
    place = np.arange(n), tokens_of(mu, random)
    return moments(old[place] - mu[place])


def logging_noise(n, size, random):
    """The sampler's tokens are from old; what is written down has noise."""
    return moments(size * random.standard_normal(n))


def truncated(n, size, random):
    """Tokens are dropped from the least likely on, up to a mass of `size`, and the rest is renormalised."""
    old = policy(n, random)
    order = np.argsort(old, -1)
    dropped = np.take_along_axis(np.exp(old), order, -1).cumsum(-1) <= size
    cut = np.empty_like(dropped)
    np.put_along_axis(cut, order, dropped, -1)
    mu = log_softmax(np.where(cut, -np.inf, old))
    place = np.arange(n), tokens_of(mu, random)
    return moments(old[place] - mu[place])


DRAWS = {
    "sampler": [(sampler, 0.3, 20_000), (sampler, 0.1, 40_000)],
    "logging noise": [(logging_noise, 0.45, 5_000), (logging_noise, 0.14, 20_000), (logging_noise, 0.05, 200_000)],
    "truncated support": [(truncated, 0.1, 5_000), (truncated, 0.05, 5_000), (truncated, 0.01, 20_000)],
}


@pytest.mark.parametrize(
    ("kind", "draw", "size", "n"), [(kind, *case) for kind, cases in DRAWS.items() for case in cases]
)
def test_draws_of_a_kind_have_its_signature(kind, draw, size, n):
    found = [signature(draw(n, size, np.random.default_rng(seed))).kind for seed in range(8)]
    # Near a threshold it may call one undecided, and never another kind.
    assert set(found) <= {kind, "undecided"}
    assert found.count(kind) >= 7


@pytest.mark.parametrize("draw", [sampler, logging_noise])
def test_too_few_tokens_of_a_small_mismatch_are_undecided_and_it_says_how_many_would_do(draw):
    found = signature(draw(2_000, 0.03, np.random.default_rng(1)))
    assert found.kind == "undecided"
    assert found.needed is not None
    assert found.needed > 2_000


@pytest.mark.parametrize("size", [0.02, 0.1, 0.4])
@pytest.mark.parametrize("n", [500, 5_000])
def test_noise_of_the_log_is_rarely_taken_for_anything_else(size, n):
    random = np.random.default_rng(7)
    found = [signature(logging_noise(n, size, random)).kind for _ in range(1_500)]
    # Three standard errors on one side: .13 % for each of the two other kinds, so 4 of 1500; more than 12 is p < 1e-3.
    assert sum(kind not in ("logging noise", "undecided") for kind in found) <= 12


@pytest.mark.parametrize("size", [0.05, 0.3])
def test_a_real_difference_is_rarely_taken_for_anything_else(size):
    random = np.random.default_rng(8)
    found = [signature(sampler(1_000, size, random)).kind for _ in range(400)]
    assert sum(kind not in ("sampler", "undecided") for kind in found) <= 5


def test_rounding_is_no_mismatch():
    random = np.random.default_rng(2)
    assert signature(logging_noise(4_000, 2e-7, random)).kind == "none"
    assert signature(moments(np.zeros(10))).kind == "none"
    assert signature(logging_noise(4_000, 1e-3, random), SignatureSettings(rounding_nats=1e-2)).kind == "none"


def test_moments_by_hand():
    got = moments(np.log(np.array([2.0, 0.5])))
    assert got.ratio_mean == pytest.approx(1.25)
    assert got.k2 == pytest.approx(math.log(2) ** 2 / 2)
    assert got.sd == pytest.approx(math.log(2))
    assert got.k1_se == pytest.approx(math.log(2) / math.sqrt(2))
    # χ² = (1 + .25)/2, m = .25: the variance of r is .5625.
    assert got.excess_se == pytest.approx(0.75 / math.sqrt(2))


def test_standard_errors_are_those_of_repeated_draws():
    random = np.random.default_rng(3)
    found = [sampler(2_000, 0.2, random) for _ in range(200)]
    for name in ("k1", "excess"):
        spread = np.std([getattr(m, name) for m in found])
        said = np.mean([getattr(m, f"{name}_se") for m in found])
        # 200 draws know a standard deviation to 5 %.
        assert said == pytest.approx(spread, rel=0.2)


def test_pooled_batches_are_one_batch():
    random = np.random.default_rng(4)
    log_ratio = 0.1 * random.standard_normal(300)
    pieces = np.split(log_ratio, [50, 120])
    parts = [moments(piece) for piece in pieces]
    columns = [np.array([getattr(m, name) for m in parts]) for name in ("n", "k1", "k3", "abs_mean", "sd", "chi2")]
    whole = moments(log_ratio)
    for got in (of_batches(*columns), pooled(parts)):
        for name in ("n", "k1", "k3", "abs_mean", "second", "chi2"):
            assert getattr(got, name) == pytest.approx(getattr(whole, name), rel=1e-12)


def test_a_batch_that_is_not_finite_is_counted_and_left_out():
    column = np.array([0.1, math.nan, math.inf])
    tokens = np.array([10.0, 10.0, 10.0])
    got = of_batches(tokens, column, column, column, column, column)
    assert (got.n, got.left_out) == (10, 2)
    nothing = of_batches(tokens[1:], column[1:], column[1:], column[1:], column[1:], column[1:])
    assert (nothing.n, nothing.left_out) == (0, 2)
    assert signature(nothing).kind == "undecided"
    assert pooled([got, nothing]).left_out == 4


def test_without_a_standard_deviation_nothing_is_decided():
    none = np.full(2, math.nan)
    got = of_batches(np.array([5.0, 5.0]), np.zeros(2), np.full(2, 0.01), np.full(2, 0.1), none, none)
    assert got.k3 == pytest.approx(0.01)
    assert signature(got).kind == "undecided"


def test_every_answer_is_a_kind():
    random = np.random.default_rng(5)
    mixed = moments(np.concatenate([0.3 * random.standard_normal(5_000), np.full(5_000, -0.1)]))
    assert signature(mixed).kind == "undecided"
    assert {*DRAWS, "none", "undecided"} == set(KINDS)


@pytest.mark.parametrize(("name", "value"), [("rounding_nats", -1.0), ("z", 0.0), ("share", 1.0)])
def test_settings_refuse_nonsense(name, value):
    with pytest.raises(ValueError, match=f"SignatureSettings.{name}={value}"):
        SignatureSettings(**{name: value})
