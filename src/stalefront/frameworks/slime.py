"""slime: `loss.py`, `ppo_utils.py` and the weights of its example `train_infer_mismatch_helper/mis.py`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

from stalefront.frameworks import Framework, Option, Unshared, refuse
from stalefront.recipe import Entry, Recipe, entry, recipe

if TYPE_CHECKING:
    from stalefront.parity import Case, Evaluated, GoldenFile, Number

ICEPOP = "slime.backends.megatron_utils.loss.icepop_function"
MIS = "examples.train_infer_mismatch_helper.mis.compute_mis_weights_with_cp"
# mis.py holds log-ratios, of tokens or of whole sequences, within ±20 before exp.
CLAMP = 20.0
Level = Literal["token", "sequence", "geometric"]

OPTIONS = {
    "advantage_estimator": Option(Literal["grpo", "gspo", "cispo"]),
    "calculate_per_token_loss": Option(bool),
    "eps_clip": Option(float),
    "eps_clip_high": Option(float | None),
    "eps_clip_c": Option(float | None),
    "use_rollout_logprobs": Option(bool),
    "use_kl_loss": Option(bool),
    "kl_loss_coef": Option(float),
    "kl_loss_type": Option(Literal["k1", "k2", "k3", "low_var_kl"]),
    "use_unbiased_kl": Option(bool),
    "use_opsm": Option(bool),
    "opsm_delta": Option(float),
    "use_tis": Option(bool),
    "tis_clip": Option(float),
    "tis_clip_low": Option(float),
    "custom_tis_function_path": Option(str | None),
    "use_rs": Option(bool),
    "tis_level": Option(Level),
    "rs_level": Option(Level),
    "tis_mode": Option(Literal["truncate", "clip", "mask"]),
    "tis_lower_bound": Option(float | None),
    "tis_upper_bound": Option(float),
    "rs_lower_bound": Option(float | None),
    "rs_upper_bound": Option(float | None),
    "rs_veto_threshold": Option(float | None),
    "tis_batch_normalize": Option(bool),
}

NOT_SHARED = {
    "kl_coef": Unshared("slime puts this KL term into rewards; use use_kl_loss.", off=(None, 0, 0.0)),
    "entropy_coef": Unshared("There is no entropy bonus here; set it to 0.", off=(None, 0, 0.0)),
    "use_opd": Unshared("There is no teacher here; set it to false."),
    "use_routing_replay": Unshared("Models here have no routed experts; set it to false."),
    "use_rollout_routing_replay": Unshared("Models here have no routed experts; set it to false."),
    "custom_pg_loss_reducer_function_path": Unshared("Name a reduction of ours instead.", off=(None,)),
}

QUIRKS = (
    "A function named by custom_tis_function_path runs whatever it does; here three are known.",
    "low_var_kl clamps the KL term at 10; here it is not clamped.",
)


def compose(o: dict[str, Any]) -> Recipe:
    """The surrogate, then OPSM, then the weight old/engine; what they reject stays in the divisors."""
    if o["use_rollout_logprobs"] and o["use_tis"]:
        way_out = "With the engine's log-probs as old ones old/engine is 1."
        raise refuse("use_tis", True, "false with use_rollout_logprobs", way_out)
    anchor = "theta/mu" if o["use_rollout_logprobs"] else "theta/old"
    found: list[Entry] = []
    if o["use_opsm"]:
        found.append(entry("correction", "opsm", anchor=anchor, delta=o["opsm_delta"], sign="token"))
    if o["use_tis"]:
        found += _weights(o)
    reduction = "token_mean" if o["calculate_per_token_loss"] else "sequence_mean"
    return recipe(_loss(o, anchor), correction=found, reduction=entry("reduction", reduction))


def _loss(o: dict[str, Any], anchor: str) -> Entry:
    high = o["eps_clip"] if o["eps_clip_high"] is None else o["eps_clip_high"]
    beta = o["kl_loss_coef"] if o["use_kl_loss"] else 0.0
    if beta and o["kl_loss_type"] not in ("k3", "low_var_kl"):
        raise refuse("kl_loss_type", o["kl_loss_type"], "k3 or low_var_kl with a KL term")
    shared = {"anchor": anchor, "beta": beta, "use_bias_correction_kl": o["use_unbiased_kl"]}
    if o["advantage_estimator"] == "cispo":
        return entry("loss", "cispo", floor=max(0.0, 1 - o["eps_clip"]), epsilon_high=1 + high, **shared)
    stem = "gspo" if o["advantage_estimator"] == "gspo" else "grpo"
    return entry("loss", stem, epsilon=o["eps_clip"], epsilon_high=high, dual_clip=o["eps_clip_c"], **shared)


def _weights(o: dict[str, Any]) -> list[Entry]:
    path = o["custom_tis_function_path"]
    if path is None:
        return [_on_mismatch("token_tis", cap=o["tis_clip"], floor=o["tis_clip_low"])]
    if path.endswith("icepop_function"):
        return [_on_mismatch("icepop", low=o["tis_clip_low"], high=o["tis_clip"])]
    if path.endswith(("mis.compute_mis_weights", "mis.compute_mis_weights_with_cp")):
        return _mis(o)
    legal = f"null, {ICEPOP} or {MIS}"
    raise refuse("custom_tis_function_path", path, legal, "A function of your own is not read here.")


def _mis(o: dict[str, Any]) -> list[Entry]:
    """Weight by mode, its batch normalisation, and the bands of mode and rejection, which reject and do not weigh."""
    found = [_truncated(o)]
    if o["tis_batch_normalize"]:
        if o["tis_level"] == "geometric":
            raise refuse("tis_batch_normalize", True, "false with tis_level=geometric", "slime refuses it too.")
        over = "tokens" if o["tis_level"] == "token" else "sequences"
        found.append(entry("correction", "normalize", over=over, empty="count"))
    found += _bands(o)
    if o["use_rs"] and o["rs_veto_threshold"] is not None:
        found.append(_on_mismatch("outlier_veto", low=o["rs_veto_threshold"], high=None))
    return found


def _bounds(o: dict[str, Any]) -> tuple[float, float]:
    """Bounds of the weight; the lower one is the inverse of the upper where it is not given."""
    low, high = o["tis_lower_bound"], o["tis_upper_bound"]
    return (1 / high if low is None else low), high


def _truncated(o: dict[str, Any]) -> Entry:
    low, high = _bounds(o)
    floor, cap = {"truncate": (0.0, high), "clip": (low, high), "mask": (0.0, math.inf)}[o["tis_mode"]]
    if o["tis_level"] == "token":
        return _on_mismatch("token_tis", cap=cap, floor=floor, clamp_nats=CLAMP)
    # The log of the whole weight is what is held within ±20.
    edge = {"cap": min(cap, math.exp(CLAMP)), "floor": max(floor, math.exp(-CLAMP))}
    return _on_mismatch(f"{o['tis_level']}_tis", **edge)


def _bands(o: dict[str, Any]) -> list[Entry]:
    """Masks of `tis_mode=mask` and of `use_rs`: one where both look at the same thing."""
    low, high = _bounds(o)
    bands: dict[str, tuple[float, float]] = {}
    if o["tis_mode"] == "mask":
        bands[o["tis_level"]] = low, high
    if o["use_rs"]:
        level = o["rs_level"]
        own = low if o["rs_lower_bound"] is None else o["rs_lower_bound"]
        top = high if o["rs_upper_bound"] is None else o["rs_upper_bound"]
        before = bands.get(level, (-math.inf, math.inf))
        bands[level] = max(own, before[0]), min(top, before[1])
    if len(bands.keys() & {"sequence", "geometric"}) == 2:
        raise refuse("rs_level", o["rs_level"], f"token or {o['tis_level']} with tis_mode=mask")
    return [_band(level, *bound) for level, bound in bands.items()]


def _band(level: str, low: float, high: float) -> Entry:
    if level == "token":
        return _on_mismatch("token_mask", low=low, high=high, clamp_nats=CLAMP)
    return _on_mismatch("sequence_mask", aggregate="sum" if level == "sequence" else "mean", low=low, high=high)


def _on_mismatch(stem: str, **fields: Any) -> Entry:
    return entry("correction", stem, anchor="old/mu", **fields)


def case(file: GoldenFile) -> Case:
    """The function's name says which correction acts; `use_tis` is set in every file."""
    from stalefront.parity import Case

    s = {key: value for key, value in file.settings.items() if key in OPTIONS}
    name = file.function
    options: dict[str, Any] = {**s, "use_tis": "tis" in name or "icepop" in name or "mis" in name}
    options["use_opsm"] = "opsm" in name
    if "icepop" in name:
        options["custom_tis_function_path"] = ICEPOP
    if "mis" in name:
        options |= {"custom_tis_function_path": MIS, "use_tis": file.settings.get("use_tis", True)}
    estimator = file.settings.get("ppo", "ppo")
    options["advantage_estimator"] = "grpo" if estimator == "ppo" else estimator
    options["use_rollout_logprobs"] = file.settings.get("old", "old") == "mu"
    return Case(options, compare=_compare(file, options))


def _compare(file: GoldenFile, options: dict[str, Any]) -> dict[str, Number]:
    def per_token(e: Evaluated) -> Evaluated:
        from dataclasses import replace

        from stalefront.parity import Case, evaluate

        made = FRAMEWORK.recipe({**options, "calculate_per_token_loss": True})
        theta = e.inputs.logp_theta_BT.clone().requires_grad_()
        return evaluate(made, replace(e.inputs, logp_theta_BT=theta), Case({}))

    usual: dict[str, Number] = {
        "loss_per_token": lambda e: per_token(e).loss,
        "grad_logp_theta_per_token": lambda e: per_token(e).grad_BT,
        # slime's mask is 1 on padding.
        "opsm_mask": lambda e: e.weights.keep_BT | ~e.inputs.mask_BT,
        "weights": lambda e: e.weight_BT,
        "modified_masks": lambda e: e.kept_BT,
    }
    return {key: ours for key, ours in usual.items() if file.outputs.get(key) is not None}


FRAMEWORK = Framework(
    "slime",
    "THUDM/slime 624b824a898a",
    OPTIONS,
    compose,
    case,
    not_shared=NOT_SHARED,
    quirks=QUIRKS,
)
