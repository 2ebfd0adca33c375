"""`plan.json` and `config.json`: what was ever planned in a sweep directory. Both only grow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stalefront.cell import identity
from stalefront.choice import OptionError
from stalefront.compose import Planned
from stalefront.files import locked, read_json, write_json
from stalefront.observe import observe
from stalefront.paths import SweepPaths

FORMAT = 1


@dataclass(frozen=True)
class Header:
    """What a launch says about its sweep: name, question, and the keys that vary with their values."""

    name: str
    question: str
    axes: Mapping[str, Sequence[Any]]


def record_plan(paths: SweepPaths, header: Header, planned: Sequence[Planned]) -> None:
    """Add cells to the plan and write the configuration of those that have none.

    A directory whose stored cell does not have the id it is named by is an `OptionError`, and nothing is written then.
    """
    configs = {p.cell.cell_id: _config(paths, p) for p in planned}
    stored = {cell_id: read_json(paths.cell(cell_id).config) for cell_id in configs}
    for cell_id, config in stored.items():
        if config is not None:
            _check(paths.cell(cell_id).config, cell_id, config)
    with locked(paths.plan_lock):
        _merge(paths, header, planned, configs)
    for cell_id, config in configs.items():
        if stored[cell_id] is None or _wants_other_run(paths, cell_id, stored[cell_id], config):
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
    }


def _check(path: Path, cell_id: str, config: Any) -> None:
    found = identity(config["cell"]) if isinstance(config, dict) and "cell" in config else "<no cell>"
    if found != cell_id:
        way_out = "It was edited or belongs elsewhere: move this folder away and run the command again."
        raise OptionError(str(path), found, f"a cell with the id {cell_id}", way_out)


def _wants_other_run(paths: SweepPaths, cell_id: str, stored: Mapping[str, Any], config: Mapping[str, Any]) -> bool:
    """Options that change no number follow the last command until the cell has finished."""
    return bool(stored.get("run") != config["run"]) and not observe(paths.cell(cell_id)).finished


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
