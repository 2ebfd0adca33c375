"""IPO: hand-computed values, the unmasked special case, and prime-rl's numbers."""

from __future__ import annotations

import math

import pytest
import torch

from stalefront.choice import OptionError


def test_golden(make_loss, hand_batch, grade):
    # p_θ = [.368, .135], [.368, .050, .607]; p_θ − p_μ = p_θ (1 − 1/r): [.184, −.135], [−.368, 0, .303]. ε = .2 keeps
    # the first row and r = 1. −A r = [−2, −½], [·, 2, ·]; .1 l² = .1 (ln 2)² wherever r ≠ 1; over 5 tokens.
    # Gradient −A r + .2 l.
    graded = grade(make_loss("ipo", epsilon=0.2, kl_tau=0.1, value_cap=None), hand_batch())
    log2 = math.log(2)
    assert graded.loss == pytest.approx((-0.5 + 0.4 * log2**2) / 5, rel=1e-6)
    slopes = [[-2 + 0.2 * log2, -0.5 - 0.2 * log2, 0], [-0.2 * log2, 2, 0.2 * log2]]
    torch.testing.assert_close(graded.grad_BT, torch.tensor(slopes, dtype=torch.float64) / 5, rtol=1e-6, atol=0)
    assert graded.value.clip_low_BT.tolist() == [[False] * 3, [True, False, False]]
    assert graded.value.clip_high_BT.tolist() == [[False] * 3, [False, False, True]]


def test_no_probability_moves_by_more_than_one(make_loss, random_inputs, grade):
    inputs = random_inputs(spread=3)
    one = grade(make_loss("ipo", epsilon=1, value_cap=None), inputs)
    other = grade(make_loss("importance"), inputs)
    assert one.loss == other.loss
    assert torch.equal(one.grad_BT, other.grad_BT)


def test_a_cap_on_the_value_leaves_the_slope_at_the_cap(make_loss, hand_batch, grade):
    # r = [2, ½], [½, 1, 2] with cap 1.5: −A r = [−1.5, −.5], [1, 2, 3], which is also the gradient.
    graded = grade(make_loss("ipo", epsilon=1, value_cap=1.5), hand_batch())
    assert graded.loss == pytest.approx(4 / 5, rel=1e-6)
    expected = torch.tensor([[-1.5, -0.5, 0], [1, 2, 3]], dtype=torch.float64) / 5
    torch.testing.assert_close(graded.grad_BT, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("file", "options"),
    [
        ("prime_rl__ipo_loss_fn__thr01_kl1e-3", {"epsilon": 0.1, "kl_tau": 1e-3, "value_cap": None}),
        ("prime_rl__ipo_loss_fn__thr02_kl0", {"epsilon": 0.2, "value_cap": None}),
        ("prime_rl_tip__IPOLoss__eps03_cap1e4", {}),
        ("prime_rl_tip__IPOLoss__eps03_cap2", {"value_cap": 2}),
    ],
)
def test_prime_rl(file, options, agrees):
    agrees(file, "ipo", **options)


@pytest.mark.parametrize(("field", "value"), [("epsilon", -1), ("kl_tau", -1), ("value_cap", 0.5)])
def test_refused(make_loss, field, value):
    with pytest.raises(OptionError, match=f"loss.{field}"):
        make_loss("ipo", **{field: value})
