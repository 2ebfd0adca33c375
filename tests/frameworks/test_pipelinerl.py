"""PipelineRL's options: an independent formula on other settings, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from stalefront.choice import OptionError
from stalefront.frameworks import framework

PIPELINERL = framework("pipelinerl")


def reference(s, x):
    theta, mu, a, m = (x[key] for key in ("logp_theta", "logp_mu", "advantages", "mask"))
    low, high = 1 - s["epsilon_low"], 1 + s["epsilon_high"]
    q = np.exp(theta - mu)
    if s["policy_loss"] == "reinforce":
        value = theta * a * np.clip(q, 0, high)
    else:
        if s["policy_loss"] == "gspo":
            n = np.maximum(m.sum(1, keepdims=True), 1)
            q = np.exp(((theta - mu) * m).sum(1, keepdims=True) / n)
            a = (a * m).sum(1, keepdims=True) / n
        value = np.minimum(q * a, np.clip(q, low, high) * a)
    return -(value * m).sum() / (24 if s["group_normalization"] else s["batch_size"])


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("loss", ["reinforce", "ppo", "gspo"])
def test_other_settings(wild, verdict, loss, seed):
    s = {"policy_loss": loss, "epsilon_low": 0.1, "epsilon_high": 0.3, "batch_size": (6, 10)[seed % 2]}
    s["group_normalization"] = seed > 1
    x = wild(seed)
    x["logp_mu"] = np.maximum(x["logp_mu"], x["logp_theta"] - 3)
    assert verdict("pipelinerl__rl_step__ppo_02", s, x, {"loss": reference(s, x)}) == "equal"


def test_its_base_configuration_caps_just_above_one():
    made = PIPELINERL.recipe({})
    assert (made.loss["choice"], made.loss["cap"], made.reduction["choice"]) == (
        "reinforce_clamp",
        1.02,
        "sequence_sum",
    )


def test_a_group_normalisation_without_a_number_is_noted():
    made = PIPELINERL.recipe({"group_normalization": True})
    assert made.reduction["choice"] == "prompt_mean"
    assert "its loss is larger" in made.notes[0]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"kl_coef": 0.1}, r"framework\.final_kl_coef = 0\.0 .* kl_coef=0\.1"),
        ({"group_tokens": 12.0}, r"null without group_normalization"),
        ({"relu_log_p_weights": True}, r"Negative advantages stay here"),
        ({"use_advantages": False}, r"Losses take advantages here"),
        ({"batch_size": -1}, r"a number of at least 0"),
    ],
)
def test_what_it_refuses(options, text):
    with pytest.raises(OptionError, match=text):
        PIPELINERL.recipe(options)
