"""How large the mismatch of the sampler is, and of which kind."""

from __future__ import annotations

import math

from stalefront.analysis.doctor.base import Check, Found, severity_of
from stalefront.analysis.doctor.records import Records
from stalefront.analysis.narrative import show
from stalefront.analysis.settings import DoctorSettings
from stalefront.analysis.signature import signature


def look(records: Records, settings: DoctorSettings) -> Found | None:
    """log old/μ is beyond rounding; a truncated support is a finding of its own."""
    moments = records.moments()
    found = signature(moments, settings.signature)
    if found.kind in ("none", "truncated support") or not moments.abs_mean > settings.signature.rounding_nats:
        return None
    evidence = (
        f"mean |log old/μ| = {show(moments.abs_mean)}, K1 = {_with_error(moments.k1, moments.k1_se)}, K3 = "
        f"{show(moments.k3)} nats, mean old/μ − 1 = {_with_error(moments.excess, moments.excess_se)} over {moments.n} "
        f"tokens; signature: {found.kind} ({found.why}{f'; some {found.needed} would' if found.needed else ''})"
    )
    evidence += f"; {moments.left_out} batches are not finite and left out" if moments.left_out else ""
    names = {"logratio_abs_mean": moments.abs_mean, "k1_nats": moments.k1, "k3_nats": moments.k3}
    severity = severity_of(moments.abs_mean, settings.healthy_nats)
    return Found(moments.k3, evidence, {**names, "ratio_mean": moments.ratio_mean, "tokens": moments.n}, severity)


def _with_error(value: float, error: float) -> str:
    return f"{show(value)} ± {show(error)}" if math.isfinite(error) else show(value)


CHECK = Check(
    name="sampler-mismatch",
    severity="notice",
    words="Sampler and trainer give different log-probs for the same weights and tokens.",
    fix="Bring their numerics together (precision of weights, of the head, of the logged number); what remains is for "
    "a correction of old/μ, such as correction=icepop or token_tis with anchor=old/mu or theta/mu.",
    look=look,
    needs=("mismatch_k3_nats",),
    injectable=True,
)
