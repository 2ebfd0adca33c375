"""Noise on the logits: values by hand, the signature of a real sampler difference, and keys that say all."""

from __future__ import annotations

import math

import pytest
import torch

from stalefront.mismatch import Noise
from stalefront.noise import row_keys
from stalefront.stats import log_ratio_stats

PROBABILITY = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)


def noise(rows, seed=0, column=0):
    return Noise(row_keys(seed, "test", 1, rows), column)


def test_values_by_hand(entry):
    z_BV = noise(2).normals(3)
    logits = torch.tensor([[0.0, 1.0, -math.inf], [math.nan, 2.0, 3.0]])
    found = entry("logit_noise", sigma=0.2, strength=0.5)(logits, noise(2))
    expected = [
        [0.1 * z_BV[0, 0], 1 + 0.1 * z_BV[0, 1], -math.inf],
        [math.nan, 2 + 0.1 * z_BV[1, 1], 3 + 0.1 * z_BV[1, 2]],
    ]
    torch.testing.assert_close(found, torch.tensor(expected), equal_nan=True)
    # Another column and another row are other noise.
    assert not torch.equal(noise(2, column=1).normals(3), z_BV)
    assert not torch.equal(z_BV[0], z_BV[1])


def test_a_shift_of_all_logits_alike_is_no_noise(entry):
    logits = PROBABILITY.float().log().expand(5, -1)
    one, other = (entry("logit_noise")(logits + shift, noise(5)) for shift in (0.0, 3.0))
    torch.testing.assert_close(one.softmax(-1), other.softmax(-1))


@pytest.mark.parametrize("sigma", [0.1, 0.3])
def test_signature_of_a_sampler_difference(sigma, entry):
    # Tokens are drawn from the noisy distribution: the mean ratio is 1 and the three estimators agree.
    rows = 100_000
    trainer = PROBABILITY.log().expand(rows, -1)
    sampler = torch.log_softmax(entry("logit_noise", sigma=sigma)(trainer, noise(rows)), -1)
    token = torch.multinomial(sampler.exp(), 1, generator=torch.Generator().manual_seed(0))
    log_ratio = (trainer - sampler).gather(-1, token).squeeze(-1)
    stats, error = log_ratio_stats(log_ratio), float(log_ratio.std()) / math.sqrt(rows)
    assert abs(stats["ratio_mean"] - 1) < 4 * error
    expected = sigma**2 / 2 * (1 - float(PROBABILITY.square().sum()))
    assert stats["k3_nats"] == pytest.approx(expected, rel=0.1)
    assert stats["k2_nats"] == pytest.approx(expected, rel=0.1)
    assert abs(stats["k1_nats"] - stats["k3_nats"]) < 4 * error


def test_a_rollout_is_drawn_from_noisy_logits_with_keys_of_its_own(make_learner, draw, decoded):
    made = make_learner("logit_noise", **{"mismatch.logit_noise.sigma": 0.5})
    drawn = draw(made)
    key_B = row_keys(0, "logit_noise rollout", 1, 16)
    z_BCV = torch.stack([Noise(key_B, c).normals(16) for c in range(drawn.logp_BCV.shape[1])], 1)
    expected = torch.log_softmax(decoded(made.parts.model, drawn) + 0.5 * z_BCV, -1)
    torch.testing.assert_close(drawn.logp_BCV, expected, rtol=0, atol=1e-5)


def test_raw_log_probs_hide_it_from_ratios(make_learner, draw, trainer):
    made = make_learner("logit_noise", **{"mismatch.logit_noise.sigma": 1.0, "mismatch.logit_noise.logged": "raw"})
    drawn = draw(made)
    own = trainer(made, drawn).gather(-1, drawn.tokens_BC[..., None]).squeeze(-1)
    torch.testing.assert_close(drawn.written_BC[drawn.mask_BC], own[drawn.mask_BC], rtol=0, atol=1e-5)


def test_options(refused):
    refused("logit_noise", "sigma", sigma=0.0)
    refused("logit_noise", "sigma", sigma=math.nan)
    refused("logit_noise", "logged", logged="none")
