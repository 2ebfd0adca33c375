"""`plan.json` and `config.json`: what was ever planned in a sweep directory. Both only grow."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stalefront.cell import Cell, stored_identity
from stalefront.choice import OptionError
from stalefront.compose import Planned
from stalefront.files import locked, read_json, write_json
from stalefront.observe import observe
from stalefront.paths import SweepPaths

FORMAT = 1

# What a frontier is drawn over, whether it has one value or many.
ALWAYS_AXES = ("seed", "optimizer.lr", "delay.S", "delay.lag_updates")
MAX_VALUE_LENGTH = 40


@dataclass(frozen=True)
class Header:
    """What a launch says about its sweep.

    Attributes
    ----------
    axes : mapping
        The keys that vary, with their values.
    collects : bool
        The directory takes single runs of any settings; nobody expects them to be alike.
    """

    name: str
    question: str
    axes: Mapping[str, Sequence[Any]]
    collects: bool = False


@dataclass(frozen=True)
class Difference:
    """A setting with one value in all cells of a launch, and the other values that cells planned before have."""

    key: str
    there: str
    here: str


def differences(paths: SweepPaths, header: Header, planned: Sequence[Planned]) -> list[Difference]:
    """Settings beside the axes that cells about to be added do not share with any cell already planned here."""
    plan = read_json(paths.plan) or {}
    known: Mapping[str, Any] = plan.get("cells") or {}
    if header.collects or not known or all(p.cell.cell_id in known for p in planned):
        return []
    axes = {*header.axes, *(plan.get("sweep", {}).get("axes") or {})}
    axes = {key.lstrip("+~").partition("@")[0] for key in axes} | set(ALWAYS_AXES)
    there = _values(entry["cell"] for entry in known.values())
    here = _values(p.cell.as_dict() for p in planned)
    found: dict[str, Difference] = {}
    for key in sorted(here, key=lambda key: (not key.endswith(".choice"), key)):
        values, before = here[key], there.get(key, set())
        name, group = key.removesuffix(".choice"), key.partition(".")[0]
        is_axis = any(name == axis or name.startswith(f"{axis}.") for axis in axes)
        # A choice stands for its options.
        if len(values) == 1 and before and not values & before and not is_axis and group not in found:
            found[name] = Difference(name, _short(before), _short(values))
    return list(found.values())


def _values(cells: Iterable[Mapping[str, Any]]) -> dict[str, set[str]]:
    """Dotted key → its values over some cells, as text."""
    found: dict[str, set[str]] = defaultdict(set)
    for cell in cells:
        for key, value in _leaves(cell, ""):
            found[key].add(value if isinstance(value, str) else json.dumps(value, sort_keys=True))
    return found


def _leaves(node: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in node.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        elif isinstance(value, list) and all(isinstance(item, Mapping) for item in value):
            yield f"{prefix}{key}.choice", "+".join(str(item.get("choice")) for item in value) or "none"
        else:
            yield f"{prefix}{key}", value


def _short(values: set[str]) -> str:
    text = " or ".join(sorted(values))
    return text if len(text) <= MAX_VALUE_LENGTH else f"{text[:MAX_VALUE_LENGTH]}…"


def record_plan(paths: SweepPaths, header: Header, planned: Sequence[Planned]) -> None:
    """Add cells to the plan and write the configuration of those that have none.

    A directory whose stored cell does not have the id it is named by is an `OptionError`, and nothing is written then.
    """
    configs = {p.cell.cell_id: _config(paths, p) for p in planned}
    cells = {p.cell.cell_id: p.cell for p in planned}
    stored = {cell_id: read_json(paths.cell(cell_id).config) for cell_id in configs}
    for cell_id, config in stored.items():
        if config is not None:
            _check(paths.cell(cell_id).config, cells[cell_id], config)
    with locked(paths.plan_lock):
        _merge(paths, header, planned, configs)
    for cell_id, config in configs.items():
        if stored[cell_id] is None or _has_moved(paths, cell_id, stored[cell_id], config):
            write_json(paths.cell(cell_id).config, config)


def _config(paths: SweepPaths, planned: Planned) -> dict[str, Any]:
    cache = planned.run.get("cache_dir")
    cache_dir = Path(cache).expanduser() if cache else paths.cache
    return {
        "format": FORMAT,
        "cell_id": planned.cell.cell_id,
        "cell": planned.cell.as_dict(),
        "run": {**planned.run, "cache_dir": str(cache_dir.absolute())},
        "overrides": list(planned.overrides),
        **({} if planned.framework is None else {"framework": dict(planned.framework)}),
    }


def _check(path: Path, cell: Cell, config: Any) -> None:
    known = isinstance(config, dict) and "cell" in config
    found, cell_id = stored_identity(config["cell"], cell) if known else "<no cell>", cell.cell_id
    if found != cell_id:
        way_out = "It was edited or belongs elsewhere: move this folder away and run the command again."
        raise OptionError(str(path), found, f"a cell with the id {cell_id}", way_out)


def _has_moved(paths: SweepPaths, cell_id: str, stored: Mapping[str, Any], config: Mapping[str, Any]) -> bool:
    """What changes no number (options of the run, where files lie) follows the last command until the cell is done."""
    differs = any(stored.get(part) != config[part] for part in ("run", "cell"))
    return differs and not observe(paths.cell(cell_id)).finished


def _merge(
    paths: SweepPaths, header: Header, planned: Sequence[Planned], configs: Mapping[str, Mapping[str, Any]]
) -> None:
    plan = read_json(paths.plan) or {"format": FORMAT, "sweep": {}, "cells": {}}
    if plan.get("format") != FORMAT:
        raise OptionError(f"format of {paths.plan}", plan.get("format"), str(FORMAT), "Use another directory.")
    axes = {key: list(values) for key, values in (plan["sweep"].get("axes") or {}).items()}
    for key, values in header.axes.items():
        known = axes.setdefault(key, [])
        known.extend(value for value in values if value not in known)
    plan["sweep"] = {"name": header.name, "question": header.question, "axes": axes}
    for p in planned:
        cell_id = p.cell.cell_id
        if cell_id not in plan["cells"]:
            plan["cells"][cell_id] = {"overrides": list(p.overrides), "cell": configs[cell_id]["cell"]}
    write_json(paths.plan, plan)
