"""What one cell left for the doctor: the columns that its checks read, and what is pooled from them."""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stalefront.analysis.doctor.reader import read_columns
from stalefront.analysis.signature import Moments, of_batches
from stalefront.analysis.verdicts.base import BoolArray, FloatArray

Json = dict[str, Any]

MISMATCH = ("k1_nats", "k3_nats", "logratio_abs_mean", "logratio_sd_nats", "chi2")
COLUMNS = (
    *("step", "version", "stepped", "tokens", "batch_tokens", "at_refresh"),
    *("lag_mean_updates", "lag_max_updates", "lag_gen_mean_updates", "theta_mu_logratio_mean"),
    *(f"mismatch_{name}" for name in MISMATCH),
    *("logratio_var_nats2", "mismatch_var_share", "lag_var_share"),
    *("surprisal_gap_nats", "surprisal_gap_se_nats", "tail_expected_frac", "tail_observed_frac"),
    *("kv_stale_frac", "misaligned_frac", "expert_flip_frac", "expert_flip_token_frac", "route_fallback_frac"),
)
LAYER = "expert_flip_layer_"
# Columns that are over a whole rollout batch, of which a learner step may train on a part.
WHOLE = ("surprisal_", "tail_", "kv_stale_", "misaligned_", "expert_flip_", "route_fallback_")
# What stood for the mismatch before it had columns of its own.
OLDER = ("old_mu_logratio_mean", "old_mu_k3_nats", "old_mu_logratio_abs_mean")
READ = frozenset((*COLUMNS, *OLDER))


@dataclass(frozen=True)
class Records:
    """One cell.

    Parameters
    ----------
    columns : mapping
        Column → shape (R,), one entry a learner step in order; NaN where it is null or not a number.
    known : mapping
        Column → shape (R,), whether it is not null: tells an absent value from a NaN.
    named : frozenset of str
        Columns that the rows have at all, null or not; those of a later version are missing from older records.
    warnings : tuple of str
        Of the outcome.
    """

    cell_id: str
    cell: Json
    columns: Mapping[str, FloatArray]
    known: Mapping[str, BoolArray]
    named: frozenset[str]
    warnings: tuple[str, ...] = ()

    @property
    def rows(self) -> int:
        """Learner steps."""
        return len(self.columns["step"])

    @property
    def first_of_batch(self) -> BoolArray:
        """The one row of every rollout batch that stands for it, shape (R,)."""
        return np.equal(self.columns["at_refresh"], 1.0)

    def batches(self, name: str) -> FloatArray:
        """A column at the first learner step of every rollout batch."""
        return self.columns[name][self.first_of_batch]

    def tokens_of(self, name: str) -> FloatArray:
        """Tokens that a column is over, at the first learner step of every rollout batch."""
        trained, whole = self.batches("tokens"), self.batches("batch_tokens")
        return np.where(np.isfinite(whole), whole, trained) if name.startswith(WHOLE) else trained

    def has(self, name: str) -> bool:
        """Whether a column was measured in some step."""
        return bool(self.known[name].any())

    @property
    def trl(self) -> bool:
        """Whether TRL ran it, which records no log-ratios."""
        return choices(self.cell, "engine") == ["trl"]

    @property
    def injectors(self) -> list[str]:
        """Mismatch that the configuration asks for."""
        return [str(entry.get("choice")) for entry in injected(self.cell)]

    def moments(self) -> Moments:
        """Moments of log old/μ over the rollout batches."""
        tokens = self.batches("tokens")
        return of_batches(tokens, *(self.batches(f"mismatch_{name}") for name in MISMATCH))

    def mean(self, name: str) -> float:
        """Mean of a column over the tokens of the batches where it is finite; NaN without any."""
        value, tokens = self.batches(name), self.tokens_of(name)
        ok = np.isfinite(value) & (tokens > 0)
        return float(np.average(value[ok], weights=tokens[ok])) if ok.any() else math.nan


def entries(cell: Mapping[str, Any], group: str) -> list[Json]:
    """Entries of a group of a recorded cell, whether it is one choice or a list of them; none of ``none``."""
    found = cell.get(group)
    listed = found if isinstance(found, list) else [found]
    mappings = [{"choice": one} if isinstance(one, str) else one for one in listed if one]
    return [one for one in mappings if one.get("choice") not in (None, "none")]


def choices(cell: Mapping[str, Any], group: str) -> list[str]:
    """Names of the choices of a group."""
    return [str(entry["choice"]) for entry in entries(cell, group)]


def injected(cell: Mapping[str, Any]) -> list[Json]:
    """Entries of the mismatch that have a strength."""
    if cell.get("target_kl") == 0:
        return []
    return [entry for entry in entries(cell, "mismatch") if entry.get("strength") != 0]


def read_records(path: Path, cell_id: str, cell: Json, outcome: Mapping[str, Any]) -> Records:
    """Records of one cell; of a step that stands twice the last one counts, and the row before the first is left out.

    Raises
    ------
    ValueError
        A line other than the last that is not a step record.
    """
    rows = {row.values["step"]: row for row in read_columns(path, _wanted)}
    ordered = [rows[step] for step in sorted(step for step in rows if step)]
    named = ordered[-1].named if ordered else frozenset[str]()
    found = [_name_as_now(row.values, cell) for row in ordered]
    wanted = [*COLUMNS, *sorted(name for name in named if name.startswith(LAYER))]
    values = {name: [row.get(name) for row in found] for name in wanted}
    # NaN for None is what NumPy itself does.
    columns = {name: np.array(column, dtype=np.float64) for name, column in values.items()}
    known = {name: np.array([v is not None for v in column], dtype=np.bool_) for name, column in values.items()}
    warnings = tuple(str(text) for text in outcome.get("warnings") or [])
    return Records(cell_id, cell, columns, known, named, warnings)


def _wanted(name: str) -> bool:
    return name in READ or name.startswith(LAYER)


def _name_as_now(row: dict[str, float | None], cell: Json) -> dict[str, float | None]:
    """Give old/μ of older records its present name; under another proximal policy it was no mismatch."""
    if "mismatch_k3_nats" in row or choices(cell, "proximal") not in ([], ["recompute"]):
        return row
    mean, k3, size = (row.get(name) for name in OLDER)
    k1 = None if mean is None else -mean
    return row | {"mismatch_k1_nats": k1, "mismatch_k3_nats": k3, "mismatch_logratio_abs_mean": size}


def inert(warnings: tuple[str, ...]) -> list[str]:
    """Controls that never acted, as the outcome names them: ``correction.icepop``, …"""
    named: list[str] = []
    for text in warnings:
        if text.startswith("inert: "):
            named += ast.literal_eval(text.removeprefix("inert: "))
    return named
