"""OpenRLHF's options: an independent formula on other settings, and what is refused."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from stalefront.choice import OptionError
from stalefront.frameworks import framework

OPENRLHF = framework("openrlhf")


def reference(s, x):
    theta, old, mu, a, m = (x[key] for key in ("logp_theta", "logp_old", "logp_mu", "advantages", "mask"))
    n = m.sum(1, keepdims=True)
    (low, high), gspo = s["vllm_is_truncated_threshold"], s["policy_loss_type"] == "gspo"
    on = s["enable_vllm_is_correction"]
    r = np.exp(np.clip(theta - old, -20, 20))
    if gspo:
        r = np.exp(((theta - (mu if on else old)) * m).sum(1, keepdims=True) / np.maximum(n, 1)) * m
    surrogate = np.minimum(r * a, np.clip(r, 1 - s["clip_eps_low"], 1 + s["clip_eps_high"]) * a)
    if s["dual_clip"] is not None:
        surrogate = np.where(a < 0, np.maximum(surrogate, s["dual_clip"] * a), surrogate)
    loss, rho = -surrogate, np.exp(old - mu)
    if on and not gspo:
        value = np.exp(((old - mu) * m).sum(1, keepdims=True) / np.maximum(n, 1))
        kind = s["vllm_is_correction_type"]
        band = {"icepop": (rho >= low) & (rho <= high), "seq-mask-tis": (value >= low) & (value <= high)}
        loss = loss * (np.clip(rho, low, high) if kind == "tis" else rho * band[kind])
    if s["token_level_loss"] and not gspo:
        return (loss * m).sum() / m.sum()
    return ((loss * m).sum(1) / (m.sum(1) + 1e-8)).sum() / (m.sum(1) > 0).sum()


@pytest.mark.parametrize(
    ("number", "kind", "on", "what", "tokens"),
    [
        (i, *v)
        for i, v in enumerate(
            itertools.product(("ppo", "gspo"), (False, True), ("tis", "icepop", "seq-mask-tis"), (True, False))
        )
    ],
)
def test_other_settings(wild, verdict, number, kind, on, what, tokens):
    s = {"policy_loss_type": kind, "enable_vllm_is_correction": on, "vllm_is_correction_type": what}
    s |= {"token_level_loss": tokens, "vllm_is_truncated_threshold": [0.6, 2.5], "dual_clip": (None, 2.0)[number % 2]}
    s |= {"clip_eps_low": 0.1, "clip_eps_high": 0.35}
    x = wild(number)
    x["logp_mu"] = np.maximum(x["logp_mu"], x["logp_old"] - 3)
    assert verdict("openrlhf__PolicyLoss__ppo_no_is", s, x, {"loss": reference(s, x)}) == "equal"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"vllm_is_truncated_threshold": 2.0}, r"framework\.vllm_is_truncated_threshold = 2\.0 .* a list"),
        ({"vllm_is_correction_type": "mis"}, r"Legal: one of tis, icepop, seq-mask-tis"),
        ({"dual_clip": 0.5}, r"dual_clip = 0\.5"),
        ({"use_kl_loss": True}, r"use loss\.beta"),
    ],
)
def test_what_it_refuses(options, text):
    with pytest.raises(OptionError, match=text):
        OPENRLHF.recipe(options)
