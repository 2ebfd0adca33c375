"""Stable-RL: one loss under many masks."""

import math

import pytest

from stalefront.frameworks import framework

STABLE = framework("stable_rl")


@pytest.mark.parametrize(
    ("mode", "divergence", "base"),
    [
        ("dppo_binary_tv", "tv", "mu"),
        ("dppo_binary_kl_recompute", "kl", "old"),
        ("ppo", "ratio", "mu"),
        ("ppo_recompute", "ratio", "old"),
    ],
)
def test_modes_differ_in_their_mask_alone(mode, divergence, base):
    loss = STABLE.recipe({"loss_mode": mode, "clip_ratio_low": 0.15}).loss
    assert (loss["divergence"], loss["mask_base"], loss["delta_low"]) == (divergence, base, 0.15)
    assert (loss["anchor"], loss["objective"], loss["cap"]) == ("theta/mu", "logp", 3.0)


def test_no_mask():
    assert STABLE.recipe({"loss_mode": "pg_no_mask"}).loss["delta_high"] == math.inf
