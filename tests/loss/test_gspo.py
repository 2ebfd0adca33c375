"""GSPO: hand-computed values, and the token-level special case."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from stalefront.choice import OptionError


@pytest.mark.parametrize(
    ("advantage", "loss", "grads", "clipped"),
    [
        # s = exp of the mean log-ratio: r = [½, ½] → ½; r = [2, 1, 4] → (ln 2 + 0 + 2 ln 2)/3 = ln 2 → 2.
        # A = 1, s = ½: −min(.5, .8) = −.5; A = −2, s = 2: −min(−4, −2.4) = 4; mean 1.75.
        # Gradient of a token: −sA / (2 |y|) = −.5/4 and 4/6.
        ((1, -2), 1.75, (-0.125, 2 / 3), (False, False)),
        # A = −1, s = ½: −min(−.5, −.8) = .8, clipped low; A = 2, s = 2: −min(4, 2.4) = −2.4, clipped high.
        ((-1, 2), -0.8, (0.0, 0.0), (True, True)),
    ],
)
def test_golden(make_loss, hand_batch, grade, advantage, loss, grads, clipped):
    batch = hand_batch(ratio=((0.5, 0.5), (2, 1, 4)), advantage=advantage)
    graded = grade(make_loss("gspo", epsilon=0.2), batch)
    assert graded.loss == pytest.approx(loss, rel=1e-6)
    expected = torch.tensor([[grads[0]] * 2 + [0], [grads[1]] * 3], dtype=torch.float64)
    torch.testing.assert_close(graded.grad_BT, expected, rtol=1e-6, atol=0)
    assert graded.value.clip_low_BT[0].tolist() == [clipped[0]] * 3
    assert graded.value.clip_high_BT[1].tolist() == [clipped[1]] * 3


def test_one_token_sequences_make_it_grpo(make_loss, random_inputs, grade):
    inputs = random_inputs(width=1, rows=8)
    for options in ({}, {"beta": 0.1}, {"epsilon": 0.05, "delta": 1.2}):
        one, other = grade(make_loss("gspo", **options), inputs), grade(make_loss("grpo", **options), inputs)
        assert one.loss == pytest.approx(other.loss, rel=1e-12)
        torch.testing.assert_close(one.grad_BT, other.grad_BT)
        assert torch.equal(one.value.clip_high_BT, other.value.clip_high_BT)


def test_one_advantage_one_gradient(make_loss, random_inputs, grade):
    inputs = random_inputs()
    grads = grade(make_loss("gspo", epsilon=10), inputs).grad_BT
    for row, mask in zip(grads, inputs.mask_BT, strict=True):
        assert row[mask].unique().numel() == 1


def test_golden_of_token_gradients(make_loss, hand_batch, grade):
    # s = ½ and 2 as above; token advantages [1, 3, ·], [−2, −2, −4]. −s A: [−.5, −1.5], [4, 4, 8]; means −1 and 16/3.
    # Through s every token has the mean; through its own log-prob each has −s A/|y|; all halved.
    batch = hand_batch(ratio=((0.5, 0.5), (2, 1, 4)))
    advantage = torch.tensor([[1, 3, 0], [-2, -2, -4]], dtype=torch.float64)
    batch = replace(batch, advantage_B=advantage)
    shared, own = (grade(make_loss("gspo", epsilon=9, gradient=kind), batch) for kind in ("sequence", "token"))
    assert shared.loss == pytest.approx((-1 + 16 / 3) / 2, rel=1e-6)
    assert own.loss == pytest.approx(shared.loss, rel=1e-12)
    expected = torch.tensor([[-0.25, -0.25, 0], [16 / 18] * 3], dtype=torch.float64)
    torch.testing.assert_close(shared.grad_BT, expected, rtol=1e-6, atol=1e-12)
    expected = torch.tensor([[-0.125, -0.375, 0], [4 / 6, 4 / 6, 8 / 6]], dtype=torch.float64)
    torch.testing.assert_close(own.grad_BT, expected, rtol=1e-6, atol=0)


def test_one_advantage_makes_the_two_gradients_one(make_loss, random_inputs, grade):
    inputs = random_inputs()
    one, other = (grade(make_loss("gspo", epsilon=0.1, gradient=kind), inputs) for kind in ("sequence", "token"))
    torch.testing.assert_close(one.grad_BT, other.grad_BT, rtol=1e-6, atol=1e-12)


def test_the_mean_over_kept_tokens_is_that_of_a_smaller_mask(make_loss, random_inputs):
    inputs = random_inputs()
    keep = inputs.log_ratio_BT < 0.3
    kept = make_loss("gspo", over="kept").surrogate(replace(inputs, keep_BT=keep))
    smaller = make_loss("gspo").surrogate(replace(inputs, mask_BT=inputs.mask_BT & keep))
    assert torch.equal(kept.token_loss_BT, smaller.token_loss_BT)
    valid = make_loss("gspo").surrogate(replace(inputs, keep_BT=keep))
    assert not torch.equal(kept.token_loss_BT, valid.token_loss_BT)


def test_an_upper_bound_on_the_sequence_ratio(make_loss, hand_batch, grade):
    # A = −2, s = 2 bounded at 1.5: −s A = 3, and no gradient.
    batch = hand_batch(ratio=((0.5, 0.5), (2, 1, 4)))
    graded = grade(make_loss("gspo", epsilon=9, sequence_clamp_nats=math.log(1.5)), batch)
    assert graded.loss == pytest.approx((-0.5 + 3) / 2, rel=1e-6)
    assert not graded.grad_BT[1].any()
    assert graded.grad_BT[0, :2].all()
    with pytest.raises(OptionError, match=r"loss\.sequence_clamp_nats"):
        make_loss("gspo", sequence_clamp_nats=0)


TOKEN = {"gradient": "token", "sequence_clamp_nats": 10}
NARROW = {"epsilon": 3e-4, "epsilon_high": 4e-4}


@pytest.mark.parametrize(
    ("file", "options"),
    [
        # Three of them add 1e-8 to every length.
        ("verl__gspo__default", TOKEN | {"rtol": 5e-9}),
        ("verl__gspo__eps_3e-4_4e-4", TOKEN | NARROW),
        ("openrlhf__PolicyLoss__gspo_no_is", {"rtol": 5e-9}),
        ("openrlhf__PolicyLoss__gspo_is", {"anchor": "theta/mu", "rtol": 5e-9}),
        ("skyrl__gspo_policy_loss__seq_mean", TOKEN),
        ("trl__GRPOTrainer_compute_loss__gspo_seq", NARROW),
        ("trl__GRPOTrainer_compute_loss__gspo_seq_eps02", {}),
        ("slime__gspo__gspo", {}),
        ("areal__ppo_actor_loss_fn__gspo_seq_level", {"reduction": "token_mean"}),
    ],
)
def test_frameworks(file, options, agrees):
    agrees(file, "gspo", **options)


def test_frameworks_with_a_behaviour_weight(agrees, behaviour_weight):
    options = {"weights": behaviour_weight(5, "sequence"), "rtol": 5e-9}
    agrees("nemo_rl__ClippedPGLossFn__gspo_seq_is", "gspo", **options)
    options = {"weights": behaviour_weight(5, reject=True), "reduction": "token_mean", "over": "kept", "rtol": 5e-8}
    agrees("areal__ppo_actor_loss_fn__gspo_plus_token_mask5", "gspo", **options)


def test_advantage_of_a_sequence_is_its_mean(make_loss, random_inputs, grade):
    """Tokens with advantages of their own get the mean of their sequence, over the tokens that enter s."""
    inputs = random_inputs()
    # Of both signs in a sequence: the clip is not linear across them.
    own = torch.arange(inputs.mask_BT.numel(), dtype=torch.float64).mul(2).cos().view(inputs.mask_BT.shape)
    mean = (own * inputs.mask_BT).sum(-1) / inputs.mask_BT.sum(-1)
    tokens = replace(inputs, advantage_B=own)
    one = grade(make_loss("gspo", advantage="sequence"), tokens)
    other = grade(make_loss("gspo"), replace(inputs, advantage_B=mean))
    assert one.loss == pytest.approx(other.loss, rel=1e-12)
    torch.testing.assert_close(one.grad_BT, other.grad_BT)
    assert grade(make_loss("gspo"), tokens).loss != pytest.approx(one.loss, rel=1e-3)


def test_epsilon_of_the_length_by_hand(make_loss, hand_batch, grade):
    """r = [2, 2] of two tokens, ½ added to the length: log s = 2 ln 2/2.5; A = 1 alone counts, without a clip."""
    batch = hand_batch(ratio=((2, 2), (1, 1, 1)), advantage=(1, 0))
    graded = grade(make_loss("gspo", epsilon=math.inf, length_epsilon=0.5), batch)
    s = 2 ** (2 / 2.5)
    assert graded.loss == pytest.approx(-s / 2, rel=1e-12)
    torch.testing.assert_close(graded.grad_BT[0, :2], torch.full((2,), -s / 2.5 / 2, dtype=torch.float64))
