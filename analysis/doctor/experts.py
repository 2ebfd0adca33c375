"""Experts that the trainer would not choose under the same weights, where the sampler's are not replayed."""

from __future__ import annotations

import numpy as np

from stalefront.analysis.doctor.base import Check, Found, severity_of
from stalefront.analysis.doctor.records import LAYER, Records, choices
from stalefront.analysis.narrative import show
from stalefront.analysis.settings import DoctorSettings


def look(records: Records, settings: DoctorSettings) -> Found | None:
    """Some choices flip, and the sampler's routes are not replayed."""
    share, tokens = records.mean("expert_flip_frac"), records.mean("expert_flip_token_frac")
    # R2 replays the trainer's own routes, which leaves these flips as they are.
    if not share > 0 or "r3" in choices(records.cell, "replay"):
        return None
    evidence = f"{show(share)} of all (layer, token) choices differ, and {show(tokens)} of the tokens have such a layer"
    layers = {name.removeprefix(LAYER).removesuffix("_frac"): records.mean(name) for name in _layers(records)}
    if layers:
        worst = max(sorted(layers), key=lambda layer: np.nan_to_num(layers[layer], nan=-1.0))
        evidence += f"; most in layer {worst}: {show(layers[worst])}"
    numbers = {"expert_flip_frac": share, "expert_flip_token_frac": tokens}
    return Found(share, evidence, numbers, severity_of(share, settings.flip_frac))


def _layers(records: Records) -> list[str]:
    return [name for name in records.columns if name.startswith(LAYER)]


CHECK = Check(
    name="expert-flips",
    severity="notice",
    words="Sampler and trainer take different experts for the same tokens under the same weights.",
    fix="Record the routes while sampling and replay them in the trainer: replay=r3.",
    look=look,
    needs=("expert_flip_frac",),
    optional=True,
    injectable=True,
)
