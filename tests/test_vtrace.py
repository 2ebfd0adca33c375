"""V-trace: a trajectory by hand, its on-policy limit, and the sums of the equations in plain numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from stalefront.vtrace import vtrace_advantages, vtrace_targets


def row(*values: float) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.float64)


def test_golden():
    # R = [2, ½, 1], ρ = c = [1, ½, 1]; r = [0, 0, 1]; V = [.5, .25, .75], γ = 1. δ = [−.25, .5, .25].
    # v₂ = .75 + .25 = 1; v₁ = .25 + ½ (.5 + .25) = .625; v₀ = .5 − .25 + 1·(.625 − .25) = .625.
    log_ratio, mask = row(math.log(2), math.log(0.5), 0), torch.ones(1, 3, dtype=torch.bool)
    reward, value = row(0, 0, 1), row(0.5, 0.25, 0.75)
    target = vtrace_targets(log_ratio, reward, value, mask)
    torch.testing.assert_close(target, row(0.625, 0.625, 1))
    # ρ (r + v₊ − V): 1·(.625 − .5), ½ (1 − .25), 1·(1 − .75).
    torch.testing.assert_close(vtrace_advantages(log_ratio, reward, value, target, mask), row(0.125, 0.375, 0.25))
    # Traced over one token, then the return 1: v₀ = .5 − .25 + 1·(1 − .25) = 1; v₁ = .25 + ½·.5 + ½ (1 − .75) = .625.
    torch.testing.assert_close(vtrace_targets(log_ratio, reward, value, mask, horizon=1), row(1, 0.625, 1))


def batch(seed: int, rows: int = 5, width: int = 8) -> tuple[torch.Tensor, ...]:
    random = torch.Generator().manual_seed(seed)
    log_ratio, reward, value = (torch.randn(rows, width, generator=random, dtype=torch.float64) for _ in range(3))
    mask = torch.rand(rows, width, generator=random) < 0.7
    mask[0] = False
    return log_ratio, reward, value, mask


def test_on_policy_it_is_the_return():
    log_ratio, reward, value, mask = batch(0)
    target = vtrace_targets(torch.zeros_like(log_ratio), reward, value, mask)
    masked = reward * mask
    returns = masked.flip(-1).cumsum(-1).flip(-1) * mask
    torch.testing.assert_close(target, returns)


@pytest.mark.parametrize("horizon", [0, 100, None])
def test_ends_of_the_horizon(horizon):
    log_ratio, reward, value, mask = batch(1)
    bootstrap = torch.arange(5, dtype=torch.float64)
    got = vtrace_targets(log_ratio, reward, value, mask, horizon=horizon, bootstrap_B=bootstrap)
    if horizon == 0:
        returns = ((reward * mask).flip(-1).cumsum(-1).flip(-1) + bootstrap[:, None]) * mask
        torch.testing.assert_close(got, returns)
    else:
        torch.testing.assert_close(got, vtrace_targets(log_ratio, reward, value, mask, bootstrap_B=bootstrap))


def test_padding_is_inert():
    log_ratio, reward, value, mask = batch(2)
    junk = [x.masked_fill(~mask, math.nan) for x in (log_ratio, reward, value)]
    for horizon in (None, 2):
        assert torch.equal(
            vtrace_targets(*junk, mask, horizon=horizon),
            vtrace_targets(log_ratio, reward, value, mask, horizon=horizon),
        )


def by_the_equation(ratio, reward, value, options, horizon):
    """Double sum over one sequence without holes; the value after its end is `bootstrap`."""
    gamma, bootstrap = options["gamma"], options["bootstrap"]
    rho, c = np.minimum(options["rho_bar"], ratio), options["lambda_"] * np.minimum(options["c_bar"], ratio)
    length = len(ratio)
    after = [*value, bootstrap]
    target = []
    for s in range(length):
        end = length if horizon is None else min(s + horizon, length)
        total = value[s]
        for t in range(s, end):
            delta = reward[t] + gamma * after[t + 1] - value[t]
            total += gamma ** (t - s) * np.prod(c[s:t]) * rho[t] * delta
        rest = sum(gamma ** (t - end) * reward[t] for t in range(end, length)) + gamma ** (length - end) * bootstrap
        target.append(total + gamma ** (end - s) * np.prod(c[s:end]) * (rest - after[end]))
    return target


@pytest.mark.parametrize("horizon", [None, 0, 1, 3, 50])
def test_numpy(horizon):
    log_ratio, reward, value, mask = batch(3)
    bootstrap = torch.linspace(-1, 1, 5, dtype=torch.float64)
    options = {"gamma": 0.9, "lambda_": 0.8, "rho_bar": 1.2, "c_bar": 1.1}
    got = vtrace_targets(log_ratio, reward, value, mask, horizon=horizon, bootstrap_B=bootstrap, **options)
    for b in range(len(mask)):
        kept = mask[b]
        columns = (x[b][kept].numpy() for x in (log_ratio.exp(), reward, value))
        expected = by_the_equation(*columns, options | {"bootstrap": float(bootstrap[b])}, horizon)
        assert got[b][kept].tolist() == pytest.approx(expected, rel=1e-12)
        assert not got[b][~kept].any()
