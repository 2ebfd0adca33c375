"""What a search has found: a table for the terminal, and `search.json` for a report."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stalefront.commands.columns import Column, Columns
from stalefront.search.arms import SEARCHED, Arm, Space
from stalefront.search.bisection import Estimate, FloatArray, edges, estimate
from stalefront.search.options import SearchOptions
from stalefront.search.rule import Rule, Run

FORMAT = 1
LEVEL = 0.9


@dataclass(frozen=True)
class Finding:
    """One arm.

    Attributes
    ----------
    mass_C : array, shape (C,)
        Posterior of the boundary over the intervals between candidates.
    ended_by : str
        See `Rule.ended_by`.
    """

    arm: Arm
    runs: Sequence[Run]
    mass_C: FloatArray
    eta50: Estimate
    ended_by: str


def findings(space: Space, rule: Rule, runs: Mapping[str, Sequence[Run]]) -> list[Finding]:
    """What is known about every arm."""
    found = []
    for arm in space.arms:
        mine = runs.get(arm.arm_id, ())
        mass_C = rule.posterior(mine)
        found.append(Finding(arm, mine, mass_C, estimate(rule.x_K, mass_C, LEVEL), rule.ended_by(mine)))
    return found


def as_json(found: Sequence[Finding], space: Space, options: SearchOptions) -> dict[str, Any]:
    """Content of `search.json`."""
    ends = edges(space.x_K).tolist()
    # The two outer intervals are open.
    log10_edges = [None, *ends[1:-1], None]
    return {
        "format": FORMAT,
        "search": {
            **dataclasses.asdict(options),
            "key": SEARCHED,
            "candidates": list(space.lr_K),
            "seeds": list(space.seeds),
            "level": LEVEL,
            "log10_edges": log10_edges,
        },
        "arms": [
            {
                "arm_id": one.arm.arm_id,
                "label": one.arm.label,
                "overrides": list(one.arm.overrides),
                "ended_by": one.ended_by,
                "eta50": dataclasses.asdict(one.eta50),
                "posterior": one.mass_C.tolist(),
                "runs": [dataclasses.asdict(run) for run in one.runs],
            }
            for one in found
        ],
    }


def as_columns(found: Sequence[Finding]) -> Columns:
    """Table of the arms."""
    return Columns(
        [
            Column("arm", [one.arm.label for one in found]),
            Column("runs", [str(len(one.runs)) for one in found], "right"),
            Column("collapsed", [_collapsed(one.runs) for one in found], "right"),
            Column("eta50", [f"{one.eta50.bound} {one.eta50.value:.2e}".strip() for one in found], "right"),
            Column(f"{LEVEL:.0%} interval", [_interval(one.eta50) for one in found]),
            Column("ended by", [_ended(one) for one in found]),
        ]
    )


def explanation(options: SearchOptions) -> str:
    """What the table's numbers are."""
    return (
        f"eta50 is where a run begins to collapse ({options.verdict}): the posterior median, with a {LEVEL:.0%} "
        f"interval of the posterior, if a run shows its side of the boundary with probability "
        f"{options.collapsed_prob:g} (assumed: hydra.sweeper.collapsed_prob)."
    )


def _collapsed(runs: Sequence[Run]) -> str:
    """Collapsed of decided, and what else there is."""
    decided = [run.collapsed for run in runs if run.collapsed is not None]
    return f"{sum(decided)} of {len(decided)}"


def _interval(eta50: Estimate) -> str:
    low, high = ("…" if end is None else f"{end:.2e}" for end in (eta50.low, eta50.high))
    return f"{low} to {high}"


def _ended(one: Finding) -> str:
    states = Counter(run.state for run in one.runs if run.state != "decided")
    return ", ".join([one.ended_by or "not ended", *(f"{count} {state}" for state, count in states.items())])
