"""Routes that were to be replayed and were not handed over."""

from __future__ import annotations

from stalefront.analysis.doctor.base import Check, Found
from stalefront.analysis.doctor.records import Records, choices
from stalefront.analysis.narrative import show
from stalefront.analysis.settings import DoctorSettings

# Replays what the trainer itself chose, so nothing has to be handed over.
OWN = "r2"


def look(records: Records, settings: DoctorSettings) -> Found | None:
    """Some routes of tokens that were fed are unknown, and the sampler's routes are replayed."""
    share, replay = records.mean("route_fallback_frac"), choices(records.cell, "replay")
    if not share > 0 or not replay or replay == [OWN]:
        return None
    evidence = f"{show(share)} of the (layer, token) choices of fed tokens, with replay {', '.join(replay)}"
    return Found(share, evidence, {"route_fallback_frac": share})


CHECK = Check(
    name="replay-fallback",
    severity="problem",
    words="Some routes were not handed over, so replay leaves these tokens to the trainer's own routers.",
    fix="Have the sampler return the experts of every token it is fed, those of the prompt (and of a cached prefix) "
    "included.",
    look=look,
    needs=("route_fallback_frac",),
    optional=True,
)
