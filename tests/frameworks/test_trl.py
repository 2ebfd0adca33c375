"""TRL's options: an independent formula on other settings, what is refused, and its traps."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from stalefront.choice import OptionError
from stalefront.frameworks import framework

TRL = framework("trl")
MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


def reference(s, x):
    """PPO's clip, off-policy mask, engine weight and reduction, in numpy."""
    theta, old, mu, advantage, m = (x[key] for key in ("logp_theta", "logp_old", "logp_mu", "advantages", "mask"))
    length = np.maximum(m.sum(1, keepdims=True), 1)
    log_ratio = theta - old
    if s["importance_sampling_level"] == "sequence":
        log_ratio = np.broadcast_to((log_ratio * m).sum(1, keepdims=True) / length, theta.shape)
    ratio = np.exp(log_ratio)
    high = s["epsilon"] if s["epsilon_high"] is None else s["epsilon_high"]
    loss = -np.minimum(ratio * advantage, np.clip(ratio, 1 - s["epsilon"], 1 + high) * advantage)
    if s["off_policy_mask_threshold"] is not None:
        drift = ((mu - theta) * m).sum(1, keepdims=True) / length
        loss = loss * ((advantage >= 0) | (drift <= s["off_policy_mask_threshold"]))
    mode = s["vllm_importance_sampling_mode"]
    if mode is not None:
        log_rho = (old - mu) * m
        rho = np.exp(log_rho.sum(1, keepdims=True) if mode.startswith("sequence") else log_rho)
        low, top = s["clip_min"] or 0.0, s["clip_max"]
        loss = loss * (np.clip(rho, low, top) if mode.endswith("truncate") else rho * (rho >= low) * (rho <= top))
    kind = s["loss_type"]
    if kind == "grpo":
        return ((loss * m).sum(1, keepdims=True) / length).mean()
    rows = len(m)
    return (loss * m).sum() / {"dapo": m.sum(), "bnpo": m.sum(), "dr_grpo": rows * 16, "luspo": rows}[kind]


@pytest.mark.parametrize(
    ("number", "kind", "level", "mode"),
    [
        (number, *choice)
        for number, choice in enumerate(
            itertools.product(("grpo", "dapo", "dr_grpo", "luspo"), ("token", "sequence"), (None, *MODES))
        )
    ],
)
def test_other_settings(wild, verdict, number, kind, level, mode):
    s = {"loss_type": kind, "importance_sampling_level": level, "vllm_importance_sampling_mode": mode}
    s |= {"epsilon": (0.1, 3e-4)[number % 2], "epsilon_high": (None, 0.3)[number % 2], "clip_max": 2.5}
    s |= {"clip_min": (None, 0.4)[number % 2], "off_policy_mask_threshold": (None, 0.2)[number // 2 % 2]}
    x = wild(number)
    assert verdict("trl__GRPOTrainer_compute_loss__dapo", s, x, {"loss": reference(s, x)}) == "equal"


def test_defaults_are_those_of_the_installed_trl():
    from dataclasses import fields

    from trl import GRPOConfig

    theirs = {field.name: field.default for field in fields(GRPOConfig)}
    ours = TRL.defaults()
    # The same number bounds an answer's length there.
    del ours["max_completion_length"]
    assert ours == {name: theirs[name] for name in ours}


def test_engine_options_act_with_an_engine_alone():
    assert TRL.recipe({}).correction == ()
    with_engine = TRL.recipe({"use_vllm": True})
    assert [one["choice"] for one in with_engine.correction] == ["sequence_mask"]
    assert with_engine.correction[0]["weight"] == "product"
    assert TRL.recipe({"use_vllm": True, "vllm_importance_sampling_correction": False}).correction == ()


@pytest.mark.parametrize(("engine", "anchor"), [(True, "theta/mu"), (False, "theta/old")])
def test_the_mask_compares_with_what_there_is(engine, anchor):
    made = TRL.recipe({"off_policy_mask_threshold": 0.5, "use_vllm": engine})
    assert made.correction[0]["anchor"] == anchor


def test_the_default_cap_of_cispo_is_noted():
    made = TRL.recipe({"loss_type": "cispo"})
    assert made.loss["epsilon_high"] == 0.2
    assert "shrinks every on-policy weight" in made.notes[0]
    assert TRL.recipe({"loss_type": "cispo", "epsilon_high": 5.0}).notes == ()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"loss_type": "ppo"}, r"framework\.loss_type = 'ppo' is not possible\. Legal: one of grpo, bnpo"),
        ({"entropy_coef": 0.1}, r"framework\.entropy_coef = 0\.1 .* There is no entropy bonus here"),
        (
            {"loss_type": "vespo", "importance_sampling_level": "sequence"},
            r"framework\.importance_sampling_level = 'sequence' is not possible\. Legal: token with loss_type=vespo",
        ),
        (
            {"loss_type": "vespo", "use_vllm": True},
            r"framework\.vllm_importance_sampling_mode = 'sequence_mask' .* token_truncate or token_mask",
        ),
        ({"epsilon_hgh": 0.3}, r"Did you mean epsilon_high"),
    ],
)
def test_what_it_refuses(options, text):
    with pytest.raises(OptionError, match=text):
        TRL.recipe(options)


def test_options_that_do_nothing_are_let_through():
    assert TRL.recipe({"top_entropy_quantile": 1.0, "entropy_coef": 0.0, "sync_ref_model": False}) == TRL.recipe({})
