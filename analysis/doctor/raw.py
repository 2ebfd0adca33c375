"""A sampler that cuts or re-tempers and logs as if it did not: old/μ is 1 although the tokens are from elsewhere."""

from __future__ import annotations

import math

from stalefront.analysis.doctor.base import Check, Found, critical_z
from stalefront.analysis.doctor.records import Records
from stalefront.analysis.doctor.surprisal import Surprisal, surprisal
from stalefront.analysis.narrative import show
from stalefront.analysis.settings import DoctorSettings
from stalefront.analysis.signature import signature


def look(records: Records, settings: DoctorSettings) -> Found | None:
    """The surprisal gap or the missing tail is beyond what was logged, and the tail isn't shown to be there."""
    seen, z = surprisal(records), critical_z(settings.alpha)
    if seen.n < settings.min_tokens or signature(seen.moments, settings.signature).kind == "truncated support":
        return None
    cut = seen.tail_cut(z, settings.tail_missing)
    if not (cut or seen.gap_unexplained(z)) or seen.tail_there(z, settings.tail_missing):
        return None
    return Found(abs(seen.gap), describe(seen), numbers(seen))


def describe(seen: Surprisal) -> str:
    """The gap, what the log explains of it, and the tail."""
    text = (
        f"surprisal gap {show(seen.gap)} ± {show(seen.gap_se)} nats over {seen.n} tokens, where the logged mismatch "
        f"allows {show(seen.gap_explained)}"
    )
    if math.isfinite(seen.tail_expected):
        text += f"; tokens of the tail: {show(seen.tail_observed)} of all, expected {show(seen.tail_expected)}"
    return text


def numbers(seen: Surprisal) -> dict[str, float]:
    """The same by name."""
    return {
        "surprisal_gap_nats": seen.gap,
        "surprisal_gap_se_nats": seen.gap_se,
        "explained_nats": seen.gap_explained,
        "tail_expected_frac": seen.tail_expected,
        "tail_observed_frac": seen.tail_observed,
        "tokens": seen.n,
    }


CHECK = Check(
    name="logged-raw",
    severity="problem",
    words="The sampler draws from a cut or re-tempered distribution and logs the raw one: K1 to K3 of old/μ cannot see "
    "it, and no correction can act on it.",
    fix="Log processed log-probs (vLLM: logprobs_mode=processed_logprobs), or sample with top_p=1, no top-k or min-p, "
    "and the trainer's temperature.",
    look=look,
    needs=("surprisal_gap_nats",),
    injectable=True,
)
