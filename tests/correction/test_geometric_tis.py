"""Geometric TIS: the mean log-ratio by hand, its identities, and the numbers of ROLL, AReaL and open-instruct."""

from __future__ import annotations

import pytest
import torch

from stalefront.correction import chain


def test_the_geometric_mean_by_hand(rule, sampled, weigh):
    inputs = sampled([[2.0, 8.0], [0.25, None], [1.0, 1.44]])
    weight, keep = weigh(inputs, rule("geometric_tis", cap=3.0, floor=0.5))
    for got, expected in zip(weight, (3.0, 0.5, 1.2), strict=True):
        assert got == pytest.approx([expected] * 2)
    assert all(all(row) for row in keep)


def test_gradient_by_hand(rule, sampled, make_loss, grade):
    # w = √(1.6 · .4) = .8 on both tokens, A = −1: gradient +.8 / 2.
    inputs = sampled([[1.6, 0.4]], advantage=[-1.0])
    graded = grade(make_loss("reinforce"), inputs, weights=chain([rule("geometric_tis")], inputs))
    torch.testing.assert_close(graded.grad_BT, torch.full((1, 2), 0.4, dtype=torch.float64))


def test_to_the_power_of_the_length_it_is_the_product(rule, random_inputs):
    inputs = random_inputs()
    mean, product = (
        chain([rule(stem, cap=float("inf"))], inputs).weight_BT for stem in ("geometric_tis", "sequence_tis")
    )
    length = inputs.mask_BT.sum(-1, keepdim=True)
    torch.testing.assert_close(mean**length, product, rtol=1e-12, atol=0)


def test_peers(rule, agrees):
    make = lambda **fields: rule("geometric_tis", anchor="old/mu", **fields)  # noqa: E731
    agrees("roll__compute_train_infer_correction__geometric_is_ub5", [make(cap=5.0)], weight="is_weight")
    areal = "areal__ppo_actor_loss_fn__seq_clamp_ratio_mean_09_12"
    clamp = [make(cap=1.2, floor=0.9)]
    agrees(areal, clamp, weight="behave_imp_weight", keep="behave_mask", dtype=torch.float32)
    band = rule("sequence_mask", anchor="old/mu", low=0.9, high=1.7)
    name = "open_instruct__rho_correction_grpo_loss__dapo_seqlevel_mask"
    agrees(name, [make(clamp_nats=10.0), band], weight="rho_weights", everywhere=True)
