"""AReaL: `functional.py` (PPO, SAPO, CISPO, rejection sampling) and `actor.py` (M2PO's mask, A-3PO)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

from stalefront.frameworks import Framework, Option, Unshared, refuse
from stalefront.recipe import Entry, Recipe, entry, recipe

if TYPE_CHECKING:
    from stalefront.batch import LossInputs
    from stalefront.parity import Case, Evaluated, GoldenFile, Number

RS = "rejection_sampling"
OPTIONS = {
    "eps_clip": Option(float, ("actor.eps_clip",)),
    "eps_clip_higher": Option(float | None, ("actor.eps_clip_higher",)),
    "c_clip": Option(float | None, ("actor.c_clip",)),
    "importance_sampling_level": Option(Literal["token", "sequence"], ("actor.importance_sampling_level",)),
    "recompute_logprob": Option(bool, ("actor.recompute_logprob",)),
    "use_decoupled_loss": Option(bool, ("actor.use_decoupled_loss",)),
    "prox_logp_method": Option(Literal["recompute", "loglinear", "metrics"], ("actor.prox_logp_method",)),
    "m2_threshold": Option(float | None, ("actor.m2_threshold",)),
    "use_sapo_loss": Option(bool, ("actor.use_sapo_loss",)),
    "sapo_tau_pos": Option(float, ("actor.sapo_tau_pos",)),
    "sapo_tau_neg": Option(float, ("actor.sapo_tau_neg",)),
    "use_cispo_loss": Option(bool, ("actor.use_cispo_loss",)),
    f"{RS}.level": Option(Literal["token", "sequence"] | None, (f"actor.{RS}.level",)),
    f"{RS}.action": Option(Literal["mask", "clamp"], (f"actor.{RS}.action",)),
    f"{RS}.metric": Option(Literal["ratio", "kl_k1", "kl_k2", "kl_k3", "binary_kl"], (f"actor.{RS}.metric",)),
    f"{RS}.agg": Option(Literal["mean", "sum", "max"], (f"actor.{RS}.agg",)),
    f"{RS}.upper": Option(float, (f"actor.{RS}.upper",)),
    f"{RS}.lower": Option(float | None, (f"actor.{RS}.lower",)),
}

NOT_SHARED = {
    "kl_ctl": Unshared(
        "AReaL puts the KL term into rewards; here it is in the loss, as loss.beta.",
        off=(None, 0, 0.0),
        paths=("actor.kl_ctl",),
    ),
    "overlong_reward_penalty": Unshared("Rewards are the task's alone here.", paths=("actor.overlong_reward_penalty",)),
    "mask_no_eos_with_zero": Unshared(
        "Truncated answers stay in the loss here.", paths=("actor.mask_no_eos_with_zero",)
    ),
    "behave_imp_weight_cap": Unshared(
        "It is AReaL's old name; use rejection_sampling with action=clamp.",
        off=(None,),
        paths=("actor.behave_imp_weight_cap",),
    ),
}

QUIRKS = (
    "metric=binary_kl is in AReaL's function and refused by its configuration; here it can be chosen.",
    "A log-ratio that is not finite becomes 0 in rejection sampling; here it stays, and lies outside of every band.",
    "Ratios of rejection sampling are formed in float32; here in the precision of the log-probs.",
    "prox_logp_method=reuse_train_logp makes every ratio 1: it is loss=reinforce under another name, and not offered.",
    "With action=clamp, agg=max and a lower bound AReaL leaves a sequence alone whose largest ratio is inside; that is "
    "refused here.",
)


def compose(o: dict[str, Any]) -> Recipe:
    """M2PO's mask, then rejection sampling, then the loss; tokens that M2PO masks leave the divisor, others do not."""
    _check(o)
    m2 = [] if o["m2_threshold"] is None else [_on_mismatch("m2po_mask", budget=o["m2_threshold"], ties="in_order")]
    return recipe(
        _loss(o),
        correction=[*m2, *_rejection(o)],
        reduction=entry("reduction", "token_mean", denominator="kept" if m2 else "valid"),
        proximal=entry("proximal", "a3po", method="loglinear") if o["prox_logp_method"] == "loglinear" else None,
        notes=_notes(o),
    )


def _check(o: dict[str, Any]) -> None:
    level, decoupled = o[f"{RS}.level"], o["use_decoupled_loss"]
    if level is None:
        usual = {"action": "mask", "metric": "ratio", "agg": "mean", "upper": 5.0, "lower": None}
        for name, value in usual.items():
            if o[f"{RS}.{name}"] != value:
                way_out = f"Set framework.{RS}.level=token or sequence."
                raise refuse(f"{RS}.{name}", o[f"{RS}.{name}"], f"{value} while {RS}.level is null", way_out)
    for name, on in ((f"{RS}.level", level is not None), ("m2_threshold", o["m2_threshold"] is not None)):
        if on and not decoupled:
            raise refuse(name, o[name], "null without use_decoupled_loss", "Proximal and engine policy are one then.")
    if o["prox_logp_method"] == "loglinear" and not decoupled:
        raise refuse(
            "prox_logp_method", "loglinear", "recompute without use_decoupled_loss", "There is no proximal policy then."
        )
    if o["m2_threshold"] is not None and level is not None and o[f"{RS}.action"] == "mask":
        way_out = (
            "Tokens of M2PO leave AReaL's divisor and those of rejection sampling do not; one of them can be said."
        )
        raise refuse("m2_threshold", o["m2_threshold"], f"null with {RS}.action=mask", way_out)
    if o["use_sapo_loss"] and (decoupled or o["use_cispo_loss"]):
        raise refuse("use_sapo_loss", True, "false with use_decoupled_loss or use_cispo_loss", "AReaL refuses it too.")
    if o["use_cispo_loss"]:
        _check_cispo(o)


def _check_cispo(o: dict[str, Any]) -> None:
    if not o["eps_clip_higher"] or o["eps_clip_higher"] <= 0:
        way_out = "eps_clip=1 with eps_clip_higher=4 is canonical."
        raise refuse("eps_clip_higher", o["eps_clip_higher"], "a number above 0 with use_cispo_loss", way_out)
    if o["importance_sampling_level"] == "sequence":
        raise refuse("importance_sampling_level", "sequence", "token with use_cispo_loss")


def _loss(o: dict[str, Any]) -> Entry:
    """Ratios are θ/old where the trainer scores the sampling policy, θ/μ where the engine's log-probs stand for it."""
    shared = {"anchor": "theta/old" if o["recompute_logprob"] or o["use_decoupled_loss"] else "theta/mu"}
    level = o["importance_sampling_level"]
    if o["use_sapo_loss"]:
        own = {"tau_pos": o["sapo_tau_pos"], "tau_neg": o["sapo_tau_neg"], "level": level, "advantage": level}
        return entry("loss", "sapo", **own, **shared)
    if o["use_cispo_loss"]:
        return entry(
            "loss", "cispo", floor=max(0.0, 1 - o["eps_clip"]), epsilon_high=1 + o["eps_clip_higher"], **shared
        )
    clip = {"epsilon": o["eps_clip"], "epsilon_high": o["eps_clip_higher"], "dual_clip": o["c_clip"]}
    if level == "sequence":
        return entry("loss", "gspo", over="kept", advantage="sequence", **clip, **shared)
    return entry("loss", "grpo", **clip, **shared)


def _rejection(o: dict[str, Any]) -> list[Entry]:
    p = {name.removeprefix(f"{RS}."): value for name, value in o.items() if name.startswith(RS)}
    if p["level"] is None:
        return []
    if p["action"] == "clamp":
        return [_clamp(p)]
    if p["metric"] == "binary_kl":
        return [_kpop(p)]
    statistic, low, high = _band(p)
    if p["level"] == "token":
        if p["metric"] == "ratio":
            return [_on_mismatch("icepop", low=low, high=high)]
        mask = _on_mismatch("token_mask", statistic=statistic, low=low, high=high)
        return [_on_mismatch("token_tis", cap=math.inf), mask]
    weight = "geometric" if p["metric"] == "ratio" else "token"
    band = {"statistic": statistic, "low": low, "high": high}
    return [_on_mismatch("sequence_mask", aggregate=p["agg"], weight=weight, **band)]


def _band(p: dict[str, Any]) -> tuple[str, float | None, float | None]:
    """Statistic and its bounds: k1 is the log-ratio itself, so a ratio's bounds are its exponentials."""
    low, high = p["lower"], p["upper"]
    if p["metric"] == "kl_k1":
        return "ratio", None if low is None else math.exp(low), math.exp(high)
    # AReaL's k3 is e^(-l) - 1 + l of l = log proximal/engine.
    return {"ratio": "ratio", "kl_k2": "k2", "kl_k3": "inverse_k3"}[p["metric"]], low, high


def _clamp(p: dict[str, Any]) -> Entry:
    floor = p["lower"] or 0.0
    if p["metric"] != "ratio":
        raise refuse(f"{RS}.metric", p["metric"], f"ratio with {RS}.action=clamp", "AReaL refuses it too.")
    if p["level"] == "token":
        return _on_mismatch("token_tis", cap=p["upper"], floor=floor)
    if p["agg"] == "max" and floor > 0:
        raise refuse(f"{RS}.agg", "max", f"mean or sum with {RS}.action=clamp and a lower bound")
    return _on_mismatch("geometric_tis", cap=p["upper"], floor=floor)


def _kpop(p: dict[str, Any]) -> Entry:
    if p["level"] == "sequence" or p["lower"] is not None:
        name = "level" if p["level"] == "sequence" else "lower"
        raise refuse(f"{RS}.{name}", p[name], f"token, and no lower bound, with {RS}.metric=binary_kl")
    return _on_mismatch("kpop", upper=p["upper"], smoothing=1e-8)


def _on_mismatch(stem: str, **fields: Any) -> Entry:
    return entry("correction", stem, anchor="old/mu", **fields)


def _notes(o: dict[str, Any]) -> list[str]:
    if o["use_decoupled_loss"] and o[f"{RS}.level"] is None:
        return ["Without rejection_sampling the decoupled loss has no weight: plain PPO against the proximal policy."]
    return []


def case(file: GoldenFile) -> Case:
    """The functions take the trainer's log-probs as proximal ones and the engine's as those of behaviour."""
    from stalefront.parity import Case

    s = dict(file.settings)
    sampling = s.pop(RS, None)
    options: dict[str, Any] = {key: value for key, value in s.items() if key in OPTIONS}
    if sampling is not None:
        options |= {f"{RS}.level": "token", **{f"{RS}.{key}": value for key, value in sampling.items()}}
    compare: dict[str, Number] = {}
    if "current_version" in s:
        return _a3po_case(file, {**options, "use_decoupled_loss": True, "prox_logp_method": "loglinear"})
    if "sapo" in file.function:
        names = {"tau_pos": "sapo_tau_pos", "tau_neg": "sapo_tau_neg"}
        options |= {names[key]: value for key, value in s.items() if key in names}
        return Case({**options, "use_sapo_loss": True, "recompute_logprob": True})
    if "cispo" in file.function:
        options["use_cispo_loss"] = True
    if "m2po" in file.function:
        compare["loss_mask"] = lambda e: e.kept_BT
    if "behave_imp_weight" in file.outputs:
        compare["behave_imp_weight"] = _kept_weight
    if "behave_mask" in file.outputs:
        compare["behave_mask"] = lambda e: e.kept_BT & (_kept_weight(e) > 0)
    return Case({**options, "use_decoupled_loss": True}, compare=compare, single=("weights",))


def _kept_weight(e: Evaluated) -> Any:
    return e.weight_BT.where(e.kept_BT, 0.0)


def _a3po_case(file: GoldenFile, options: dict[str, Any]) -> Case:
    """Lags are counted from `current_version`; a version below 0 is one of a prompt, so not known."""
    from dataclasses import replace

    import torch

    from stalefront.parity import Case
    from stalefront.proximal.a3po import interpolation_BT, linear, loglinear

    version = file.tensor("versions").long()
    lag_BT = torch.where(version >= 0, file.settings["current_version"] - version, -1)

    def with_lags(batch: LossInputs) -> LossInputs:
        return replace(batch, lag_BT=lag_BT)

    # The approximations are compared on padding too, which a batch does not hold.
    both = file.tensor("logp_mu"), file.tensor("logp_theta"), interpolation_BT(lag_BT)
    compare: dict[str, Number] = {
        "prox_logp_loglinear": lambda _: loglinear(*both),
        "prox_logp_linear": lambda _: linear(*both, offset=1e-10),
    }
    present = {key: ours for key, ours in compare.items() if key in file.outputs}
    return Case(options, inputs=with_lags, compare=present, single=("weights",))


FRAMEWORK = Framework(
    "areal",
    "areal-project/AReaL cbff54d645d2",
    OPTIONS,
    compose,
    case,
    tolerance=5e-8,
    sections=(f"actor.{RS}",),
    not_shared=NOT_SHARED,
    quirks=QUIRKS,
)
