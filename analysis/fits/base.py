"""What every fit takes and returns: outcomes of cells under one definition, and a JSON-able :class:`Fit`.

Notation of the outcome frame (one row a cell, ``N`` rows):

================  ==================================================================================
``S``             versions a token's age can take (1 = on-policy)
``lr``            learning rate asked for, η
``seed``          seed
``collapsed``     True, False, or None where the record cannot decide
``step_lo/hi``    event in (step_lo, step_hi], learner steps; absent without event
``t_eta_lo/hi``   Σ lr up to those steps; the paper's plain t·η where lr is constant
``censor_t_eta``  Σ lr up to where a cell without event was last seen
================  ==================================================================================
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import asdict, dataclass, field
from typing import Any

import pandas as pd

OUTCOME_COLUMNS = (
    "cell_id",
    "S",
    "lr",
    "seed",
    "collapsed",
    "step_lo",
    "step_hi",
    "t_eta_lo",
    "t_eta_hi",
    "censor_t_eta",
)


@dataclass(frozen=True)
class Interval:
    """An interval with open ends: None means unbounded, and is never written as a number.

    ``kind`` says what it is: ``bracket`` (the grid brackets the value), ``set`` (every value the data admit),
    ``profile``, ``t``, ``bootstrap``; ``level`` is its confidence, None for sets and brackets.
    """

    lo: float | None
    hi: float | None
    kind: str
    level: float | None = None

    def contains(self, value: float) -> bool:
        """Whether ``value`` lies in the closed interval; rounding at an end doesn't count against it."""
        slack = 1e-9 * max(abs(value), 1e-300)
        return (self.lo is None or self.lo <= value + slack) and (self.hi is None or value - slack <= self.hi)


@dataclass(frozen=True)
class Constant:
    """A fitted number (None where only an interval is identified) with its interval, unit and meaning."""

    value: float | None
    interval: Interval | None
    unit: str
    meaning: str


@dataclass(frozen=True)
class Fit:
    """A fitted law.

    Parameters
    ----------
    name, definition, arm : str
        Which law, on which collapse definition, in which arm of the sweep.
    constants : dict
        Name → :class:`Constant`.
    n, n_events, n_left, n_right, n_undecided : int
        Units used; among them with an observed event, left- and right-censored; left out as undecided.
    method : str
        How it was computed, in a sentence.
    settings : dict
        Every parameter of the method.
    input_hash : str
        sha256 of the rows used.
    rows : list of dict
        Further results that form a table.
    tests : dict
        Log-likelihoods, likelihood ratios and p-values, by name.
    notes : list of str
        What a reader must know: censoring, degeneracy, refusals.
    """

    name: str
    definition: str
    arm: str
    constants: dict[str, Constant]
    n: int
    n_events: int
    n_left: int
    n_right: int
    n_undecided: int
    method: str
    settings: dict[str, Any]
    input_hash: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    tests: dict[str, float | None] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Plain objects for ``fits.json``; an unbounded or unidentified number is null."""
        return {k: finite(v) for k, v in asdict(self).items()}


def finite(value: Any) -> Any:
    """Copy of nested lists and dicts with non-finite floats replaced by None."""
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(v) for v in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return value


def outcomes(table: pd.DataFrame, definition: str, arm: str) -> pd.DataFrame:
    """Outcome frame of one arm under one definition.

    A cell without event that did not reach its horizon has not shown that it survives: it is undecided, and its last
    step is kept as a censoring point.

    Parameters
    ----------
    table : DataFrame
        Run table.
    definition, arm : str
        Verdict name and arm label.
    """
    rows = table[table["arm"] == arm]
    event = rows[f"{definition}_event"]
    reached = rows["end"] == "horizon"
    collapsed = [e if e is True or (e is False and r) else None for e, r in zip(event, reached, strict=True)]
    frame = pd.DataFrame(
        {
            "cell_id": rows["cell_id"],
            "S": rows["S"],
            "lr": rows["lr"],
            "seed": rows["seed"],
            "collapsed": pd.Series(collapsed, index=rows.index, dtype=object),
            "step_lo": rows[f"{definition}_step_lo"],
            "step_hi": rows[f"{definition}_step_hi"],
            "t_eta_lo": rows[f"{definition}_lr_sum_lo"],
            "t_eta_hi": rows[f"{definition}_lr_sum_hi"],
            "censor_t_eta": [None if c is True else v for c, v in zip(collapsed, rows["lr_sum_end"], strict=True)],
        },
        columns=list(OUTCOME_COLUMNS),
    )
    return frame.reset_index(drop=True)


def decided(frame: pd.DataFrame) -> pd.DataFrame:
    """Rows with a known outcome, S and a positive lr (a learning rate of 0 has no logarithm and cannot collapse)."""
    known = frame["collapsed"].notna() & frame["S"].notna() & frame["lr"].notna()
    rows = frame[known]
    rows = rows[rows["lr"].astype(float) > 0]
    return rows.assign(
        S=rows["S"].astype(float), lr=rows["lr"].astype(float), collapsed=rows["collapsed"].astype(bool)
    ).reset_index(drop=True)


def input_hash(frame: pd.DataFrame) -> str:
    """sha256 over the rows of an outcome frame: sorted, floats by repr, absent values empty."""
    lines = sorted(
        ",".join("" if v is None or (isinstance(v, float) and math.isnan(v)) else repr(v) for v in row)
        for row in frame[list(OUTCOME_COLUMNS)].astype(object).itertuples(index=False, name=None)
    )
    return hashlib.sha256("\n".join(lines).encode("utf-8")).hexdigest()
