"""PipelineRL: `rl_step` of `finetune/rl/__init__.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from stalefront.frameworks import Framework, Option, Unshared, refuse
from stalefront.recipe import Entry, Recipe, entry, recipe

if TYPE_CHECKING:
    from stalefront.parity import Case, GoldenFile


def _at(name: str) -> tuple[str, ...]:
    return (f"finetune.rl.{name}",)


KINDS: dict[str, Any] = {
    "policy_loss": Literal["reinforce", "ppo", "gspo"],
    "epsilon_low": float,
    "epsilon_high": float,
    "batch_size": int,
    "group_normalization": bool,
    "group_tokens": float | None,
    "kl_coef": float,
    "final_kl_coef": float,
    "divide_advantage_by_std": bool,
}
OPTIONS = {name: Option(kind, _at(name)) for name, kind in KINDS.items()}

NOT_SHARED = {
    name: Unshared(reason, off, _at(name))
    for name, reason, off in (
        ("use_advantages", "Losses take advantages here, not rewards; set it to true.", (None, True)),
        ("relu_log_p_weights", "Negative advantages stay here; set it to false.", (None, False)),
        ("entropy_bonus", "There is no entropy bonus here; set it to 0.", (None, 0, 0.0)),
        ("final_entropy_bonus", "There is no entropy bonus here; set it to 0.", (None, 0, 0.0)),
        ("reward_minus_kl_coef", "Rewards hold no KL term here; use kl_coef.", (None, 0, 0.0)),
        ("value_loss_coef", "There is no value head here; set it to 0.", (None, 0, 0.0)),
        ("overlong_filtering", "Truncated answers stay in the loss here; set it to false.", (None, False)),
        ("filter_zero_advantage_groups", "Groups without variance stay here; set it to false.", (None, False)),
        ("temperature", "It is task.temperature here; 1 is let through.", (None, 1, 1.0)),
        ("clamp_log_ratio_ref_new_value", "The KL term is not clamped here; 5 and 10 are let through.", (None, 5, 10)),
        ("aggregate_loss", "Losses are summed as batch_size and group_normalization say; use these.", (None, "sum")),
    )
}

QUIRKS = (
    "The KL term's log-ratio is clamped; here it is not.",
    "The lag is counted in samples; here in updates.",
)


def compose(o: dict[str, Any]) -> Recipe:
    """One of three surrogates on θ/μ, summed over tokens and divided by a number that no mask enters."""
    if o["final_kl_coef"] != o["kl_coef"]:
        legal = f"kl_coef={o['kl_coef']}"
        raise refuse("final_kl_coef", o["final_kl_coef"], legal, "Weights of the KL term do not change here.")
    if o["batch_size"] < 0:
        raise refuse("batch_size", o["batch_size"], "a number of at least 0")
    if o["group_tokens"] is not None and not o["group_normalization"]:
        raise refuse("group_tokens", o["group_tokens"], "null without group_normalization")
    whole = o["group_normalization"] and o["group_tokens"] is None
    note = "PipelineRL sums over sequences where this averages over prompts: its loss is larger by their number."
    return recipe(_loss(o), reduction=_reduction(o), notes=[note] if whole else [])


def _loss(o: dict[str, Any]) -> Entry:
    shared = {"anchor": "theta/mu", "beta": o["kl_coef"], "use_bias_correction_kl": False}
    shared |= {"scale_rewards": "group" if o["divide_advantage_by_std"] else "none"}
    low, high = o["epsilon_low"], o["epsilon_high"]
    if o["policy_loss"] == "reinforce":
        return entry("loss", "reinforce_clamp", floor=0.0, cap=1 + high, **shared)
    if o["policy_loss"] == "ppo":
        return entry("loss", "grpo", epsilon=low, epsilon_high=high, **shared)
    return entry("loss", "gspo", epsilon=low, epsilon_high=high, advantage="sequence", **shared)


def _reduction(o: dict[str, Any]) -> Entry:
    if o["group_normalization"]:
        if o["group_tokens"] is None:
            return entry("reduction", "prompt_mean")
        return entry("reduction", "token_sum", divisor=o["group_tokens"])
    if o["batch_size"] == 0:
        return entry("reduction", "sequence_sum")
    return entry("reduction", "token_sum", divisor=float(o["batch_size"]))


def case(file: GoldenFile) -> Case:
    """The harness gives every group 24 tokens, a column of the data that is in no setting."""
    from stalefront.parity import Case, old_is_mu

    options = dict(file.settings)
    if options.get("group_normalization"):
        options.setdefault("group_tokens", 24.0)
    return Case(options, inputs=old_is_mu)


FRAMEWORK = Framework(
    "pipelinerl",
    "ServiceNow/PipelineRL 58d393458625",
    OPTIONS,
    compose,
    case,
    sections=("finetune.rl",),
    not_shared=NOT_SHARED,
    quirks=QUIRKS,
)
