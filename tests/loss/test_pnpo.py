"""PNPO: hand-computed values, the token-level special case, and the equation in plain numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from stalefront.choice import OptionError


def test_golden(make_loss, hand_batch, grade):
    # r = [2, ½], [½, 1, 4]; prefix geometric means [2, 1], [½, ½^½, (½·4)^⅓ = 2^⅓]; the band [.6, 1.5] leaves
    # [·, 1], [·, 2^−½, 2^⅓]; −g A log θ = [·, 2], [·, −6·2^−½, −2^⅓]; gradient −g A; over 5 tokens.
    graded = grade(make_loss("pnpo", epsilon_low=0.4, epsilon_high=0.5), hand_batch(ratio=((2, 0.5), (0.5, 1, 4))))
    half, third = 2**-0.5, 2 ** (1 / 3)
    assert graded.loss == pytest.approx((2 - 6 * half - third) / 5, rel=1e-6)
    expected = torch.tensor([[0, -1, 0], [0, 2 * half, 2 * third]], dtype=torch.float64) / 5
    torch.testing.assert_close(graded.grad_BT, expected, rtol=1e-6, atol=0)
    assert graded.value.clip_high_BT.tolist() == [[True, False, False], [False] * 3]
    assert graded.value.clip_low_BT.tolist() == [[False] * 3, [True, False, False]]


def test_one_token_sequences_make_it_rollout_is(make_loss, random_inputs, grade):
    inputs = random_inputs(width=1, rows=8)
    other = make_loss("rollout_is", anchor="theta/old", bounds="inclusive", epsilon_low=0.4, epsilon_high=0.5)
    one, other = grade(make_loss("pnpo", epsilon_low=0.4, epsilon_high=0.5), inputs), grade(other, inputs)
    assert one.loss == other.loss
    assert torch.equal(one.grad_BT, other.grad_BT)


def test_numpy(make_loss, random_inputs):
    inputs = random_inputs(spread=2, rows=8, width=7)
    mask = inputs.mask_BT.clone()
    mask[:, 2] = False  # a hole
    inputs = type(inputs)(**inputs.tensors() | {"mask_BT": mask})
    got = make_loss("pnpo", epsilon_low=0.5, epsilon_high=1).surrogate(inputs).token_loss_BT.numpy()
    theta, old, advantage = (x.numpy() for x in (inputs.logp_theta_BT, inputs.logp_old_BT, inputs.advantage_B))
    kept = 0
    for b, t in np.argwhere(mask.numpy()):
        before = [s for s in range(t + 1) if mask[b, s]]
        mean = np.prod([np.exp(theta[b, s] - old[b, s]) for s in before]) ** (1 / len(before))
        inside = 0.5 <= mean <= 2
        kept += inside
        assert got[b, t] == pytest.approx(-mean * advantage[b] * theta[b, t] if inside else 0.0, rel=1e-12)
    assert 0 < kept < mask.sum()


def test_refused(make_loss):
    with pytest.raises(OptionError, match=r"loss\.epsilon_low"):
        make_loss("pnpo", epsilon_low=-1)
