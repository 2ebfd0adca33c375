"""NeMo-RL: `ClippedPGLossFn` of `loss_functions.py`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

from stalefront.frameworks import Framework, Option, Unshared, refuse
from stalefront.recipe import Entry, Recipe, entry, recipe

if TYPE_CHECKING:
    from stalefront.parity import Case, GoldenFile

# Added to every count that is divided by.
EPSILON = 1e-8
TIS = "truncated_importance_sampling_type"
HIGH = "truncated_importance_sampling_ratio"
LOW = "truncated_importance_sampling_ratio_min"

KINDS: dict[str, Any] = {
    "disable_ppo_ratio": bool,
    "token_level_loss": bool,
    "sequence_level_importance_ratios": bool,
    "ratio_clip_min": float,
    "ratio_clip_max": float,
    "ratio_clip_c": float | None,
    "use_cispo": bool,
    "reference_policy_kl_penalty": float,
    "reference_policy_kl_type": Literal["k3"],
    "use_importance_sampling_correction": bool,
    TIS: Literal["tis", "icepop", "seq-mask-tis"] | None,
    HIGH: float | None,
    LOW: float | None,
}
OPTIONS = {name: Option(kind, (f"loss_fn.{name}",)) for name, kind in KINDS.items()}

NOT_SHARED = {
    name: Unshared(reason, off, (f"loss_fn.{name}",))
    for name, reason, off in (
        (
            "use_kl_in_reward",
            "Rewards hold no KL term here; reference_policy_kl_penalty has it in the loss.",
            (None, False),
        ),
        (
            "use_on_policy_kl_approximation",
            "The KL term is weighted by the surrogate's ratio here; set it to false.",
            (None, False),
        ),
        ("force_on_policy_ratio", "It replaces old by the policy itself; use disable_ppo_ratio.", (None, False)),
        ("positive_example_nll_weight", "There is no likelihood term for right answers here.", (None, 0, 0.0)),
        ("kl_input_clamp_value", "The KL term is not clamped here; 20 is let through.", (None, 20.0, 20)),
        ("kl_output_clamp_value", "The KL term is not clamped here; 10 is let through.", (None, 10.0, 10)),
    )
}

QUIRKS = (
    "The KL term's log-ratio is clamped at 20 and its value at 10; here neither is.",
    "A weight that is not finite becomes 0; here it stays.",
)


def compose(o: dict[str, Any]) -> Recipe:
    """The clipped surrogate times the weight; tokens that a filter zeroes stay in the divisors."""
    _check(o)
    if o["token_level_loss"]:
        reduction = entry("reduction", "token_mean", epsilon=EPSILON)
    else:
        reduction = entry("reduction", "sequence_mean", epsilon=EPSILON, skip_empty=True)
    weighted = o["use_importance_sampling_correction"]
    return recipe(_loss(o), correction=[_weight(o)] if weighted else [], reduction=reduction)


def _check(o: dict[str, Any]) -> None:
    sequence, kind = o["sequence_level_importance_ratios"], o[TIS]
    if sequence and o["token_level_loss"]:
        raise refuse("token_level_loss", True, "false with sequence_level_importance_ratios", "NeMo-RL refuses it too.")
    if kind is None and o[HIGH] is not None:
        raise refuse(HIGH, o[HIGH], f"null without {TIS}", f"Set framework.{TIS}.")
    if kind is not None and not o["use_importance_sampling_correction"]:
        way_out = "Set framework.use_importance_sampling_correction=true."
        raise refuse(TIS, kind, "null without use_importance_sampling_correction", way_out)
    if kind is not None and o[HIGH] is None:
        raise refuse(HIGH, None, f"a number above 0 with {TIS}={kind}")
    if kind in ("icepop", "seq-mask-tis") and o[LOW] is None:
        raise refuse(LOW, None, f"a number with {TIS}={kind}")
    if kind == "seq-mask-tis" and sequence:
        raise refuse(TIS, kind, "tis or icepop with sequence_level_importance_ratios", "NeMo-RL refuses it too.")
    if o["disable_ppo_ratio"] and o["ratio_clip_c"] is not None:
        raise refuse(
            "ratio_clip_c", o["ratio_clip_c"], "null with disable_ppo_ratio", "There is no ratio to clip then."
        )
    if o["use_cispo"]:
        _check_cispo(o)


def _check_cispo(o: dict[str, Any]) -> None:
    for name, ok in {
        "disable_ppo_ratio": False,
        "sequence_level_importance_ratios": False,
        "token_level_loss": True,
    }.items():
        if o[name] is not ok:
            raise refuse(name, o[name], f"{str(ok).lower()} with use_cispo", "NeMo-RL refuses it too.")
    if o["ratio_clip_c"] is not None:
        raise refuse("ratio_clip_c", o["ratio_clip_c"], "null with use_cispo", "NeMo-RL refuses it too.")


def _loss(o: dict[str, Any]) -> Entry:
    low, high = o["ratio_clip_min"], o["ratio_clip_max"]
    shared = {"beta": o["reference_policy_kl_penalty"]}
    if o["disable_ppo_ratio"]:
        return entry("loss", "reinforce", **shared)
    if o["use_cispo"]:
        return entry("loss", "cispo", floor=max(0.0, 1 - low), epsilon_high=1 + high, **shared)
    clip = {"epsilon": low, "epsilon_high": high, "dual_clip": o["ratio_clip_c"]}
    if o["sequence_level_importance_ratios"]:
        return entry("loss", "gspo", length_epsilon=EPSILON, **clip, **shared)
    return entry("loss", "grpo", **clip, **shared)


def _weight(o: dict[str, Any]) -> Entry:
    kind, low, high = o[TIS], o[LOW], o[HIGH]
    sequence = o["sequence_level_importance_ratios"]
    if kind == "icepop":
        if not sequence:
            return _on_mismatch("icepop", low=low, high=high)
        return _on_mismatch("sequence_mask", aggregate="sum", weight="product", low=low, high=high)
    if kind == "seq-mask-tis":
        return _on_mismatch("sequence_mask", aggregate="mean", weight="token", low=low, high=high)
    bounds = {"cap": math.inf, "floor": 0.0} if kind is None else {"cap": high, "floor": low or 0.0}
    return _on_mismatch("sequence_tis" if sequence else "token_tis", **bounds)


def _on_mismatch(stem: str, **fields: Any) -> Entry:
    return entry("correction", stem, anchor="old/mu", **fields)


def case(file: GoldenFile) -> Case:
    """Settings are the class's own; rewards and reference log-probs are not there, so neither is what needs them."""
    from stalefront.parity import Case

    return Case(dict(file.settings))


FRAMEWORK = Framework(
    "nemo_rl",
    "NVIDIA-NeMo/RL 7ea279abfbeb",
    OPTIONS,
    compose,
    case,
    sections=("loss_fn",),
    not_shared=NOT_SHARED,
    quirks=QUIRKS,
)
