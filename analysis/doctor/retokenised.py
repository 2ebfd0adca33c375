"""Text that went through the tokenizer again: sampled tokens that have no log-prob any more."""

from __future__ import annotations

import numpy as np

from stalefront.analysis.doctor.base import Check, Found
from stalefront.analysis.doctor.records import Records
from stalefront.analysis.narrative import show
from stalefront.analysis.settings import DoctorSettings


def look(records: Records, settings: DoctorSettings) -> Found | None:
    """Sampled tokens lost their log-prob."""
    share = records.batches("misaligned_frac")
    hit = share > 0
    if not hit.any():
        return None
    mean = records.mean("misaligned_frac")
    evidence = (
        f"{show(mean)} of the sampled tokens in {int(hit.sum())} of {len(share)} rollout batches, at most "
        f"{show(float(np.nanmax(share)))} in one"
    )
    return Found(mean, evidence, {"misaligned_frac": mean, "batches": int(hit.sum())})


CHECK = Check(
    name="retokenised",
    severity="problem",
    words="Text was encoded again between sampler and trainer: the tokens sampled are not those trained on.",
    fix="Hand token ids on, not text: token in, token out.",
    look=look,
    needs=("misaligned_frac",),
    optional=True,
    injectable=True,
)
