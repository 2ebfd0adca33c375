"""Sampler and trainer that use different temperatures, logged or not."""

from __future__ import annotations

from stalefront.analysis.doctor.base import Check, Found, critical_z
from stalefront.analysis.doctor.raw import describe, numbers
from stalefront.analysis.doctor.records import Records
from stalefront.analysis.doctor.surprisal import Surprisal, surprisal
from stalefront.analysis.narrative import show
from stalefront.analysis.settings import DoctorSettings
from stalefront.analysis.signature import signature


def look(records: Records, settings: DoctorSettings) -> Found | None:
    """The tokens are too likely or too unlikely: beyond the log with the tail there, or as the log follows them."""
    seen, z = surprisal(records), critical_z(settings.alpha)
    if seen.n < settings.min_tokens:
        return None
    raw = seen.gap_unexplained(z) and seen.tail_there(z, settings.tail_missing)
    kind = signature(seen.moments, settings.signature).kind
    logged = kind not in ("none", "truncated support") and not seen.gap_unexplained(z)
    aligned = abs(seen.gap) > z * seen.gap_se and seen.alignment >= settings.alignment
    if not raw and not (logged and aligned and not seen.tail_cut(z, settings.tail_missing)):
        return None
    how = "logged raw (unless its tail is cut in part)" if raw else "logged as drawn"
    evidence = f"{describe(seen)}; {how}, the sampler is {_which(seen)}"
    return Found(abs(seen.gap), evidence, numbers(seen))


def _which(seen: Surprisal) -> str:
    """Warmer or colder, and by how much: with μ ∝ old^β the gap is (1 − β) Var(x) to first order."""
    word = "colder" if seen.gap < 0 else "warmer"
    beta = 1 - seen.gap / seen.sd**2
    return word if beta <= 0 else f"{word}: about {show(1 / beta)} times the trainer's temperature"


CHECK = Check(
    name="temperature",
    severity="problem",
    words="Sampler and trainer use different temperatures.",
    fix="Give both the same temperature; the trainer divides its logits by it before the softmax.",
    look=look,
    needs=("surprisal_gap_nats",),
    injectable=True,
)
