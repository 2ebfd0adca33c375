"""prime-rl's options of August 2026: an independent formula on other settings, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from stalefront.choice import OptionError
from stalefront.frameworks import framework

PRIME_RL = framework("prime_rl")


def reference(s, x, *, ipo):
    theta, mu, a, m = (x[key] for key in ("logp_theta", "logp_mu", "advantages", "mask"))
    shift = np.exp(theta) - np.exp(mu)
    if ipo:
        out = np.abs(shift) > s["ipo_threshold"]
    else:
        out = np.where(a > 0, shift > s["dppo_mask_high"], shift < -s["dppo_mask_low"])
    pg = s["adv_tau"] * a * np.exp(theta - mu) * ~out
    return ((-pg + s["kl_tau"] * (theta - mu) ** 2) * m).sum() / s["rl_scale"]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("ipo", [False, True])
def test_other_settings(wild, verdict, ipo, seed):
    s = {"adv_tau": (1.0, 0.4)[seed % 2], "kl_tau": (0.0, 0.02)[seed // 2], "rl_scale": 31}
    s |= {"ipo_threshold": 0.25} if ipo else {"dppo_mask_low": 0.05, "dppo_mask_high": 0.15}
    x = wild(seed)
    x["logp_mu"] = np.maximum(x["logp_mu"], x["logp_theta"] - 3)
    name = "prime_rl__ipo_loss_fn__thr01_kl1e-3" if ipo else "prime_rl__default_loss_fn__dppo02_kl1e-3"
    assert verdict(name, s, x, {"loss": reference(s, x, ipo=ipo)}) == "equal"


def test_defaults():
    made = PRIME_RL.recipe({})
    fields = {"choice": "dppo", "kl_tau": 0.001, "delta_low": 0.2, "anchor": "theta/mu", "cap": None}
    assert made.loss.items() >= fields.items()
    assert made.reduction["choice"] == "token_mean"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"adv_tau": 0.5}, r"framework\.adv_tau = 0\.5 .* multiply optimizer\.lr"),
        ({"adv_tau": 0.0, "rl_scale": 10.0}, r"a number above 0"),
        ({"rl_scale": 0.0}, r"a number above 0, or null"),
        ({"teacher_tau": 0.1}, r"There is no teacher here"),
        ({"type": "icepop"}, r"Legal: one of default, ipo"),
    ],
)
def test_what_it_refuses(options, text):
    with pytest.raises(OptionError, match=text):
        PRIME_RL.recipe(options)
