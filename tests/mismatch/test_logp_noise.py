"""Noise on what is written down: values by hand, its signature, and a sampler that is the trainer's."""

from __future__ import annotations

import math

import pytest
import torch

from stalefront.mismatch import Noise
from stalefront.noise import row_keys
from stalefront.stats import log_ratio_stats


def test_values_by_hand(entry):
    noise = Noise(row_keys(0, "test", 1, 4), 3)
    z_B = noise.normals(1).squeeze(-1)
    logp = torch.tensor([-1.0, 0.0, -math.inf, math.nan])
    found = entry("logp_noise", sigma=0.2, strength=0.5)(logp, noise)
    torch.testing.assert_close(found[:2], torch.stack([-1 + 0.1 * z_B[0], 0.1 * z_B[1]]))
    assert found[2] == -math.inf
    assert found[3].isnan()


@pytest.mark.parametrize("sigma", [0.1, 0.5])
def test_signature_of_a_noisy_log(sigma, entry):
    rows = 200_000
    logp = torch.full((rows,), -1.0, dtype=torch.float64)
    log_ratio = logp - entry("logp_noise", sigma=sigma)(logp, Noise(row_keys(0, "test", 1, rows), 0))
    stats, error = log_ratio_stats(log_ratio), sigma / math.sqrt(rows)
    assert abs(stats["k1_nats"]) < 4 * error
    assert abs(stats["ratio_mean"] - math.exp(sigma**2 / 2)) < 5 * error * math.exp(sigma**2)
    assert stats["k2_nats"] == pytest.approx(sigma**2 / 2, rel=0.02)
    assert stats["k3_nats"] == pytest.approx(math.expm1(sigma**2 / 2), rel=0.05)


def test_tokens_and_distributions_are_the_trainers(make_learner, draw):
    made, plain = make_learner("logp_noise"), make_learner()
    drawn, other = draw(made), draw(plain)
    assert torch.equal(drawn.samples.tokens_BT, other.samples.tokens_BT)
    assert torch.equal(drawn.logp_BCV, other.logp_BCV)
    key_B = row_keys(0, "logp_noise rollout", 1, 16)
    z_BC = torch.cat([Noise(key_B, c).normals(1) for c in range(drawn.written_BC.shape[1])], 1)
    expected = (other.written_BC + 0.045 * z_BC).where(drawn.mask_BC, 0.0)
    torch.testing.assert_close(drawn.written_BC, expected, rtol=0, atol=1e-6)


def test_log_probs_above_0_are_written_down_and_trained_on(make_learner):
    made = make_learner("logp_noise", **{"mismatch.logp_noise.sigma": 5.0})
    _, row = made.advance()
    assert (made.batch.logp_behav_BT > 0).any()
    assert math.isfinite(row["mismatch_k3_nats"])


def test_options(refused):
    refused("logp_noise", "sigma", sigma=-0.1)
    refused("logp_noise", "sigma", sigma=math.inf)
