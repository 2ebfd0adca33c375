"""open-instruct: `compute_rho_correction` and `compute_grpo_loss` of `grpo_utils.py`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

from stalefront.frameworks import Framework, Option, Unshared, refuse
from stalefront.recipe import Entry, Recipe, entry, recipe

if TYPE_CHECKING:
    from stalefront.parity import Case, GoldenFile

# Log-ratios old/engine of tokens are held within ±10.
CLAMP = 10.0

OPTIONS = {
    "loss_fn": Option(Literal["dapo", "cispo"]),
    "clip_lower": Option(float),
    "clip_higher": Option(float),
    "beta": Option(float),
    "kl_estimator": Option(Literal[2]),
    "loss_denominator": Option(Any),
    "use_vllm_logprobs": Option(bool),
    "use_rho_correction": Option(bool),
    "rho_clamp_lower_bound": Option(float),
    "rho_clamp_upper_bound": Option(float),
    "rho_mask_lower_bound": Option(float),
    "rho_mask_upper_bound": Option(float),
    "rho_mask_sequence_level": Option(bool),
    "rho_mask_tv_divergence": Option(bool),
}

NOT_SHARED = {
    "truncated_importance_sampling_ratio_cap": Unshared(
        "It is an older name; use rho_clamp_upper_bound.", off=(None, 0, 0.0)
    ),
    "use_liger_grpo_loss": Unshared("There are no fused kernels here; set it to false."),
    "mask_truncated_completions": Unshared("Truncated answers stay in the loss here; set it to false."),
}

QUIRKS = (
    "The KL term's log-ratio is clamped at 40; here it is not.",
    "With use_vllm_logprobs the weight old/engine is computed and is 1; here the ratio is theta/mu, and no weight is "
    "added.",
)


def compose(o: dict[str, Any]) -> Recipe:
    """The surrogate times a clamped weight; tokens that the mask zeroes stay in the divisor."""
    corrected = o["use_rho_correction"] and not o["use_vllm_logprobs"]
    return recipe(_loss(o), correction=_corrections(o) if corrected else [], reduction=_reduction(o))


def _loss(o: dict[str, Any]) -> Entry:
    shared: dict[str, Any] = {"anchor": "theta/mu" if o["use_vllm_logprobs"] else "theta/old"}
    shared |= {"beta": o["beta"], "use_bias_correction_kl": False}
    if o["loss_fn"] == "cispo":
        return entry("loss", "cispo", floor=0.0, epsilon_high=1 + o["clip_higher"], **shared)
    return entry("loss", "dapo", epsilon=o["clip_lower"], epsilon_high=o["clip_higher"], **shared)


def _corrections(o: dict[str, Any]) -> list[Entry]:
    """Weight first, mask after it, both over every completion token."""
    sequence = o["rho_mask_sequence_level"]
    cap = o["rho_clamp_upper_bound"]
    bounds = {"floor": o["rho_clamp_lower_bound"], "cap": cap if cap > 0 else math.inf}
    found = [_on_mismatch("geometric_tis" if sequence else "token_tis", **bounds)]
    low, high = (o[f"rho_mask_{side}_bound"] for side in ("lower", "upper"))
    band = {"low": low if low > 0 else None, "high": high if high > 0 else None}
    if not (low > 0 or high > 0):
        return found
    if o["rho_mask_tv_divergence"]:
        return [*found, _on_mismatch("vaco_tv", lower=band["low"], upper=math.inf if high <= 0 else high)]
    if sequence:
        return [*found, _on_mismatch("sequence_mask", aggregate="mean", **band)]
    return [*found, _on_mismatch("token_mask", **band)]


def _on_mismatch(stem: str, **fields: Any) -> Entry:
    return entry("correction", stem, anchor="old/mu", clamp_nats=CLAMP, **fields)


def _reduction(o: dict[str, Any]) -> Entry:
    divisor = o["loss_denominator"]
    if divisor == "token":
        return entry("reduction", "token_mean")
    try:
        number = float(divisor)
    except (TypeError, ValueError):
        number = 0.0
    if not 0 < number < math.inf:
        raise refuse("loss_denominator", divisor, "token, or a number above 0")
    return entry("reduction", "token_sum", divisor=number)


def case(file: GoldenFile) -> Case:
    """The harness has no reference policy; its weights are compared on valid tokens."""
    from stalefront.parity import Case

    options = {key: value for key, value in file.settings.items() if key in OPTIONS}
    # A rejected token has weight 0 there.
    weights = {"rho_weights": lambda e: e.weight_BT.where(e.kept_BT, 0.0)} if "rho_weights" in file.outputs else {}
    return Case({**options, "beta": 0.0}, compare=weights)


FRAMEWORK = Framework(
    "open_instruct",
    "allenai/open-instruct e6c3044aa620",
    OPTIONS,
    compose,
    case,
    not_shared=NOT_SHARED,
    quirks=QUIRKS,
)
