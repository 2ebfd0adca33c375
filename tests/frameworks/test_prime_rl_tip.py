"""prime-rl's options of September 2026: an independent formula on other settings, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from stalefront.choice import OptionError
from stalefront.frameworks import framework

TIP = framework("prime_rl_tip")


def reference(kind, s, x):
    theta, mu, a, m = (x[key] for key in ("logp_theta", "logp_mu", "advantages", "mask"))
    a = s["adv_tau"] * a
    q = np.exp(theta - mu)
    capped = np.minimum(q, s.get("max_importance_ratio", np.inf))
    if kind == "IPOLoss":
        loss = -a * capped * (np.abs(np.exp(theta) - np.exp(mu)) <= s["eps"])
    elif kind == "IcePopLoss":
        loss = -a * q * ((q >= s["ratio_low"]) & (q <= s["ratio_high"]))
    elif kind == "PPOLoss":
        loss = -np.minimum(a * capped, a * np.clip(capped, s["ratio_low"], s["ratio_high"]))
    else:
        loss = -np.clip(q, s["ratio_low"], s["ratio_high"]) * a * theta
    return (loss * m).sum() / s["rl_scale"]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("IPOLoss__eps03_cap2", {"eps": 0.2, "max_importance_ratio": 1.5}),
        ("IcePopLoss__icepop_02_5", {"ratio_low": 0.5, "ratio_high": 1.6}),
        ("PPOLoss__ppo_08_12_cap3", {"ratio_low": 0.7, "ratio_high": 1.4, "max_importance_ratio": 2.0}),
        ("CISPOLoss__cispo_0_5", {"ratio_low": 0.3, "ratio_high": 1.8}),
    ],
)
def test_other_settings(wild, verdict, name, own, seed):
    s = {"adv_tau": (1.0, 0.4, 2.0)[seed], "rl_scale": 31, **own}
    x = wild(seed)
    loss = reference(name.split("__")[0], s, x)
    assert verdict(f"prime_rl_tip__{name}", s, x, {"loss": loss}) == "equal"


def test_bounds_are_the_types_own_where_none_are_given():
    assert TIP.recipe({"type": "icepop"}).loss.items() >= {"low": 0.2, "high": 5.0}.items()
    assert TIP.recipe({"type": "cispo"}).loss.items() >= {"floor": 0.0, "epsilon_high": 5.0}.items()
    made = TIP.recipe({"type": "ppo", "ratio_high": 1.5}).loss
    assert (made["epsilon"], made["epsilon_high"]) == (pytest.approx(0.2), 0.5)
    assert TIP.recipe({}).loss.items() >= {"choice": "ipo", "epsilon": 0.3, "value_cap": 1e4}.items()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"score_centering": True}, r"log-probs of every token that could have been sampled"),
        ({"type": "default"}, r"Legal: one of ipo, icepop, ppo, cispo"),
        ({"adv_tau": 2.0}, r"1 while rl_scale is null"),
    ],
)
def test_what_it_refuses(options, text):
    with pytest.raises(OptionError, match=text):
        TIP.recipe(options)
