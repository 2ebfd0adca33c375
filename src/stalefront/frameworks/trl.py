"""TRL: `GRPOTrainer._compute_loss` and the engine's importance ratio of `_generate_and_score_completions`."""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING, Any, Literal

from stalefront.frameworks import Framework, Option, Unshared, refuse
from stalefront.recipe import Entry, Recipe, entry, recipe

if TYPE_CHECKING:
    from torch import Tensor

    from stalefront.parity import Case, Evaluated, GoldenFile

MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
REDUCTIONS = {
    **{"grpo": "sequence_mean", "bnpo": "token_mean", "dapo": "token_mean"},
    **{"dr_grpo": "constant", "luspo": "sequence_sum"},
}

OPTIONS = {
    "loss_type": Option(Literal["grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo"]),
    "importance_sampling_level": Option(Literal["token", "sequence"]),
    "epsilon": Option(float),
    "epsilon_high": Option(float | None),
    "delta": Option(float | None),
    "beta": Option(float),
    "use_bias_correction_kl": Option(bool),
    "scale_rewards": Option(Literal["group", "batch", "none"]),
    "sapo_temperature_pos": Option(float),
    "sapo_temperature_neg": Option(float),
    "vespo_k_pos": Option(float),
    "vespo_lambda_pos": Option(float),
    "vespo_k_neg": Option(float),
    "vespo_lambda_neg": Option(float),
    "max_completion_length": Option(int | None),
    "use_vllm": Option(bool),
    "vllm_importance_sampling_correction": Option(bool),
    "vllm_importance_sampling_mode": Option(
        Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
    ),
    "vllm_importance_sampling_clip_max": Option(float | None),
    "vllm_importance_sampling_clip_min": Option(float | None),
    "off_policy_mask_threshold": Option(float | None),
}

NOT_SHARED = {
    "top_entropy_quantile": Unshared(
        "No loss here leaves out tokens by their entropy; set it to 1.", off=(None, 1.0, 1)
    ),
    "mask_truncated_completions": Unshared("Truncated answers stay in the loss here; set it to false."),
    "entropy_coef": Unshared("There is no entropy bonus here; set it to 0.", off=(None, 0, 0.0)),
    "use_adaptive_entropy": Unshared("There is no entropy bonus here; set it to false."),
    "sync_ref_model": Unshared("The reference policy stays at the initial weights here; set it to false."),
    "vllm_importance_sampling_cap": Unshared("It is TRL's old name; use vllm_importance_sampling_clip_max."),
}

QUIRKS = (
    "A log-prob that the engine did not report is NaN and gets ratio 1; here every token has one, and NaN stays NaN.",
    "With gradient accumulation dapo, cispo and vespo divide by the tokens of the whole generation batch; here a "
    "learner step's tokens count.",
)


def compose(o: dict[str, Any]) -> Recipe:
    """The loss of `loss_type`, then OPSM, then the engine's weight; rejection leaves the divisors alone."""
    _check(o)
    corrected = o["use_vllm"] and o["vllm_importance_sampling_correction"] and o["loss_type"] != "vespo"
    return recipe(
        _loss(o), correction=[*_mask(o), *([_weight(o)] if corrected else [])], reduction=_reduction(o), notes=_notes(o)
    )


def _check(o: dict[str, Any]) -> None:
    kind, level = o["loss_type"], o["importance_sampling_level"]
    if level == "sequence" and kind in ("cispo", "vespo"):
        way_out = "TRL's own documentation has the token level for it."
        raise refuse("importance_sampling_level", level, f"token with loss_type={kind}", way_out)
    if kind == "vespo" and o["use_vllm"] and o["vllm_importance_sampling_correction"]:
        legal = "token_truncate or token_mask with loss_type=vespo"
        if o["vllm_importance_sampling_mode"].startswith("sequence"):
            raise refuse("vllm_importance_sampling_mode", o["vllm_importance_sampling_mode"], legal)


def _loss(o: dict[str, Any]) -> Entry:
    kind, high = o["loss_type"], o["epsilon_high"]
    shared = {key: o[key] for key in ("beta", "use_bias_correction_kl", "scale_rewards")}
    if kind == "cispo":
        return entry("loss", "cispo", epsilon_high=o["epsilon"] if high is None else high, **shared)
    if kind == "sapo":
        return entry(
            "loss",
            "sapo",
            tau_pos=_single(o["sapo_temperature_pos"]),
            tau_neg=_single(o["sapo_temperature_neg"]),
            level=o["importance_sampling_level"],
            **shared,
        )
    if kind == "vespo":
        named = {name: _single(o[f"vespo_{name}"]) for name in ("k_pos", "lambda_pos", "k_neg", "lambda_neg")}
        return entry("loss", "vespo", **named, **_mismatch(o), **shared)
    clip = {key: o[key] for key in ("epsilon", "epsilon_high", "delta")}
    if o["importance_sampling_level"] == "sequence":
        return entry("loss", "luspo" if kind == "luspo" else "gspo", **clip, **shared)
    return entry("loss", "grpo" if kind == "luspo" else kind, **clip, **shared)


def _single(value: float) -> float:
    """`value` in float32, in which TRL chooses between two numbers by the sign of an advantage."""
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded


def _mismatch(o: dict[str, Any]) -> dict[str, Any]:
    """VESPO takes the engine's token ratios into its sequence weight, truncated or masked, not as a factor."""
    if not (o["use_vllm"] and o["vllm_importance_sampling_correction"]):
        return {"mismatch": "none"}
    low, high = o["vllm_importance_sampling_clip_min"], o["vllm_importance_sampling_clip_max"]
    how = o["vllm_importance_sampling_mode"].removeprefix("token_")
    return {"mismatch": how, "mismatch_low": low, "mismatch_high": high}


def _mask(o: dict[str, Any]) -> list[Entry]:
    if o["off_policy_mask_threshold"] is None:
        return []
    anchor = "theta/mu" if o["use_vllm"] else "theta/old"
    return [entry("correction", "opsm", anchor=anchor, delta=o["off_policy_mask_threshold"], sign="token")]


def _weight(o: dict[str, Any]) -> Entry:
    mode = o["vllm_importance_sampling_mode"]
    low, high = o["vllm_importance_sampling_clip_min"], o["vllm_importance_sampling_clip_max"]
    if mode.endswith("truncate"):
        stem = "token_tis" if mode.startswith("token") else "sequence_tis"
        floor, cap = 0.0 if low is None else low, math.inf if high is None else high
        return entry("correction", stem, anchor="old/mu", floor=floor, cap=cap)
    if mode == "token_mask":
        return entry("correction", "icepop", anchor="old/mu", low=low, high=high)
    product = {"statistic": "ratio", "aggregate": "sum", "weight": "product"}
    return entry("correction", "sequence_mask", anchor="old/mu", low=low, high=high, **product)


def _reduction(o: dict[str, Any]) -> Entry:
    kind = o["loss_type"]
    if kind == "dr_grpo":
        return entry("reduction", "constant", fixed_length=o["max_completion_length"])
    if kind == "luspo" or o["importance_sampling_level"] == "sequence":
        return entry("reduction", REDUCTIONS.get(kind, "own"))
    return entry("reduction", "own")


def _notes(o: dict[str, Any]) -> list[str]:
    capped = o["loss_type"] == "cispo" and (o["epsilon"] if o["epsilon_high"] is None else o["epsilon_high"]) < 1
    return ["epsilon_high is cispo's largest weight itself: below 1 it shrinks every on-policy weight."] * capped


def case(file: GoldenFile) -> Case:
    """The harness attaches the engine's log-probs to every batch; a mode of null is no correction."""
    from stalefront.parity import Case, old_is_mu

    s = dict(file.settings)
    mode = s.pop("vllm_importance_sampling_mode", None)
    names = {"clip_min": "vllm_importance_sampling_clip_min", "clip_max": "vllm_importance_sampling_clip_max"}
    options = {names.get(key, key): value for key, value in s.items() if names.get(key, key) in OPTIONS}
    options |= {"use_vllm": True, "vllm_importance_sampling_correction": mode is not None}
    if mode is not None:
        options["vllm_importance_sampling_mode"] = mode
    old = old_is_mu if s.get("old") == "mu" else None
    compare = {name: compared for name, compared in COMPARED.items() if file.outputs.get(name) is not None}
    if options.get("loss_type") == "vespo":
        compare.pop("importance_sampling_ratio", None)  # it is inside the loss, and no correction
    return Case(options, inputs=old, compare=compare, max_completion_length=options.get("max_completion_length"))


def _kept(found: Evaluated) -> Tensor:
    """Its mask against off-policy sequences, a column a token."""
    from stalefront.parity import alone

    return alone(found, only=["opsm"]).keep_BT


def _ratio(found: Evaluated) -> Tensor:
    """Its importance ratio: 0 where its mode rejects."""
    from stalefront.parity import alone

    weights = alone(found, without=["opsm"])
    return weights.weight_BT * weights.keep_BT


COMPARED = {"off_policy_mask": _kept, "importance_sampling_ratio": _ratio}


FRAMEWORK = Framework(
    "trl",
    "huggingface/trl, PyPI 1.16.0",
    OPTIONS,
    compose,
    case,
    not_shared=NOT_SHARED,
    quirks=QUIRKS,
)
