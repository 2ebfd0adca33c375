"""open-instruct's options: an independent formula on other settings, and what is refused."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from stalefront.choice import OptionError
from stalefront.frameworks import framework

OPEN_INSTRUCT = framework("open_instruct")


def reference(s, x):
    """Loss and weights: ratio clamped, or masked by itself, by its sequence's mean, or by total variation."""
    theta, old, mu, a = (x[key] for key in ("logp_theta", "logp_old", "logp_mu", "advantages"))
    m = x["mask"] > 0
    n = np.maximum(m.sum(1, keepdims=True), 1)
    log_rho = np.where(m, np.clip(old - mu, -10, 10), 0.0)
    rho = np.exp(log_rho)
    weight = np.exp(np.broadcast_to(log_rho.sum(1, keepdims=True) / n, rho.shape)) if s["sequence"] else rho
    low, high = s["rho_mask_lower_bound"], s["rho_mask_upper_bound"]
    value = weight
    if s["tv"]:
        value = np.broadcast_to((np.abs(rho - 1) * m).sum(1, keepdims=True) / n, rho.shape)
    out = ((value < low) if low > 0 else False) | ((value > high) if high > 0 else np.zeros_like(m))
    if s["tv"]:
        out = out & (np.sign(log_rho) * a > 0)
    if s["rho_clamp_lower_bound"] > 0:
        weight = np.maximum(weight, s["rho_clamp_lower_bound"])
    if s["rho_clamp_upper_bound"] > 0:
        weight = np.minimum(weight, s["rho_clamp_upper_bound"])
    weight = np.where(m & ~out, weight, 0.0)
    r = np.exp(theta - old)
    if s["loss_fn"] == "cispo":
        loss = -a * np.minimum(r, 1 + s["clip_higher"]) * theta
    else:
        loss = np.maximum(-a * r, -a * np.clip(r, 1 - s["clip_lower"], 1 + s["clip_higher"]))
    return (np.where(m, loss * weight, 0.0)).sum() / m.sum(), weight


@pytest.mark.parametrize(
    ("number", "setting"),
    list(enumerate(itertools.product(("dapo", "cispo"), (False, True), (False, True), ((0, 0), (0.5, 1.6), (0, 1.2))))),
    ids=str,
)
def test_other_settings(wild, verdict, number, setting):
    loss, sequence, tv, (low, high) = setting
    s = {"loss_fn": loss, "clip_lower": 0.15, "clip_higher": 0.35, "use_rho_correction": True}
    s |= {"rho_mask_sequence_level": sequence, "rho_mask_tv_divergence": tv}
    s |= {"rho_mask_lower_bound": float(low), "rho_mask_upper_bound": float(high)}
    s |= {"rho_clamp_lower_bound": (0.0, 0.3)[number % 2], "rho_clamp_upper_bound": (2.0, 0.0)[number // 3 % 2]}
    x = wild(number)
    value, weight = reference({**s, "sequence": sequence, "tv": tv}, x)
    outputs = {"loss": value, "rho_weights": weight}
    assert verdict("open_instruct__rho_correction_grpo_loss__dapo_clamp2", s, x, outputs) == "equal"


def test_the_engines_log_probs_as_old_ones_need_no_weight():
    made = OPEN_INSTRUCT.recipe({"use_vllm_logprobs": True})
    assert made.correction == ()
    assert made.loss["anchor"] == "theta/mu"


def test_a_number_as_denominator():
    made = OPEN_INSTRUCT.recipe({"loss_denominator": 4096})
    assert (made.reduction["choice"], made.reduction["divisor"]) == ("token_sum", 4096.0)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"loss_denominator": "batch"}, r"framework\.loss_denominator = 'batch' .* token, or a number above 0"),
        ({"loss_denominator": 0}, r"token, or a number above 0"),
        ({"kl_estimator": 3}, r"framework\.kl_estimator = 3 .* one of 2"),
        ({"truncated_importance_sampling_ratio_cap": 2.0}, r"use rho_clamp_upper_bound"),
        ({"rho_clamp_upper_bound": 0.5}, r"cap = 0\.5"),
    ],
)
def test_what_it_refuses(options, text):
    with pytest.raises(OptionError, match=text):
        OPEN_INSTRUCT.recipe(options)
