"""VCPO: sequence weights on a policy gradient, and a learning rate scaled by the effective sample size."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from stalefront.frameworks import Framework, Option, Unshared
from stalefront.frameworks.verl import ACTOR, AGGREGATIONS, CLAMP_NATS, CORRECTION, FLOOR
from stalefront.recipe import Entry, Recipe, entry, recipe

if TYPE_CHECKING:
    from torch import Tensor

    from stalefront.batch import LossInputs
    from stalefront.parity import Case, Evaluated, GoldenFile, Number

ESS, BASELINE = f"{ACTOR}.ess_scaling", f"{ACTOR}.grad_baselining"
OPTIONS = {
    "rollout_is": Option(Literal["token", "sequence"] | None, (f"{CORRECTION}.rollout_is",)),
    "rollout_is_threshold": Option(float, (f"{CORRECTION}.rollout_is_threshold",)),
    "loss_agg_mode": Option(
        Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"], (f"{ACTOR}.loss_agg_mode",)
    ),
    "ess_scaling.enable": Option(bool, (f"{ESS}.enable",)),
    "ess_scaling.scaling_rule": Option(Literal["sqrt", "linear"], (f"{ESS}.scaling_rule",)),
    "ess_scaling.base_ess_ratio": Option(float, (f"{ESS}.base_ess_ratio",)),
    "ess_scaling.use_clipped": Option(bool, (f"{ESS}.use_clipped",)),
    "norm_adv_by_std_in_grpo": Option(bool, ("algorithm.norm_adv_by_std_in_grpo",)),
}
NOT_SHARED = {
    "grad_baselining.enable": Unshared(
        "The off-policy optimal baseline needs a gradient norm of every sequence, a backward pass each: it is the "
        "function stalefront.vcpo.opob_baseline, and no part of the loop.",
        (False,),
        (f"{BASELINE}.enable",),
    ),
    "rollout_rs": Unshared("Rejection is in framework=verl_fork_vcpo.", (None,), (f"{CORRECTION}.rollout_rs",)),
    "rollout_rs_threshold": Unshared(
        "Rejection is in framework=verl_fork_vcpo.", (None,), (f"{CORRECTION}.rollout_rs_threshold",)
    ),
}


def compose(o: dict[str, Any]) -> Recipe:
    """Its old policy is the trainer's before the step, so that θ/old is 1 and its weight old/μ is our θ/μ."""
    scale = "group" if o["norm_adv_by_std_in_grpo"] else "none"
    controller: list[Entry] = []
    if o["ess_scaling.enable"]:
        power = 0.5 if o["ess_scaling.scaling_rule"] == "sqrt" else 1.0
        clip = o["rollout_is_threshold"] if o["ess_scaling.use_clipped"] else None
        controller = [entry("controller", "vcpo", base=o["ess_scaling.base_ess_ratio"], power=power, clip=clip)]
    return recipe(
        entry("loss", "reinforce", scale_rewards=scale),
        correction=weights(o),
        reduction=entry("reduction", AGGREGATIONS[o["loss_agg_mode"]]),
        controller=controller,
    )


def weights(o: dict[str, Any]) -> list[Entry]:
    """`rollout_is`: weights truncated from above."""
    cap = o["rollout_is_threshold"]
    if o["rollout_is"] == "token":
        return [entry("correction", "token_tis", anchor="theta/mu", cap=cap, clamp_nats=CLAMP_NATS)]
    if o["rollout_is"] == "sequence":
        return [entry("correction", "sequence_tis", anchor="theta/mu", cap=cap, floor=FLOOR)]
    return []


def case(file: GoldenFile) -> Case:
    """Golden files of its statistics: `old` is its policy before the step, and so stands for θ.

    `grad_norm_unscaled` and `rewards` are what its harness set; a baseline of a group is that of the first sequence's,
    and one of a mini-batch is taken over advantages.
    """
    from stalefront.parity import Case

    cap, base = file.settings["rollout_is_threshold"], file.settings["base_ess_ratio"]
    compare: dict[str, Number] = {
        "seq_is": lambda e: weight_B(e),
        "seq_is_clipped": lambda e: weight_B(e).clamp(max=cap),
        "kl_rollout_old": k3_B,
        "geom_mean": geometric_mean_B,
        "ess_info.ess": lambda e: size(e, None),
        "ess_info.ess_ratio": lambda e: share(e, None),
        "ess_info.ess_clipped": lambda e: size(e, cap),
        "ess_info.ess_ratio_clipped": lambda e: share(e, cap),
    }
    for key in file.outputs["lr_scale"]:
        compare[f"lr_scale.{key}"] = _scale(key, cap, base)
    for key in file.outputs["opob_baseline"]:
        compare[f"opob_baseline.{key}"] = _baseline(file, key, cap)
    options = {"rollout_is_threshold": cap, "ess_scaling": {"base_ess_ratio": base}}
    return Case(options=options, inputs=theta_is_old, compare=compare)


def theta_is_old(inputs: LossInputs) -> LossInputs:
    """The policy before the step, with gradient."""
    return replace(inputs, logp_theta_BT=inputs.logp_old_BT.clone().requires_grad_())


def log_ratio_BT(found: Evaluated) -> Tensor:
    """log θ/μ."""
    return found.inputs.anchored_BT("theta/mu")


def weight_B(found: Evaluated) -> Tensor:
    """Product of a sequence's ratios."""
    from stalefront.vcpo import log_weights_B

    return log_weights_B(log_ratio_BT(found), found.inputs.mask_BT).exp()


def size(found: Evaluated, clip: float | None) -> float:
    """Effective sample size."""
    from stalefront.vcpo import ess, log_weights_B

    return ess(log_weights_B(log_ratio_BT(found), found.inputs.mask_BT), clip=clip)


def share(found: Evaluated, clip: float | None) -> float:
    """Effective sample size over the number of sequences."""
    return size(found, clip) / len(found.inputs.mask_BT)


def k3_B(found: Evaluated) -> Tensor:
    """Mean k3 estimate over the tokens of a sequence."""
    from stalefront.ratios import token_statistic

    return _mean_B(token_statistic(log_ratio_BT(found), "k3"), found)


def geometric_mean_B(found: Evaluated) -> Tensor:
    """Geometric mean of a sequence's ratios."""
    return _mean_B(log_ratio_BT(found), found).exp()


def _mean_B(value_BT: Tensor, found: Evaluated) -> Tensor:
    from stalefront.ratios import over_sequence
    from stalefront.vcpo import EPSILON

    mask_BT = found.inputs.mask_BT
    length_B = mask_BT.sum(-1, dtype=value_BT.dtype)
    return over_sequence(value_BT, mask_BT, "sum")[:, 0] / (length_B + EPSILON)


def _scale(key: str, cap: float, base: float) -> Number:
    """`sqrt_clipped0` is the square-root rule on weights as they are."""
    rule, _, clipped = key.partition("_clipped")

    def number(found: Evaluated) -> float:
        from stalefront.vcpo import lr_scale

        return lr_scale(share(found, cap if clipped == "1" else None), base=base, power=0.5 if rule == "sqrt" else 1.0)

    return number


def _baseline(file: GoldenFile, key: str, cap: float) -> Number:
    """`group_is1_clip0_len0`: scope, with importance weights, clipped, norms divided by length."""
    scope, use_weight, clipped, by_length = key.split("_")

    def baseline(found: Evaluated) -> float:
        from stalefront.parity import number
        from stalefront.ratios import over_sequence
        from stalefront.vcpo import opob_baseline

        inputs = found.inputs
        assert inputs.group_B is not None
        whole = scope == "minibatch"
        mine = inputs.group_B >= 0 if whole else inputs.group_B == inputs.group_B[0]
        weight = weight_B(found).clamp(max=cap if clipped == "clip1" else float("inf"))
        advantage = over_sequence(inputs.advantage_B1.expand(inputs.mask_BT.shape), inputs.mask_BT, "mean")[:, 0]
        return opob_baseline(
            (advantage if whole else number(file.settings["rewards"]))[mine],
            number(file.settings["grad_norm_unscaled"])[mine],
            weight[mine] if use_weight == "is1" else None,
            inputs.mask_BT.sum(-1)[mine] if by_length == "len1" else None,
        )

    return baseline


FRAMEWORK = Framework(
    name="vcpo",
    source="mit-han-lab/vcpo c7f030f0b772",
    options=OPTIONS,
    compose=compose,
    case=case,
    sections=(CORRECTION, ESS),
    not_shared=NOT_SHARED,
    quirks=(
        "PPO's clip is off in its released scripts (clip_ratio_high 1e9); ours has no clip.",
        "Its scripts subtract the off-policy optimal baseline; here the baseline is the group's mean.",
    ),
)
