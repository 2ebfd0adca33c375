"""Token TIS: hand-computed weights, its identities, and its weights at work in a lagged cell."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from stalefront.batch import LossInputs, Weights
from stalefront.choice import OptionError
from stalefront.correction.token_tis import TokenTIS, truncated_ratio


@pytest.mark.parametrize(
    ("ratio", "cap", "weight"),
    [(0.25, 2.0, 0.25), (1.0, 2.0, 1.0), (1.9, 2.0, 1.9), (3.0, 2.0, 2.0), (3.0, math.inf, 3.0), (0.0, 2.0, 0.0)],
)
def test_truncated_ratio(ratio, cap, weight):
    got = truncated_ratio(torch.tensor([[ratio]], dtype=torch.float64).log(), cap=cap)
    assert got.item() == pytest.approx(weight)


def test_an_overflowing_ratio_is_the_cap():
    assert truncated_ratio(torch.tensor([100.0, math.inf, -math.inf]), cap=2.0).tolist() == [2.0, 2.0, 0.0]


@pytest.fixture
def three_policies() -> LossInputs:
    """θ/μ = [4, ½], θ/old = [2, ¼] and old/μ = [2, 2] for one sequence with A = 1."""
    theta = torch.tensor([[-1.0, -2.0]], dtype=torch.float64)
    old = theta - torch.tensor([[2.0, 0.25]], dtype=torch.float64).log()
    return LossInputs(
        logp_theta_BT=theta,
        logp_old_BT=old,
        logp_behav_BT=old - math.log(2),
        logp_ref_BT=None,
        advantage_B=torch.tensor([1.0], dtype=torch.float64),
        mask_BT=torch.tensor([[True, True]]),
    )


@pytest.mark.parametrize(
    ("anchor", "weight"), [("theta/mu", [3.0, 0.5]), ("theta/old", [2.0, 0.25]), ("old/mu", [2.0, 2.0])]
)
def test_anchor(anchor, weight, three_policies):
    got = TokenTIS(anchor=anchor, clamp_nats=None, cap=3.0, floor=0.0)(three_policies, Weights.ones(three_policies))
    torch.testing.assert_close(got.weight_BT, torch.tensor([weight], dtype=torch.float64))
    assert got.keep_BT.all()
    assert got.step_scale == 1


def test_golden(make_loss, three_policies, grade):
    # w = [min(4, 3), ½]; −w A log θ = [3, 1]; mean 2. Gradient −w A / 2 = [−1.5, −.25]: none of it through w.
    weights = TokenTIS(anchor="theta/mu", clamp_nats=None, cap=3.0, floor=0.0)(
        three_policies, Weights.ones(three_policies)
    )
    graded = grade(make_loss("reinforce"), three_policies, weights=weights)
    assert graded.loss == pytest.approx(2.0, rel=1e-6)
    expected = torch.tensor([[-1.5, -0.25]], dtype=torch.float64)
    torch.testing.assert_close(graded.grad_BT, expected, rtol=1e-6, atol=0)


def test_it_unbiases_the_policy_gradient(make_loss, random_inputs, grade):
    # Without a cap, the weighted gradient is that of ratio · A, the importance-sampled objective.
    inputs = random_inputs()
    inputs = replace(inputs, logp_behav_BT=inputs.logp_old_BT)
    weights = TokenTIS(anchor="theta/mu", clamp_nats=None, cap=math.inf, floor=0.0)(inputs, Weights.ones(inputs))
    corrected = grade(make_loss("reinforce"), inputs, weights=weights)
    sampled = grade(make_loss("grpo", epsilon=math.inf), inputs)
    torch.testing.assert_close(corrected.grad_BT, sampled.grad_BT, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("cap", [0.5, 0, -1, math.nan])
def test_cap_refused(cap):
    with pytest.raises(OptionError, match=r"correction\.token_tis\.cap"):
        TokenTIS(anchor="theta/mu", clamp_nats=None, cap=cap, floor=0.0)


@pytest.mark.parametrize("loss", ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "gspo"])
@pytest.mark.parametrize("anchor", ["theta/mu", "theta/old"])
def test_refused_on_a_loss_with_a_ratio(loss, anchor, make_cell):
    with pytest.raises(OptionError, match="use loss=reinforce") as caught:
        make_cell(loss=loss, correction=["token_tis"], **{"correction.token_tis.anchor": anchor})
    assert caught.value.field == "correction.token_tis.anchor"


@pytest.mark.parametrize("loss", ["reinforce", "grpo"])
def test_refused_where_it_would_never_act(loss, make_cell):
    with pytest.raises(OptionError, match="old/mu is 1"):
        make_cell(loss=loss, correction=["token_tis"], **{"correction.token_tis.anchor": "old/mu"})


def test_peers(rule, agrees):
    make = lambda **fields: [rule("token_tis", anchor="old/mu", **fields)]  # noqa: E731
    verl = {"weight": "rollout_is_weights", "keep": "modified_response_mask"}
    agrees("verl__rollout_correction__is_token_tis2", make(clamp_nats=20.0), **verl)
    ratio = "importance_sampling_ratio"
    agrees("trl__GRPOTrainer_compute_loss__is_token_truncate_c3", make(cap=3.0), weight=ratio)
    agrees("roll__compute_train_infer_correction__token_is_ub12", make(cap=1.2), weight="is_weight")
    for name in ("cispo_clamp2", "dapo_clamp2"):
        rho = make(clamp_nats=10.0)
        agrees(f"open_instruct__rho_correction_grpo_loss__{name}", rho, weight="rho_weights")
    clamp = make(cap=5.0, floor=0.5)
    areal = {"weight": "behave_imp_weight", "keep": "behave_mask", "dtype": torch.float32}
    agrees("areal__ppo_actor_loss_fn__token_clamp_ratio_05_5", clamp, **areal)
    skyrl = {"weight": "tis_ratio", "keep": "loss_mask_after", "dtype": torch.float32}
    agrees("skyrl__ppo_policy_loss__regular_token_tis2", make(), **skyrl)


def test_a_second_weight_on_the_same_ratio_is_refused(make_cell):
    with pytest.raises(OptionError, match="keep one of the two") as caught:
        make_cell(loss="reinforce", correction=["icepop", "token_tis"])
    assert caught.value.field == "correction.token_tis.anchor"


LAGGED = {"model.warmup.steps": 100, "optimizer.lr": 2e-3, "optimizer.warmup_steps": 2}


def test_weights_move_under_lag(make_cell, completed):
    cell = make_cell(steps=6, delay="lag", loss="reinforce", correction=["token_tis"], **LAGGED)
    rows = completed(cell)[1:]
    assert [row["lag_max_updates"] for row in rows] == [0, 1, 2, 3, 3, 3]
    # Step 1 is on-policy up to the sampler's rounding; from step 2 on θ has left μ.
    assert rows[0]["weight_mean"] == pytest.approx(1, abs=1e-5)
    for row in rows[2:]:
        assert abs(row["weight_mean"] - 1) > 1e-4
        assert 0 < row["weight_min"] < 0.99
        assert row["weight_mean"] <= 2.0
        assert row["mask_frac"] == 0
    assert any(row["theta_mu_ratio_max"] > 1.01 for row in rows[2:])


def test_the_run_differs_from_the_uncorrected_one_only_under_lag(make_cell, completed):
    options = {"steps": 4, "loss": "reinforce", **LAGGED}
    pairs = {}
    for delay in ("none", "lag"):
        plain = completed(make_cell(delay=delay, **options))
        corrected = completed(make_cell(delay=delay, correction=["token_tis"], **options))
        pairs[delay] = [
            abs(a["dist_from_start"] - b["dist_from_start"]) for a, b in zip(plain[1:], corrected[1:], strict=True)
        ]
    # On-policy the anchor θ/μ differs from 1 by the rounding between sampler and trainer, and by nothing else.
    assert max(pairs["none"]) < 1e-5
    assert pairs["lag"][-1] > 1e-4
