"""Proximal policy `engine`: old is what the sampler wrote down, and what follows for ratios and their corrections."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from stalefront.choice import OptionError
from stalefront.proximal.engine import Engine

CONF = Path(__file__).parents[2] / "conf" / "proximal"
NOISY = {"mismatch": ["logit_noise"], "mismatch.logit_noise.sigma": 0.3}
WARM = {"model.warmup.steps": 200, "model.warmup.batch_size": 64, "optimizer.warmup_steps": 0, "steps": 3}
STATISTICS = ("ratio_mean", "ratio_max", "logratio_mean", "logratio_sd_nats", "logratio_q50", "k1_nats", "k3_nats")


def test_mu_stands_in_the_place_of_old(random_inputs):
    inputs = random_inputs()
    found = Engine()(inputs)
    assert torch.equal(found.logp_old_BT, inputs.logp_behav_BT)
    assert not torch.equal(inputs.logp_old_BT, inputs.logp_behav_BT)
    for name in ("logp_theta_BT", "logp_behav_BT", "logp_ref_BT", "mask_BT"):
        assert getattr(found, name) is not None
        assert torch.equal(getattr(found, name), getattr(inputs, name))
    assert torch.equal(found.anchored_BT("theta/old"), found.anchored_BT("theta/mu"))


def test_theta_over_old_is_theta_over_mu(make_cell, completed):
    engine, recomputed = (
        completed(make_cell(**WARM, **NOISY, proximal=name, **{"delay.S": 3}))[1:] for name in ("engine", "recompute")
    )
    for row in engine:
        assert [row[f"theta_old_{name}"] for name in STATISTICS] == [row[f"theta_mu_{name}"] for name in STATISTICS]
        assert row["old_mu_ratio_max"] == row["old_mu_ratio_mean"] == 1
        assert row["old_mu_k3_nats"] == 0
    # The forward that old does without stays on record: on the first step it is the one that recompute takes.
    for name in ("ratio_mean", "logratio_abs_mean", "logratio_sd_nats", "k1_nats", "k3_nats", "chi2"):
        assert engine[0][f"mismatch_{name}"] == recomputed[0][f"old_mu_{name}"], name
    assert engine[0]["mismatch_k3_nats"] > 1e-3
    assert engine[0]["theta_old_k3_nats"] > 1e-3
    assert recomputed[0]["theta_old_k3_nats"] == 0
    # The loss holds another ratio.
    assert engine[0]["grad_norm_raw"] != recomputed[0]["grad_norm_raw"]


@pytest.mark.parametrize("name", sorted(path.stem for path in CONF.glob("*.yaml")))
def test_theta_over_mu_is_the_product_of_the_other_two(name, make_cell, completed):
    cell = make_cell(**WARM, **NOISY, proximal=name, **{"delay.S": 3, "optimizer.grad_accum": 2})
    for row in completed(cell)[1:]:
        parts = row["theta_old_logratio_mean"] + row["old_mu_logratio_mean"]
        assert row["theta_mu_logratio_mean"] == pytest.approx(parts, abs=1e-6)
        assert row["decomposition_error_nats"] < 1e-5
        assert row["mismatch_var_share"] + row["lag_var_share"] == pytest.approx(1, abs=1e-6)
    assert row["lag_var_share"] != 0
    assert row["mismatch_k3_nats"] > 1e-3
    assert math.isfinite(row["loss"])


TOKEN_TIS = {"loss": "reinforce", "correction": ["token_tis"]}
OLD_MU = {**TOKEN_TIS, "correction.token_tis.anchor": "old/mu"}


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        ({**OLD_MU, "proximal": "engine"}, "old is what the sampler wrote down"),
        ({**OLD_MU, "proximal": "engine", "mismatch": ["logit_noise"]}, "old is what the sampler wrote down"),
        ({**OLD_MU, "proximal": "engine", "model.dtype": "bfloat16"}, "old is what the sampler wrote down"),
        (OLD_MU, "add an entry to mismatch"),
        ({**OLD_MU, "mismatch": ["parity"]}, r"With mismatch=\[parity\] old/mu is 1"),
        ({"proximal": "engine", "correction": ["token_tis"]}, "loss=grpo holds theta/mu"),
        (
            {"proximal": "engine", "correction": ["token_tis"], "correction.token_tis.anchor": "theta/old"},
            "loss=grpo holds theta/mu",
        ),
    ],
    ids=str,
)
def test_what_would_never_act_or_count_twice_is_refused(overrides, part, make_cell):
    with pytest.raises(OptionError, match=part) as caught:
        make_cell(**overrides)
    assert caught.value.field == "correction.token_tis.anchor"


@pytest.mark.parametrize(
    "overrides",
    [
        {**OLD_MU, "mismatch": ["logit_noise"]},
        {**OLD_MU, "mismatch": ["logp_noise"]},
        {**OLD_MU, "model.dtype": "bfloat16"},
        {**OLD_MU, "loss": "grpo", "mismatch": ["logit_noise"]},
        {**TOKEN_TIS, "proximal": "engine"},
        {**TOKEN_TIS, "proximal": "engine", "correction.token_tis.anchor": "theta/old"},
        {"proximal": "engine", "correction": ["token_mask"]},
    ],
    ids=str,
)
def test_what_acts_is_taken(overrides, make_cell):
    anchor = make_cell(**overrides).correction[0].anchor
    assert anchor == overrides.get("correction.token_tis.anchor", "theta/mu")
