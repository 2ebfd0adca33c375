"""Short names for the cells of a sweep."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any


def varying(overrides: Sequence[Sequence[str]]) -> set[str]:
    """Override keys that do not have one and the same value in every list of overrides."""
    values: dict[str, set[str]] = defaultdict(set)
    counts: Counter[str] = Counter()
    for override in (text for one in overrides for text in one):
        key, _, value = override.partition("=")
        values[key].add(value)
        counts[key] += 1
    return {key for key, found in values.items() if len(found) > 1 or counts[key] < len(overrides)}


def only(keys: set[str], overrides: Sequence[str]) -> list[str]:
    """Those of the overrides whose key is in `keys`."""
    return [override for override in overrides if override.partition("=")[0] in keys]


def clock(seconds: float) -> str:
    """Minutes and seconds, hours where there are any: 03:20, 1:03:20."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes:02}:{rest:02}"


def duration(seconds: float) -> str:
    """A rough time in words: 40 s, 3 min, 2.5 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def staleness(cell: Mapping[str, Any]) -> int | None:
    """S of a recorded cell, as `Cell.S` has it, without the imports that a `Cell` needs.

    The number of versions a token's age can take: `delay.S` under reuse, `delay.lag_updates` + 1 under lag, 1 without
    delay; None where the cell does not say.
    """
    delay = cell.get("delay") or {}
    if delay.get("choice") == "none":
        return 1
    if delay.get("choice") == "lag" and delay.get("lag_updates") is not None:
        return int(delay["lag_updates"]) + 1
    return None if delay.get("S") is None else int(delay["S"])
