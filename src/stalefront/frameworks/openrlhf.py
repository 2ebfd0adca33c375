"""OpenRLHF: `PolicyLoss` and `aggregate_loss` of `loss.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from stalefront.frameworks import Framework, Option, Unshared
from stalefront.recipe import Entry, Recipe, entry, recipe

if TYPE_CHECKING:
    from stalefront.parity import Case, GoldenFile

OPTIONS = {
    "clip_eps_low": Option(float),
    "clip_eps_high": Option(float),
    "dual_clip": Option(float | None),
    "token_level_loss": Option(bool),
    "policy_loss_type": Option(Literal["ppo", "gspo"]),
    "enable_vllm_is_correction": Option(bool),
    "vllm_is_truncated_threshold": Option(tuple[float, float]),
    "vllm_is_correction_type": Option(Literal["tis", "icepop", "seq-mask-tis"]),
}

NOT_SHARED = {
    "eps_clip": Unshared("Give clip_eps_low and clip_eps_high, as the loss has them.", off=(None, 0.2)),
    "eps_clip_low_high": Unshared("Give clip_eps_low and clip_eps_high, as the loss has them.", off=(None,)),
    "use_kl_loss": Unshared("Its KL estimators are summed apart from the loss; use loss.beta of a recipe of your own."),
    "entropy_loss_coef": Unshared("There is no entropy bonus here; set it to null.", off=(None, 0, 0.0)),
}

QUIRKS = ("A batch without a token gives NaN in OpenRLHF; here it gives 0.",)


def compose(o: dict[str, Any]) -> Recipe:
    """The clipped surrogate times the weight; tokens that a filter zeroes stay in the divisors."""
    ppo, corrected = o["policy_loss_type"] == "ppo", o["enable_vllm_is_correction"]
    clip = {"epsilon": o["clip_eps_low"], "epsilon_high": o["clip_eps_high"], "dual_clip": o["dual_clip"]}
    if ppo:
        loss = entry("loss", "grpo", clamp_nats=20.0, **clip)
    else:
        loss = entry("loss", "gspo", anchor="theta/mu" if corrected else "theta/old", **clip)
    if ppo and o["token_level_loss"]:
        reduction = entry("reduction", "token_mean")
    else:
        reduction = entry("reduction", "sequence_mean", epsilon=1e-8, epsilon_on="tokens", skip_empty=True)
    return recipe(loss, correction=[_weight(o)] if ppo and corrected else [], reduction=reduction)


def _weight(o: dict[str, Any]) -> Entry:
    low, high = o["vllm_is_truncated_threshold"]
    if o["vllm_is_correction_type"] == "icepop":
        return entry("correction", "icepop", anchor="old/mu", low=low, high=high)
    if o["vllm_is_correction_type"] == "seq-mask-tis":
        own = {"aggregate": "mean", "weight": "token"}
        return entry("correction", "sequence_mask", anchor="old/mu", low=low, high=high, **own)
    return entry("correction", "token_tis", anchor="old/mu", floor=low, cap=high)


def case(file: GoldenFile) -> Case:
    """Settings are the class's own; what is not given has its default."""
    from stalefront.parity import Case

    given = {key: value for key, value in file.settings.items() if key in OPTIONS}
    if given.get("vllm_is_truncated_threshold", ()) is None:
        del given["vllm_is_truncated_threshold"]
    return Case(given)


FRAMEWORK = Framework(
    "openrlhf",
    "OpenRLHF/OpenRLHF 3c3be6234e0c",
    OPTIONS,
    compose,
    case,
    not_shared=NOT_SHARED,
    quirks=QUIRKS,
)
