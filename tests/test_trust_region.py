"""Distances between two probabilities of one token, by hand and against their definitions."""

from __future__ import annotations

import math

import pytest
import torch

from stalefront.trust_region import bernoulli_kl, prefix_mean, probability_shift


@pytest.mark.parametrize(("p", "base"), [(0.5, 0.25), (0.25, 0.5), (1.0, 0.0), (0.0, 1.0), (0.3, 0.3)])
def test_probability_shift(p, base):
    logs = [torch.tensor(value, dtype=torch.float64).log() for value in (p, base)]
    assert probability_shift(*logs).item() == pytest.approx(p - base, abs=1e-15)


def test_a_small_shift_is_not_lost():
    # e^−10 (e^{1e−12} − 1): the difference of two exponentials has 4 digits left here.
    logp = torch.tensor(-10.0, dtype=torch.float64)
    difference = (logp + 1e-12) - logp
    assert probability_shift(logp + 1e-12, logp).item() == pytest.approx(math.exp(-10) * difference.item(), rel=1e-9)


@pytest.mark.parametrize(("base", "p"), [(0.25, 0.5), (0.75, 0.5), (0.5, 0.5), (0.1, 0.9)])
def test_bernoulli_kl(base, p):
    logs = [torch.tensor(value, dtype=torch.float64).log() for value in (base, p)]
    expected = base * math.log(base / p) + (1 - base) * math.log((1 - base) / (1 - p))
    assert bernoulli_kl(*logs, 0.0).item() == pytest.approx(expected, abs=1e-15)
    pair = [torch.distributions.Bernoulli(torch.tensor(x, dtype=torch.float64)) for x in (base, p)]
    assert bernoulli_kl(*logs, 0.0).item() == pytest.approx(float(torch.distributions.kl_divergence(*pair)), abs=1e-12)


def test_smoothing_keeps_a_certain_token_finite():
    certain, likely = torch.tensor(0.0, dtype=torch.float64), torch.tensor(0.5, dtype=torch.float64).log()
    assert bernoulli_kl(likely, certain, 0.0).item() == math.inf
    assert bernoulli_kl(likely, certain, 1e-8).item() == pytest.approx(
        0.5 * math.log(0.5) + 0.5 * math.log(0.5e8), rel=1e-6
    )


def test_prefix_mean():
    # Means of 1; 1, 3; 1, 3 (a hole); 1, 3, 8.
    value = torch.tensor([[1.0, 3.0, math.nan, 8.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True, False, True]])
    assert prefix_mean(value, mask).tolist() == [[1.0, 2.0, 2.0, 4.0]]
