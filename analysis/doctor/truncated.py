"""A tail that is cut off while sampling and renormalised in the log: old/μ is the kept mass on every token."""

from __future__ import annotations

from stalefront.analysis.doctor.base import Check, Found
from stalefront.analysis.doctor.records import Records
from stalefront.analysis.narrative import show
from stalefront.analysis.settings import DoctorSettings
from stalefront.analysis.signature import signature


def look(records: Records, settings: DoctorSettings) -> Found | None:
    """The moments of log old/μ have the signature of a truncated support."""
    moments = records.moments()
    if signature(moments, settings.signature).kind != "truncated support":
        return None
    evidence = (
        f"K1 = {show(moments.k1)} and K3 = {show(moments.k3)} nats, mean old/μ = {show(moments.ratio_mean)} ± "
        f"{show(moments.excess_se)} over {moments.n} tokens"
    )
    numbers = {"k1_nats": moments.k1, "k3_nats": moments.k3, "ratio_mean": moments.ratio_mean, "tokens": moments.n}
    return Found(1 - moments.ratio_mean, evidence, numbers)


CHECK = Check(
    name="truncated-support",
    severity="problem",
    words="The sampler cuts the tail (top-p, top-k, min-p) and the trainer does not: old/μ is the kept mass, below 1 "
    "on every token, and biases every ratio to μ.",
    fix="Sample with top_p=1 and without top-k or min-p, or let the trainer renormalise over the same kept tokens.",
    look=look,
    needs=("mismatch_logratio_sd_nats",),
    injectable=True,
)
