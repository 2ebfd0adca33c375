"""Options of `hydra/sweeper=frontier`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from stalefront.choice import OptionError, is_count
from stalefront.search.bisection import resolution


@dataclass(frozen=True)
class SearchOptions:
    """How to search; what is searched is said by the axes.

    Attributes
    ----------
    runs_per_arm : int
        Cells that an arm may cost.
    batch : int or None
        Cells asked at once; None for one an arm.
    verdict : str
        Which definition of collapse decides a cell.
    collapsed_prob : float
        p: the probability that a cell on one side of the boundary shows that side.
    tolerance : float or None
        An arm stops when the posterior standard deviation of its log10 η50 is below it, in dex.
    points_per_decade : int
        Candidate learning rates.
    """

    runs_per_arm: int
    batch: int | None
    verdict: str
    collapsed_prob: float
    tolerance: float | None
    points_per_decade: int

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        for name in ("runs_per_arm", "points_per_decade"):
            self._require(_is_whole(getattr(self, name)), name, "a whole number of at least 1")
        self._require(self.batch is None or _is_whole(self.batch), "batch", "a whole number of at least 1, or null")
        names = verdict_names()
        self._require(self.verdict in names, "verdict", f"one of {', '.join(names)}")
        p = self.collapsed_prob
        legal = "above 0.5 (an answer that says nothing) and below 1 (one that is never wrong)"
        self._require(_is_number(p) and 0.5 < p < 1, "collapsed_prob", legal)
        floor = resolution(self.points_per_decade)
        legal = f"null, or more than {floor:.3g} dex: what is left between two candidates"
        reachable = self.tolerance is None or (_is_number(self.tolerance) and self.tolerance > floor)
        self._require(reachable, "tolerance", legal, "Raise hydra.sweeper.points_per_decade.")

    def _require(self, holds: bool, name: str, legal: str, way_out: str = "") -> None:
        if not holds:
            raise OptionError(f"hydra.sweeper.{name}", getattr(self, name), legal, way_out)


def verdict_names() -> list[str]:
    """Definitions of collapse that the report knows."""
    from stalefront.analysis.verdicts import default_definitions

    return [definition.name for definition in default_definitions()]


def _is_whole(value: Any) -> bool:
    return type(value) is int and is_count(value)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)
