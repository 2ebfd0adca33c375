"""The settings of an analysis, and names for the cell settings that vary within a sweep."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from stalefront import labels
from stalefront.analysis.fits.regime import Regime
from stalefront.analysis.verdicts import DEFAULT, Definition, default_definitions

Json = dict[str, Any]

REWARDS = ("reward_val", "reward_train")
# Settings that are axes or identity of a run, never part of an arm's name.
NOT_ARM = ("seed", "optimizer.lr", "delay.S", "delay.lag_updates")


@dataclass(frozen=True)
class PushSettings:
    """How arms are held against one another.

    Parameters
    ----------
    reference : str, optional
        Label of the arm that the others are held against; by default the rule of ``stalefront.analysis.arms``.
    """

    reference: str | None = None


@dataclass(frozen=True)
class SignatureSettings:
    """What tells one kind of sampler mismatch from another.

    Parameters
    ----------
    rounding_nats : float
        Size of a log-ratio up to which two forwards of one model differ by rounding. Assumed: 3e-5, between float32
        (some 1e-7) and float16 (some 1e-3).
    z : float
        Standard errors that make a difference from zero. Assumed: 3.
    share : float
        K3 below this share of K1 is far from K1. Assumed: a half.
    """

    rounding_nats: float = 3e-5
    z: float = 3.0
    share: float = 0.5

    def __post_init__(self) -> None:
        """Refuse settings that make no sense."""
        for name, legal, ok in (
            ("rounding_nats", "at least 0", self.rounding_nats >= 0),
            ("z", "above 0", self.z > 0),
            ("share", "in (0, 1)", 0 < self.share < 1),
        ):
            if not ok:
                raise ValueError(f"SignatureSettings.{name}={getattr(self, name)!r}: must be {legal}")


@dataclass(frozen=True)
class DoctorSettings:
    """When the doctor calls something a finding.

    Parameters
    ----------
    alpha : float
        Chance that a test of the surprisal gap or of the tail finds something in any cell of a quiet sweep; it is
        divided by the number of cells. Assumed: 1e-3.
    min_tokens : int
        Tokens that such a test needs. Assumed: 1000.
    tail_missing : float
        Observed tail below this share of the expected one is a cut tail, above it one that is there. Assumed: a half.
    alignment : float
        ``|surprisal gap|`` from this share of √mean(log² old/μ) times the sd of the surprisal on means that μ is a
        sharper or flatter version of old. Assumed: .7; a temperature gives 1 to first order, noise nearly 0.
    healthy_nats : float
        Mean |log old/μ| up to which a mismatch is a notice. Cited: .03 (see docs/doctor.md).
    flip_frac : float
        Share of flipped choices of experts up to which they are a notice. Assumed: .01.
    signature : SignatureSettings
        Kinds of mismatch.
    """

    alpha: float = 1e-3
    min_tokens: int = 1000
    tail_missing: float = 0.5
    alignment: float = 0.7
    healthy_nats: float = 0.03
    flip_frac: float = 0.01
    signature: SignatureSettings = field(default_factory=SignatureSettings)

    def __post_init__(self) -> None:
        """Refuse settings that make no sense."""
        for name in ("alpha", "tail_missing", "alignment"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(f"DoctorSettings.{name}={getattr(self, name)!r}: must lie in (0, 1)")
        if self.min_tokens < 2:
            raise ValueError(f"DoctorSettings.min_tokens={self.min_tokens!r}: must be at least 2")


@dataclass(frozen=True)
class ReportSettings:
    """What decides, and how much is drawn.

    Parameters
    ----------
    reward : str
        Reward column the verdicts read: ``reward_val`` (held-out prompts) or ``reward_train``.
    definitions : tuple of Definition
        Collapse definitions; must hold ``first_zero`` and ``remains_zero``.
    regime : Regime
        Thresholds of the ballistic/diffusive call.
    level : float
        Confidence of every interval.
    push : PushSettings
        How arms are held against one another.
    doctor : DoctorSettings
        When the doctor calls something a finding.
    max_arms : int
        Arms with a section of their own; the others appear in the summary table only.
    max_panels : int
        Panels a small-multiples figure may have; larger grids are thinned along both axes, and say so.
    max_points : int
        Validation points kept a run for drawing; the verdicts always read all of them.
    """

    reward: str = "reward_val"
    definitions: tuple[Definition, ...] = field(default_factory=default_definitions)
    regime: Regime = field(default_factory=Regime)
    level: float = 0.95
    push: PushSettings = field(default_factory=PushSettings)
    doctor: DoctorSettings = field(default_factory=DoctorSettings)
    max_arms: int = 12
    max_panels: int = 60
    max_points: int = 120

    def __post_init__(self) -> None:
        """Refuse settings that make no sense."""
        if self.reward not in REWARDS:
            raise ValueError(f"ReportSettings.reward={self.reward!r}: must be one of {', '.join(REWARDS)}")
        names = [d.name for d in self.definitions]
        if len(set(names)) != len(names) or not {"first_zero", DEFAULT} <= set(names):
            raise ValueError(f"ReportSettings.definitions={names}: must be distinct and hold first_zero and {DEFAULT}")
        if not 0.5 < self.level < 1:
            raise ValueError(f"ReportSettings.level={self.level!r}: must lie in (0.5, 1); 0.95 is usual")
        for name in ("max_arms", "max_panels", "max_points"):
            if getattr(self, name) < 2:
                raise ValueError(f"ReportSettings.{name}={getattr(self, name)!r}: must be at least 2")


def staleness(cell: Json) -> tuple[int | None, str]:
    """S of a cell (see `stalefront.labels.staleness`) and the delay it comes from."""
    delay = cell.get("delay") or {}
    return labels.staleness(cell), str(delay.get("choice", "unknown"))


def flatten(cell: Json, prefix: str = "") -> Json:
    """Dotted settings of a cell; a list of choices becomes one ``choice`` and the options of each entry."""
    flat: Json = {}
    for key, value in cell.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            flat.update(flatten(value, f"{name}."))
        elif isinstance(value, list) and all(isinstance(v, dict) for v in value):
            flat[f"{name}.choice"] = "+".join(str(v.get("choice", "?")) for v in value) or "none"
            for entry in value:
                options = {k: v for k, v in entry.items() if k != "choice"}
                flat.update(flatten(options, f"{name}.{entry.get('choice', '?')}."))
        else:
            flat[name] = value
    return flat


def arm_labels(cells: dict[str, Json], asked: frozenset[str] = frozenset()) -> dict[str, str]:
    """Name every cell by the settings that vary within the sweep, apart from S, learning rate and seed.

    Parameters
    ----------
    cells : dict
        cell_id → resolved cell.
    asked : frozenset of str
        Dotted keys that the sweep set itself; these are named even where a choice determines them.

    Returns
    -------
    dict
        cell_id → label, e.g. ``loss=cispo, beta=0.04``; ``all`` where nothing else varies. A choice stands for the
        options it determines: ``loss=cispo`` alone, if its ``epsilon_high`` never varies among the cispo cells.
    """
    flats = {cell_id: flatten(cell) for cell_id, cell in cells.items()}
    kinds = {f.get("delay.choice") for f in flats.values()} - {"none", None}
    keys = [k for k in _varying(flats, one_kind=len(kinds) <= 1) if k in asked or not _determined(k, flats)]
    short = _short_names(keys)
    labels = {}
    for cell_id, flat in flats.items():
        parts = [f"{short[k]}={_text(flat[k])}" for k in keys if k in flat]
        labels[cell_id] = ", ".join(parts) or ("all" if not keys else "other")
    return labels


def fixed_settings(cells: dict[str, Json]) -> Json:
    """Settings that every cell shares, dotted."""
    flats = [flatten(c) for c in cells.values()]
    if not flats:
        return {}
    shared = flats[0]
    return {k: v for k, v in shared.items() if all(k in f and _text(f[k]) == _text(v) for f in flats)}


def _varying(flats: dict[str, Json], *, one_kind: bool) -> list[str]:
    """Keys with more than one value, choices first. Cells without delay join the only kind of delay there is."""
    values: dict[str, set[str]] = {}
    for flat in flats.values():
        for key, value in flat.items():
            values.setdefault(key, set()).add(_text(value))
    count: dict[str, int] = {key: sum(key in f for f in flats.values()) for key in values}

    def varies(key: str) -> bool:
        if key in NOT_ARM:
            return False
        if one_kind and key.startswith("delay."):
            return key != "delay.choice" and len(values[key]) > 1
        return len(values[key]) > 1 or count[key] < len(flats)

    return sorted((k for k in values if varies(k)), key=lambda k: (not k.endswith(".choice"), k))


def _determined(key: str, flats: dict[str, Json]) -> bool:
    """Whether a group's option is the same in all cells with the same choice of that group."""
    group = key.split(".")[0]
    if key == f"{group}.choice" or key.count(".") == 0:
        return False
    by_choice: dict[str, set[str]] = {}
    for flat in flats.values():
        by_choice.setdefault(str(flat.get(f"{group}.choice")), set()).add(_text(flat.get(key, "absent")))
    return all(len(v) == 1 for v in by_choice.values())


def _short_names(keys: list[str]) -> dict[str, str]:
    """Last part of each key (the group's name for a choice), or the whole key where that is ambiguous."""
    short = {k: k.split(".")[0] if k.endswith(".choice") and k.count(".") == 1 else k.split(".")[-1] for k in keys}
    taken = list(short.values())
    return {k: (v if taken.count(v) == 1 else k) for k, v in short.items()}


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)
