"""Group-relative advantages by hand."""

from __future__ import annotations

import math

import pytest
import torch

from stalefront.advantage import STD_EPSILON, group_advantages


@pytest.mark.parametrize(
    ("scale_rewards", "sigma"),
    [
        # Groups [1, 0, 0, 1] and [3, 3, 0, 0]: means ½ and 1.5. Sample standard deviations (n − 1):
        # √(4 · ¼ / 3) = .5773503 and √(4 · 2.25 / 3) = 1.7320508.
        ("group", (math.sqrt(1 / 3), math.sqrt(3))),
        # The batch [1, 0, 0, 1, 3, 3, 0, 0] has mean 1 and Σ(R − 1)² = 0+1+1+0+4+4+1+1 = 12: √(12/7) = 1.3093073.
        ("batch", (math.sqrt(12 / 7), math.sqrt(12 / 7))),
        ("none", (1 - STD_EPSILON, 1 - STD_EPSILON)),
    ],
)
def test_golden(scale_rewards, sigma):
    reward = torch.tensor([1, 0, 0, 1, 3, 3, 0, 0], dtype=torch.float64)
    got = group_advantages(reward, num_generations=4, scale_rewards=scale_rewards)
    first, second = 0.5 / (sigma[0] + 1e-4), 1.5 / (sigma[1] + 1e-4)
    expected = torch.tensor([first, -first, -first, first, second, second, -second, -second])
    torch.testing.assert_close(got.advantage_B, expected)
    torch.testing.assert_close(got.reward_std_P, torch.tensor([math.sqrt(1 / 3), math.sqrt(3)], dtype=torch.float64))


@pytest.mark.parametrize("scale_rewards", ["group", "batch", "none"])
@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, 1e6])
def test_equal_rewards_give_exactly_nothing(value, scale_rewards):
    reward = torch.full((8,), value, dtype=torch.float64)
    got = group_advantages(reward, num_generations=4, scale_rewards=scale_rewards)
    assert got.advantage_B.tolist() == [0.0] * 8
    assert got.reward_std_P.tolist() == [0.0] * 2


@pytest.mark.parametrize("scale_rewards", ["group", "batch", "none"])
def test_every_group_is_centred_and_shifts_do_not_matter(scale_rewards):
    reward = torch.rand(24, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    got = group_advantages(reward, num_generations=6, scale_rewards=scale_rewards).advantage_B
    torch.testing.assert_close(got.view(4, 6).sum(1), torch.zeros(4), atol=1e-5, rtol=0)
    moved = group_advantages(reward + 3, num_generations=6, scale_rewards=scale_rewards).advantage_B
    torch.testing.assert_close(got, moved)


def test_one_bad_reward_stays_in_its_group():
    reward = torch.tensor([1, 0, math.nan, 1, 1, 0, 0, 1], dtype=torch.float64)
    got = group_advantages(reward, num_generations=4, scale_rewards="group").advantage_B
    assert got[:4].isnan().all()
    assert got[4:].isfinite().all()


def test_rejected_samples_leave_the_baseline():
    """Two siblings with rewards 1 and 100, of which the second is rejected: 1 − 50.5 with it, nothing without it."""
    reward, keep = torch.tensor([1.0, 100.0]), torch.tensor([True, False])
    both = group_advantages(reward, num_generations=2, scale_rewards="none")
    assert both.advantage_B.tolist() == [-49.5, 49.5]
    one = group_advantages(reward, num_generations=2, scale_rewards="none", keep_B=keep)
    assert one.advantage_B.tolist() == [0.0, 0.0]
    # Of four, three are left: means over 1, 2 and 6; a group without any has no advantage.
    reward = torch.tensor([1.0, 2.0, 50.0, 6.0, 7.0, 8.0, 9.0, 9.0])
    keep = torch.tensor([True, True, False, True, False, False, False, False])
    got = group_advantages(reward, num_generations=4, scale_rewards="none", keep_B=keep)
    assert got.advantage_B.tolist() == [-2.0, -1.0, 0.0, 3.0, 0.0, 0.0, 0.0, 0.0]
    scaled = group_advantages(reward, num_generations=4, scale_rewards="group", keep_B=keep)
    assert scaled.advantage_B[3] == pytest.approx(3 / (7**0.5 + 1e-4))
    assert scaled.reward_std_P.tolist() == pytest.approx([7**0.5, 0.0])
    whole = group_advantages(reward, num_generations=4, scale_rewards="batch", keep_B=keep)
    assert whole.advantage_B[3] == scaled.advantage_B[3]
    everyone = torch.ones(8, dtype=torch.bool)
    for scale in ("group", "batch", "none"):
        kept = group_advantages(reward, num_generations=4, scale_rewards=scale, keep_B=everyone)
        assert torch.equal(
            kept.advantage_B, group_advantages(reward, num_generations=4, scale_rewards=scale).advantage_B
        )
