"""SkyRL's options: an independent formula on other settings, the order of its masks, and what is refused."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from stalefront.choice import OptionError
from stalefront.frameworks import framework

SKYRL = framework("skyrl")
OFF = "off_policy_correction"


def held(log_ratio):
    """A ratio as SkyRL forms it: float32, log within ±20; torch's exp, since numpy's differs in the last bit."""
    return torch.tensor(log_ratio).float().clamp(-20, 20).exp().double().numpy()


def scaled(s, x):
    """Advantages with the reduction in them."""
    a, m = x["advantages"], x["mask"]
    kind, rows = s["loss_reduction"], len(x["mask"])
    length = np.maximum(m.sum(1, keepdims=True), 1)
    if kind == "token_mean":
        return a / m.sum()
    if kind == "sequence_mean":
        return a / (rows * length)
    if kind == "seq_mean_token_sum_norm":
        return a / (rows * s["max_seq_len"])
    parts = s["prompt_boundaries"] if kind == "prompt_mean" else [[i, i + 2] for i in range(0, rows, 2)]
    out = np.zeros_like(a)
    for first, after in parts:
        out[first:after] = a[first:after] / (max(m[first:after].sum(), 1) * len(parts))
    return out


def surrogate(s, x, a):
    """Loss a token."""
    theta, old, mu = x["logp_theta"], x["logp_old"], x["logp_mu"]
    kind, low, high = s["policy_loss_type"], 1 - s["eps_clip_low"], 1 + s["eps_clip_high"]
    if kind in ("regular", "dual_clip"):
        r = held(theta - old)
        loss = -np.minimum(r * a, np.clip(r, low, high) * a)
        return np.where(a < 0, np.minimum(loss, -3 * a), loss) if kind == "dual_clip" else loss
    if kind == "gspo":
        n = np.maximum(x["mask"].sum(1, keepdims=True), 1)
        r = np.exp(np.minimum(((theta - old) * x["mask"]).sum(1, keepdims=True) / n, 10))
        return -np.minimum(r * a, np.clip(r, low, high) * a)
    if kind == "sapo":
        tau = np.where(a > 0, 1.0, 1.05)
        return -4 / tau / (1 + np.exp(-tau * (np.exp(np.clip(theta - old, -20, 20)) - 1))) * a
    if kind == "cispo":
        return -np.clip(held(theta - old), 0, 5) * a * theta
    q = held(theta - mu)
    if kind == "rollout_is":
        return -q * ((q > low) & (q < high)) * a * theta
    shift = np.exp(theta) - np.exp(mu)
    return -q * a * ~(((a > 0) & (shift > 0.2)) | ((a < 0) & (shift < -0.2)))


def reference(s, x):
    """Loss and the mask that is left: outlier mask, token mask, weight, sequence mask."""
    p, m = s[OFF], x["mask"].copy()
    log_rho = x["logp_old"] - x["logp_mu"]
    rho, weight = held(log_rho), 1.0
    low, high = p["outlier_token_is_threshold_low"], p["outlier_token_is_threshold_high"]
    if low is not None:
        m = m * ~(((rho < low) | (rho > high)) & (m > 0)).any(1, keepdims=True)
    low, high = p["token_mask_is_threshold_low"], p["token_mask_is_threshold_high"]
    if low is not None:
        m = m * ((rho >= low) & (rho <= high))
    total = (log_rho * m).sum(1, keepdims=True)
    if p["tis_ratio_type"] == "token":
        weight = np.minimum(rho, p["token_tis_ratio_clip_high"])
    elif p["tis_ratio_type"] == "sequence":
        weight = np.minimum(held(total), p["sequence_tis_ratio_clip_high"])
    if p["sequence_mask_metric"] == "geometric":
        value = held(total / np.maximum(m.sum(1, keepdims=True), 1))
        m = m * ((value >= p["geo_mask_low"]) & (value <= p["geo_mask_high"]))
    elif p["sequence_mask_metric"] == "product":
        value = held(total)
        m = m * ((value >= p["product_mask_low"]) & (value <= p["product_mask_high"]))
    return (surrogate(s, x, scaled(s, x)) * weight * m).sum(), m


LOSSES = ("regular", "dual_clip", "gspo", "sapo", "cispo", "rollout_is", "dppo")
REDUCTIONS = ("token_mean", "sequence_mean", "seq_mean_token_sum_norm", "prompt_mean", "token_mean_legacy")
MASKS = ((None, None), ("token", "geometric"), ("sequence", "product"), ("token", None), (None, "product"))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("loss", LOSSES)
def test_other_settings(wild, verdict, loss, seed):
    weight, mask = MASKS[seed]
    wide = {"geo_mask_low": 0.8, "geo_mask_high": 1.3, "product_mask_low": 0.2, "product_mask_high": 4.0}
    outlier = (1e-4, 100.0) if seed % 2 else (None, None)
    token = (0.5, 3.0) if seed in (0, 1, 2) else (None, None)
    s = {"policy_loss_type": loss, "loss_reduction": REDUCTIONS[seed], "eps_clip_low": 0.3, "eps_clip_high": 0.4}
    s |= {"max_seq_len": 11, "prompt_boundaries": [[0, 3], [3, 6]], "micro_batch_size": 2}
    s[OFF] = {
        **{"tis_ratio_type": weight, "sequence_mask_metric": mask, **wide},
        **{"token_tis_ratio_clip_high": 1.7, "sequence_tis_ratio_clip_high": 3.0},
        **{"outlier_token_is_threshold_low": outlier[0], "outlier_token_is_threshold_high": outlier[1]},
        **{"token_mask_is_threshold_low": token[0], "token_mask_is_threshold_high": token[1]},
    }
    x = wild(seed)
    value, left = reference(s, x)
    outputs = {"loss": value, "loss_mask_after": left}
    assert verdict("skyrl__ppo_policy_loss__regular_none", s, x, outputs) == "equal"


def test_the_order_of_its_rules():
    given = {
        **{"tis_ratio_type": "token", "sequence_mask_metric": "geometric"},
        **{"outlier_token_is_threshold_low": 1e-4, "token_mask_is_threshold_low": 0.5},
        "token_mask_is_threshold_high": 5.0,
    }
    made = SKYRL.recipe({OFF: given})
    assert [one["choice"] for one in made.correction] == ["outlier_veto", "token_mask", "token_tis", "sequence_mask"]
    assert {one["anchor"] for one in made.correction} == {"old/mu"}
    assert made.correction[-1]["over"] == "kept"


def test_without_the_engines_log_probs_the_harness_has_no_correction(golden):
    from stalefront.parity import GoldenFile

    file = GoldenFile.read(golden("skyrl__ppo_policy_loss__regular_none_no_rollout_logprobs"))
    assert file.settings[OFF]["tis_ratio_type"] == "token"
    assert SKYRL.recipe(SKYRL.case(file).options).correction == ()


def test_double_counting_is_noted():
    made = SKYRL.recipe({"policy_loss_type": "dppo", OFF: {"tis_ratio_type": "token"}})
    assert "counts it again" in made.notes[0]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {OFF: {"token_mask_is_threshold_high": 5.0}},
            r"off_policy_correction\.token_mask_is_threshold_high = 5\.0 .* both bounds, or neither",
        ),
        (
            {"policy_loss_type": "cispo", "cispo": {"cispo_anchor": "rollout"}, OFF: {"tis_ratio_type": "token"}},
            r"off_policy_correction\.tis_ratio_type = 'token' is not possible\. Legal: null",
        ),
        ({"policy_loss_type": "clip_cov"}, r"Legal: one of regular, dual_clip"),
        ({"use_entropy_loss": True}, r"There is no entropy bonus here"),
        ({OFF: {"tis_ratio": "token"}}, r"Did you mean off_policy_correction\.tis_ratio_type"),
    ],
)
def test_what_it_refuses(options, text):
    with pytest.raises(OptionError, match=text):
        SKYRL.recipe(options)


def test_every_loss_and_reduction_makes_a_recipe():
    for loss, reduction in itertools.product((*LOSSES, "importance_sampling"), REDUCTIONS):
        SKYRL.recipe({"policy_loss_type": loss, "loss_reduction": reduction})
