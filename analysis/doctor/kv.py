"""A key-value cache that outlives the weights it was computed with."""

from __future__ import annotations

import numpy as np

from stalefront.analysis.doctor.base import Check, Found
from stalefront.analysis.doctor.records import Records
from stalefront.analysis.narrative import show
from stalefront.analysis.settings import DoctorSettings

SIZE = "mismatch_logratio_abs_mean"


def look(records: Records, settings: DoctorSettings) -> Found | None:
    """Tokens are marked as drawn with stale states, or a mismatch begins when the weights first move."""
    return _marked(records) or _begins(records, settings)


def _marked(records: Records) -> Found | None:
    stale = records.batches("kv_stale_frac")
    hit = stale > 0
    if not hit.any():
        return None
    share = records.mean("kv_stale_frac")
    evidence = f"{show(share)} of the tokens, in {int(hit.sum())} of {len(stale)} rollout batches, have stale states"
    return Found(share, evidence, {"kv_stale_frac": share, "batches": int(hit.sum())})


def _begins(records: Records, settings: DoctorSettings) -> Found | None:
    """The first batch is from the start weights; a later one counts once an update was applied before it."""
    size, updates = records.batches(SIZE), records.batches("version") - records.batches("stepped")
    later = size[(updates > 0) & np.isfinite(size)]
    rounding = settings.signature.rounding_nats
    if not len(later) or not (updates[0] == 0 and size[0] <= rounding) or float(np.median(later)) <= rounding:
        return None
    typical = float(np.median(later))
    evidence = (
        f"mean |log old/μ| is {show(float(size[0]))} nats in the first rollout batch and {show(typical)} (median) in "
        f"the {len(later)} after the first update"
    )
    return Found(typical, evidence, {"first_nats": float(size[0]), "later_nats": typical, "batches": len(later)})


CHECK = Check(
    name="kv-not-cleared",
    severity="problem",
    words="The sampler keeps something of older weights: a key-value or prefix cache that is not cleared, or weights "
    "that did not all arrive.",
    fix="Clear the key-value and prefix caches whenever the sampler gets new weights, and compare its weights with the "
    "trainer's after a transfer.",
    look=look,
    needs=("kv_stale_frac", SIZE),
    injectable=True,
)
