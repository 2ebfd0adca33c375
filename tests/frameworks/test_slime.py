"""slime's options: the weights of its mis.py by an independent formula, and what is refused."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from stalefront.choice import OptionError
from stalefront.frameworks import framework

SLIME = framework("slime")
MIS = "examples.train_infer_mismatch_helper.mis.compute_mis_weights_with_cp"


def reference(s, x):
    """Weights and masks of every sequence, then the batch's normalisation."""
    low = 1 / s["tis_upper_bound"] if s["tis_lower_bound"] is None else s["tis_lower_bound"]
    high = s["tis_upper_bound"]
    rs_low = low if s["rs_lower_bound"] is None else s["rs_lower_bound"]
    rs_high = high if s["rs_upper_bound"] is None else s["rs_upper_bound"]
    weights, masks = [], []
    for l, m in zip(x["logp_old"] - x["logp_mu"], x["mask"], strict=True):  # noqa: E741
        logs = {"token": l, "sequence": (l * m).sum() + 0 * l, "geometric": (l * m).sum() / max(m.sum(), 1) + 0 * l}
        w = np.exp(np.clip(logs[s["tis_level"]], -20, 20))
        left = m.copy()
        if s["tis_mode"] == "mask":
            left = left * ((w >= low) & (w <= high))
        else:
            w = np.clip(w, 0 if s["tis_mode"] == "truncate" else low, high)
        if s["use_rs"]:
            v = np.exp(np.clip(logs[s["rs_level"]], -20, 20))
            left = left * ((v >= rs_low) & (v <= rs_high))
            if s["rs_veto_threshold"] is not None:
                left = left * (not ((l < np.log(s["rs_veto_threshold"])) & (m > 0)).any())
        weights.append(w * m)
        masks.append(left)
    weights, masks = np.array(weights), np.array(masks)
    if s["tis_batch_normalize"]:
        m = x["mask"]
        mean = weights.sum() / m.sum()
        if s["tis_level"] == "sequence":
            mean = (weights.sum(1) / np.maximum(m.sum(1), 1)).mean()
        weights = weights / mean
    return weights, masks


LEVELS = ("token", "sequence", "geometric")
SETTINGS = [
    (level, rs, mode, norm)
    for level, rs, mode, norm in itertools.product(LEVELS, (None, *LEVELS), ("truncate", "clip", "mask"), (False, True))
    if not (norm and level == "geometric") and not (mode == "mask" and {level, rs} == {"sequence", "geometric"})
]


@pytest.mark.parametrize(("number", "setting"), list(enumerate(SETTINGS)), ids=str)
def test_other_settings_of_mis(wild, verdict, number, setting):
    level, rs, mode, norm = setting
    s = {"use_tis": True, "tis_level": level, "tis_mode": mode, "tis_batch_normalize": norm, "tis_upper_bound": 1.8}
    s |= {"use_rs": rs is not None, "rs_level": rs or "token", "tis_lower_bound": (None, 0.4)[number % 2]}
    s |= {"rs_lower_bound": (0.3, None)[number % 2], "rs_upper_bound": (None, 3.0)[number // 2 % 2]}
    s |= {"rs_veto_threshold": (1e-4, None)[number // 3 % 2]}
    x = wild(number)
    weights, masks = reference(s, x)
    outputs = {"weights": weights, "modified_masks": masks}
    assert verdict("slime__mis_compute_mis_weights__yaml_default", s, x, outputs) == "equal"


def test_opsm_tests_the_sign_of_a_token(wild, verdict):
    x = wild(2)
    assert (np.sign(x["advantages"][4]) != np.sign(x["advantages"][4, 0])).any()
    n = np.maximum(x["mask"].sum(1, keepdims=True), 1)
    drift = ((x["logp_old"] - x["logp_theta"]) * x["mask"]).sum(1, keepdims=True) / n
    keep = 1 - ((x["advantages"] < 0) & (drift > -0.5)) * x["mask"]
    settings = {"opsm_delta": 0.0}
    outputs = {"opsm_mask": 1 - ((x["advantages"] < 0) & (drift > 0)) * x["mask"]}
    assert not np.array_equal(keep, outputs["opsm_mask"])
    assert verdict("slime__compute_opsm_mask__opsm_1e-4", settings, x, outputs) == "equal"


def test_one_band_where_mode_and_rejection_look_at_the_same():
    given = {"use_tis": True, "custom_tis_function_path": MIS, "tis_mode": "mask", "rs_upper_bound": 1.5}
    made = SLIME.recipe(given)
    stems = [one["choice"] for one in made.correction]
    assert stems == ["token_tis", "normalize", "token_mask", "outlier_veto"]
    assert (made.correction[2]["low"], made.correction[2]["high"]) == (0.5, 1.5)


def test_cispo_shares_the_clip_widths():
    made = SLIME.recipe({"advantage_estimator": "cispo", "eps_clip": 1.0, "eps_clip_high": 4.0})
    assert (made.loss["floor"], made.loss["epsilon_high"]) == (0.0, 5.0)
    assert SLIME.recipe({"advantage_estimator": "cispo"}).loss["epsilon_high"] == 1.2


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"use_tis": True, "use_rollout_logprobs": True}, r"use_tis = True .* false with use_rollout_logprobs"),
        ({"use_tis": True, "custom_tis_function_path": "mine.weights"}, r"mine\.weights.* not read here"),
        (
            {"use_tis": True, "custom_tis_function_path": MIS, "tis_level": "geometric"},
            r"tis_batch_normalize = True .* false with tis_level=geometric",
        ),
        (
            {
                **{"use_tis": True, "custom_tis_function_path": MIS, "tis_level": "sequence", "tis_mode": "mask"},
                "rs_level": "geometric",
            },
            r"rs_level = 'geometric' .* token or sequence with tis_mode=mask",
        ),
        ({"use_kl_loss": True, "kl_loss_coef": 0.1}, r"kl_loss_type = 'k1' .* k3 or low_var_kl"),
        ({"kl_coef": 0.1}, r"use use_kl_loss"),
    ],
)
def test_what_it_refuses(options, text):
    with pytest.raises(OptionError, match=text):
        SLIME.recipe(options)
