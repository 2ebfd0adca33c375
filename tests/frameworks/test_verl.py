"""verl: what its options become, against formulas written out here on other numbers than the golden files'."""

import math

import pytest
import torch

from stalefront.batch import LossInputs
from stalefront.choice import OptionError
from stalefront.frameworks import framework
from stalefront.parity import Case, evaluate

VERL = framework("verl")


def batch(seed=1):
    make = torch.Generator().manual_seed(seed)
    logps = [-torch.rand(4, 5, generator=make, dtype=torch.float64) - 0.2 for _ in range(3)]
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [0, 1, 1, 1, 0], [1, 1, 0, 0, 0]]).bool()
    advantage = torch.tensor([1.0, -1.0, 0.5, -0.5], dtype=torch.float64)
    return LossInputs(logps[0].requires_grad_(), logps[1], logps[2], None, advantage, mask)


def loss(options, inputs):
    return float(evaluate(VERL.recipe(options), inputs, Case(options)).loss)


def refusal(**options):
    with pytest.raises(OptionError) as error:
        VERL.recipe(options)
    return str(error.value)


def test_token_weights_and_rejection_by_hand():
    """PPO with dual clip, weights min(ρ, 1.1), sequences outside of [.9, 1.2] in mean μ/old leave the divisor."""
    inputs = batch().detach()
    rho, ratio = (inputs.logp_old_BT - inputs.logp_behav_BT).exp(), inputs.log_ratio_BT.exp()
    mean = (-(rho.log() * inputs.mask_BT).sum(-1) / inputs.mask_BT.sum(-1)).exp()
    kept = inputs.mask_BT & ((mean >= 0.9) & (mean <= 1.2))[:, None]
    assert 0 < kept.sum() < inputs.mask_BT.sum()
    advantage = inputs.advantage_B1
    token = torch.maximum(-ratio * advantage, -ratio.clamp(0.8, 1.2) * advantage)
    token = torch.where(advantage < 0, torch.minimum(token, -3 * advantage), token)
    expected = float((token * rho.clamp(max=1.1))[kept].sum() / kept.sum())
    options, inputs = {"rollout_is": "token", "rollout_is_threshold": 1.1}, batch()
    options |= {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.9_1.2"}
    assert loss(options, inputs) == pytest.approx(expected, rel=1e-12)
    v1 = loss({**options, "trainer_version": "v1"}, inputs)
    assert v1 == pytest.approx(expected * int(kept.sum()) / int(inputs.mask_BT.sum()), rel=1e-12)


def test_one_threshold_of_k1_is_a_band_around_1():
    one = VERL.recipe({"rollout_rs": "token_k1", "rollout_rs_threshold": 2.0})
    assert one == VERL.recipe({"rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_2.0"})


def test_one_threshold_serves_all_rules():
    rules = VERL.recipe({"rollout_rs": "seq_max_k2,token_k3", "rollout_rs_threshold": 0.5}).correction
    assert [(rule["choice"], rule["high"]) for rule in rules] == [("sequence_mask", 0.5), ("token_mask", 0.5)]


def test_bypass_mode_is_on_mu():
    made = VERL.recipe({"bypass_mode": True, "loss_type": "reinforce", "rollout_is": "sequence"})
    assert made.loss["choice"] == "reinforce"
    assert made.correction[0]["anchor"] == "theta/mu"
    assert "trainer_version=v1" in made.notes[0]
    other = VERL.recipe({"bypass_mode": True, "trainer_version": "v1", "loss_mode": "gspo"})
    assert (other.loss["choice"], other.loss["anchor"], other.notes) == ("gspo", "theta/mu", ())


def test_bypass_mode_of_ppo_clip_has_no_weights():
    made = VERL.recipe({"bypass_mode": True, "rollout_is": "token"})
    assert (made.loss["choice"], made.correction) == ("dapo", ())


def test_one_null_bound_is_clip_ratio():
    made = VERL.recipe({"clip_ratio": 0.3, "clip_ratio_low": None})
    assert (made.loss["epsilon"], made.loss["epsilon_high"]) == (0.3, 0.2)


def test_the_sum_of_a_sequence_is_bounded():
    inputs = batch()
    far = torch.full_like(inputs.logp_behav_BT, -1e-3)
    inputs = LossInputs(inputs.logp_theta_BT, far - 30, far, None, inputs.advantage_B, inputs.mask_BT)
    found = evaluate(VERL.recipe({"rollout_is": "sequence"}), inputs, Case({}))
    assert float(found.weights.weight_BT.min()) == pytest.approx(math.exp(-20), rel=1e-15)


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"rollout_rs": "token_k4", "rollout_rs_threshold": 1.0}, "framework.rollout_rs = 'token_k4'"),
        ({"rollout_rs": "token_k3"}, "one threshold"),
        ({"rollout_rs": "token_k3", "rollout_rs_threshold": "0.1_0.2"}, "a single upper bound for token_k3"),
        ({"rollout_rs": "token_k2,token_k3", "rollout_rs_threshold": 1.0}, "at most one token_* and one seq_* rule"),
        ({"rollout_is": "token", "rollout_is_threshold": "a_b"}, "two as in 0.5_5.0"),
        ({"rollout_is": "token", "rollout_is_threshold": "5_0.5"}, "two as in 0.5_5.0"),
        ({"rollout_is": "token", "rollout_is_threshold": -1.0}, "a number above 0"),
        ({"bypass_mode": True, "loss_mode": "gspo"}, "trainer_version=v1, which keeps loss_mode"),
        ({"bypass_mode": True, "trainer_version": "v1", "rollout_is": "token"}, "old/mu is 1 and it never acts"),
        ({"loss_mode": "geo_mean", "rollout_is": "token"}, "Weights of GMPO are not shared"),
        (
            {
                **{"rollout_is": "sequence", "rollout_is_threshold": "0.5_2.0"},
                **{"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.5_2.0"},
            },
            "a single upper bound beside a seq_* rule",
        ),
    ],
)
def test_refused(options, part):
    assert part in refusal(**options)
