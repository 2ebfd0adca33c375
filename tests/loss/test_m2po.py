"""M2PO: hand-computed values, PPO with the solved bounds, and the authors' numbers."""

from __future__ import annotations

import math

import pytest
import torch

from stalefront.choice import OptionError
from stalefront.trust_region import second_moment_bound_nats

LN2 = math.log(2)


def test_golden(make_loss, hand_batch, grade):
    # Harmful, A = 1 and r > 1: 4 and 2; A = −2 and r < 1: ½. (log r)² = 4, 1, 1 in units of (ln 2)², mean 2.
    # A budget of 1.5: τ = ln 2 (all three at 1 have mean 1; τ² = 2.5 solves exactly, and 1 is the largest below).
    # Clip [½, 2]: −min(r A, clip(r) A) = [−2, −2], [1, 2, 8]. What lies on the bound is clipped: its slope is 0.
    batch = hand_batch(ratio=((4, 2), (0.5, 1, 4)))
    graded = grade(make_loss("m2po", budget=1.5 * LN2**2), batch)
    assert graded.loss == pytest.approx((-4 + 1 + 2 + 8) / 5, rel=1e-6)
    assert graded.grad_BT[0, 0] == 0
    torch.testing.assert_close(graded.grad_BT[1, 1:], torch.tensor([0.4, 1.6], dtype=torch.float64), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("squares", "budget", "bound"),
    [
        ([4.0, 1.0, 1.0], 1.5, 1.0),
        ([4.0, 1.0, 1.0], 2.0, math.inf),  # the mean itself
        ([4.0, 1.0, 1.0], 0.5, 0.0),  # below the smallest
        ([1.0, 2.0, 3.0, 4.0], 2.3, math.sqrt(3)),  # min(v, 3) has mean 2.25, min(v, 3.2) would meet 2.3
        ([], 0.04, math.inf),
        ([math.inf, 1.0], 0.04, 0.0),
    ],
)
def test_solver(squares, budget, bound):
    assert second_moment_bound_nats(torch.tensor(squares), budget) == pytest.approx(bound, abs=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_solver_against_a_search(seed):
    squares = torch.rand(40, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) ** 4
    budget = 0.05
    fits = [float(v) for v in squares if torch.clamp(squares, max=float(v)).mean() < budget]
    assert second_moment_bound_nats(squares, budget) ** 2 == pytest.approx(max(fits), abs=1e-9)


def test_it_is_ppo_with_the_solved_bounds(make_loss, random_inputs, grade):
    loss, inputs = make_loss("m2po"), random_inputs(spread=2)
    low, high = loss.widths(inputs)
    assert 0 < low < 1
    one, other = grade(loss, inputs), grade(make_loss("dapo", epsilon=low, epsilon_high=high), inputs)
    assert one.loss == other.loss
    assert torch.equal(one.grad_BT, other.grad_BT)


def test_a_floor_keeps_the_clip_wide(make_loss, random_inputs):
    inputs = random_inputs(spread=2)
    assert make_loss("m2po", budget=1e-9, miniclip_low=0.3, miniclip_high=0.5).widths(inputs) == (0.3, 0.5)


@pytest.mark.parametrize(
    ("case", "options"),
    [
        ("budget004_mu", {}),
        ("budget004_mu_miniclip", {"miniclip_low": 0.3, "miniclip_high": 0.5}),
        ("budget004_old", {"anchor": "theta/old"}),
        ("budget05_mu", {"budget": 0.5}),
        ("budget100_mu_noclip", {"budget": 100}),
    ],
)
def test_authors(case, options, agrees):
    agrees(f"m2po__compute_m2po_policy_loss__{case}", "m2po", **{"anchor": "theta/mu"} | options)


@pytest.mark.parametrize(("field", "value"), [("budget", 0), ("miniclip_low", -1)])
def test_refused(make_loss, field, value):
    with pytest.raises(OptionError, match=f"loss.{field}"):
        make_loss("m2po", **{field: value})
