"""NeMo-RL's options: an independent formula on other settings, and what is refused."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from stalefront.choice import OptionError
from stalefront.frameworks import framework

NEMO = framework("nemo_rl")
TIS = "truncated_importance_sampling_type"
HIGH = "truncated_importance_sampling_ratio"
LOW = "truncated_importance_sampling_ratio_min"
IS = "use_importance_sampling_correction"
SEQUENCE = "sequence_level_importance_ratios"


def mean(value, m, count=None):
    """A masked mean over a sequence, or one with a given count; 1e-8 is added to what is divided by."""
    return (value * m).sum(-1) / ((m.sum(-1) if count is None else count) + 1e-8)


def reference(s, x):
    theta, old, mu, a, m = (x[key] for key in ("logp_theta", "logp_old", "logp_mu", "advantages", "mask"))
    r, low, high = np.exp(theta - old), 1 - s["ratio_clip_min"], 1 + s["ratio_clip_max"]
    if s[SEQUENCE]:
        r = np.broadcast_to(np.exp(mean(theta - old, m))[:, None], theta.shape)
    if s["disable_ppo_ratio"]:
        loss = -a * theta
    elif s["use_cispo"]:
        loss = -a * np.clip(r, low, high) * theta
    else:
        loss = np.maximum(-a * r, -a * np.clip(r, low, high))
    if s["ratio_clip_c"] is not None:
        loss = np.where(a < 0, np.minimum(loss, -a * s["ratio_clip_c"]), loss)
    w = np.exp(((old - mu) * m).sum(1, keepdims=True)) if s[SEQUENCE] else np.exp(old - mu)
    if s[TIS] == "tis":
        w = np.clip(w, s[LOW] or 0.0, s[HIGH])
    elif s[TIS] == "icepop":
        w = w * ((w >= s[LOW]) & (w <= s[HIGH]))
    elif s[TIS] == "seq-mask-tis":
        value = np.exp(mean(old - mu, m))[:, None]
        w = w * ((value >= s[LOW]) & (value <= s[HIGH]))
    loss = loss * (w if s[IS] else 1.0)
    if s["token_level_loss"]:
        return (loss * m).sum() / (m.sum() + 1e-8)
    filled = m.any(1)
    return (mean(loss, m) * filled).sum() / (filled.sum() + 1e-8)


KINDS = (
    {},
    {"use_cispo": True},
    {"disable_ppo_ratio": True},
    {"ratio_clip_c": 2.0},
    {"token_level_loss": False},
    {"token_level_loss": False, SEQUENCE: True},
)
TYPES = ((False, None), (True, None), (True, "tis"), (True, "icepop"), (True, "seq-mask-tis"))


# A sequence's product is not masked by its geometric mean: NeMo-RL refuses it.
SETTINGS = [(k, *t) for k, t in itertools.product(KINDS, TYPES) if not (SEQUENCE in k and "seq-mask-tis" in t)]


@pytest.mark.parametrize(("number", "kind", "on", "what"), [(i, *setting) for i, setting in enumerate(SETTINGS)])
def test_other_settings(wild, verdict, number, kind, on, what):
    s = {
        "disable_ppo_ratio": False,
        "token_level_loss": True,
        SEQUENCE: False,
        "use_cispo": False,
        "ratio_clip_c": None,
    }
    s |= {"ratio_clip_min": 0.15, "ratio_clip_max": 0.3, IS: on, TIS: what, HIGH: what and 1.7, LOW: what and 0.4}
    s |= kind
    if what == "tis" and number % 2:
        s[LOW] = None
    x = wild(number)
    # Without a bound the weight of e^25 would leave nothing else to be seen.
    x["logp_mu"] = np.maximum(x["logp_mu"], x["logp_old"] - 3)
    assert verdict("nemo_rl__ClippedPGLossFn__tis2", s, x, {"loss": reference(s, x)}) == "equal"


def test_its_default_has_a_kl_term():
    made = NEMO.recipe({})
    assert (made.loss["choice"], made.loss["beta"], made.correction) == ("grpo", 0.01, ())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({SEQUENCE: True}, r"token_level_loss = True .* false with sequence_level_importance_ratios"),
        ({TIS: "tis", HIGH: 2.0}, r"Set framework\.use_importance_sampling_correction=true"),
        ({IS: True, HIGH: 2.0}, rf"{HIGH} = 2\.0 .* null without {TIS}"),
        ({IS: True, TIS: "icepop", HIGH: 5.0}, rf"{LOW} = None .* a number with {TIS}=icepop"),
        ({"use_cispo": True, "ratio_clip_c": 3.0}, r"ratio_clip_c = 3\.0 .* null with use_cispo"),
        ({"use_cispo": True, "disable_ppo_ratio": True}, r"disable_ppo_ratio = True .* false with use_cispo"),
        ({"force_on_policy_ratio": True}, r"use disable_ppo_ratio"),
        ({"kl_input_clamp_value": 5.0}, r"The KL term is not clamped here"),
    ],
)
def test_what_it_refuses(options, text):
    with pytest.raises(OptionError, match=text):
        NEMO.recipe(options)
