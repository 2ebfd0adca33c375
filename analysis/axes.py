"""Which arms of a sweep are levels of one axis: those that differ in nothing but the settings of one group.

``stalefront.analysis.arms`` compares methods at equal surroundings; here it is the surroundings that differ.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from stalefront.analysis.fits.levels import Level
from stalefront.analysis.narrative import show
from stalefront.analysis.records import read_plan
from stalefront.analysis.settings import NOT_ARM, Json, flatten

# Groups whose settings are axes, with the settings outside the group that belong to it.
AXES = {"mismatch": ("target_kl",), "replay": ()}
NONE = "none"


@dataclass(frozen=True)
class Axis:
    """Arms that differ in the settings of one group only.

    Parameters
    ----------
    group : str
        One of ``AXES``.
    key : str
        The setting that varies, or the group where several do.
    name : str
        What these arms share and others do not; empty if there are no others.
    levels : tuple of (Level, str)
        Level and label of its arm, the reference first: ``none``, which is size 0 too, else the smallest or the first
        by name.
    """

    group: str
    key: str
    name: str
    levels: tuple[tuple[Level, str], ...]


def settings_of(sweep_dir: Path, table: pd.DataFrame) -> dict[str, Json]:
    """Dotted settings of every arm, without seed, learning rate and S.

    Cells without delay belong to the kind of delay of the others, as everywhere.
    """
    planned = read_plan(sweep_dir).get("cells") or {}
    out: dict[str, Json] = {}
    for cell_id, arm in table[["cell_id", "arm"]].itertuples(index=False, name=None):
        flat = flatten((planned.get(cell_id) or {}).get("cell") or {})
        kept = {k: v for k, v in flat.items() if k not in NOT_ARM}
        if kept.get("delay.choice") == "none":
            del kept["delay.choice"]
        out.setdefault(arm, {}).update(kept)
    return out


def find_axes(settings: dict[str, Json], named: tuple[str, ...] = ()) -> list[Axis]:
    """Group the arms into axes.

    Parameters
    ----------
    settings : dict
        Arm → dotted settings.
    named : tuple of str
        Keys that the sweep varies.
    """
    found: list[Axis] = []
    for group in AXES:
        by_rest: dict[str, dict[str, Json]] = {}
        for arm, flat in settings.items():
            own = {k: v for k, v in flat.items() if _belongs(k, group)}
            rest = {k: v for k, v in flat.items() if k not in own}
            by_rest.setdefault(json.dumps(rest, sort_keys=True), {})[arm] = own
        names = _names([json.loads(key) for key in by_rest])
        for name, mine in zip(names, by_rest.values(), strict=True):
            if len({_text(v) for v in mine.values()}) > 1:
                found.append(_axis(group, name, mine, named))
    return sorted(found, key=lambda a: (list(AXES).index(a.group), a.name))


def _belongs(key: str, group: str) -> bool:
    return key.split(".")[0] == group or key in AXES[group]


def _names(rests: list[Json]) -> list[str]:
    """What tells each of the settings from the others."""
    varying = sorted({k for r in rests for k in r if len({_text(o.get(k)) for o in rests}) > 1})
    chosen = {k.split(".")[0] for k in varying if k.endswith(".choice")}
    keys = [k for k in varying if k.endswith(".choice") or k.split(".")[0] not in chosen]
    names = [_named(keys, r) for r in rests]
    return names if len(set(names)) == len(names) else [_named(varying, r) for r in rests]


def _named(keys: list[str], settings: Json) -> str:
    """``minibatches=4, loss=grpo``: the last part of each key, or the whole where that is ambiguous."""
    last = {k: _last(k) for k in keys}
    short = {k: v if list(last.values()).count(v) == 1 else k.removesuffix(".choice") for k, v in last.items()}
    return ", ".join(f"{short[k]}={_text(settings[k])}" for k in keys if settings.get(k) is not None)


def _axis(group: str, name: str, own: dict[str, Json], named: tuple[str, ...]) -> Axis:
    """Levels of one axis, from the settings of its group in every arm.

    One setting that tells every level from the others names them, those that the sweep names first; else all that vary.
    """
    keys = sorted({k for v in own.values() for k in v if len({_text(o.get(k)) for o in own.values()}) > 1})
    asked = {_last(n): n for n in named}
    keys.sort(key=lambda k: _last(k) not in asked)
    alone = [k for k in keys if len({_text(v.get(k)) for v in own.values()}) == len(own)]
    keys = alone[:1] or keys
    levels = [(_level(keys, v), arm) for arm, v in own.items()]
    levels.sort(key=lambda e: (e[0].label != NONE, math.inf if e[0].size is None else e[0].size, e[0].label))
    name_of = asked.get(_last(keys[0]), keys[0].removesuffix(".choice")) if len(keys) == 1 else group
    return Axis(group, name_of, name, tuple(levels))


def _last(key: str) -> str:
    return key.removesuffix(".choice").split(".")[-1]


def _level(keys: list[str], own: Json) -> Level:
    """Name and size of a level; a setting that is absent is that of a choice without it."""
    if len(keys) == 1:
        value = own.get(keys[0])
        if value is None:
            return Level(NONE, 0.0)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return Level(_text(value))
        return Level(NONE if value == 0 else show(float(value)), float(value))
    plain = all(own.get(k) in (None, NONE) for k in keys)
    return Level(NONE if plain else _named(keys, own))


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)
