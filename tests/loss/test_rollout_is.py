"""Double-sided importance sampling: hand-computed values, the strict bound, and SkyRL's numbers."""

from __future__ import annotations

import math

import pytest
import torch

from stalefront.choice import OptionError


@pytest.mark.parametrize(
    ("bounds", "loss", "slopes"),
    [
        # r = [2, ½], [½, 1, 2] and the band (½, 2): strictly, only r = 1 stays: −A log θ = −6.
        ("strict", -6 / 5, [[0, 0, 0], [0, 0.4, 0]]),
        # With its ends: −r A log θ = [2, 1], [−1, −6, −2].
        ("inclusive", -6 / 5, [[-0.4, -0.1, 0], [0.2, 0.4, 0.8]]),
    ],
)
def test_golden(bounds, loss, slopes, make_loss, hand_batch, grade):
    # log 2 and log ½ are exact enough for the bounds to be met only from one side: nudge the band outwards by an ulp.
    nudge = 1e-12 if bounds == "inclusive" else -1e-12
    options = {"epsilon_low": 0.5 + nudge, "epsilon_high": 1.0 + nudge, "bounds": bounds}
    graded = grade(make_loss("rollout_is", **options), hand_batch())
    assert graded.loss == pytest.approx(loss, rel=1e-6)
    torch.testing.assert_close(graded.grad_BT, torch.tensor(slopes, dtype=torch.float64), rtol=1e-6, atol=0)


def test_a_ratio_on_the_bound(make_loss, random_inputs):
    inputs = random_inputs(spread=0)
    high = make_loss("rollout_is").outside(inputs)[1]
    assert not high.any()
    # θ/μ of exactly 1 against bounds of exactly 1 is refused, since nothing would be left on-policy.
    with pytest.raises(OptionError, match=r"loss\.epsilon_high"):
        make_loss("rollout_is", epsilon_high=0)


def test_a_wide_band_is_cispo_without_cap(make_loss, random_inputs, grade):
    inputs = random_inputs(spread=3)
    one = grade(make_loss("rollout_is", epsilon_low=1, epsilon_high=math.inf), inputs)
    other = grade(make_loss("cispo", epsilon_high=math.inf, anchor="theta/mu"), inputs)
    assert one.loss == other.loss
    assert torch.equal(one.grad_BT, other.grad_BT)


@pytest.mark.parametrize(("case", "low", "high"), [("eps02", 0.2, 0.2), ("eps_05_40", 0.5, 4.0)])
def test_skyrl(case, low, high, agrees):
    agrees(f"skyrl__rollout_is_policy_loss__{case}", "rollout_is", epsilon_low=low, epsilon_high=high, rtol=5e-8)
