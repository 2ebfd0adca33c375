"""Every file name of a sweep directory and of a cell directory, in one place."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class SweepPaths:
    """Files of one sweep directory."""

    root: Path

    @property
    def plan(self) -> Path:
        """Every cell ever planned here."""
        return self.root / "plan.json"

    @property
    def plan_lock(self) -> Path:
        """Held while the plan is read, merged and written."""
        return self.root / ".plan.lock"

    @property
    def cells(self) -> Path:
        """One folder a cell."""
        return self.root / "cells"

    @property
    def cache(self) -> Path:
        """Supervised warm-ups, shared by the cells of a seed."""
        return self.root / "cache"

    @property
    def jobs(self) -> Path:
        """One folder a submission to Slurm: what was asked for, and the logs of its jobs."""
        return self.root / "jobs"

    @property
    def code(self) -> Path:
        """Frozen copies of this package, for jobs that wait in a queue."""
        return self.root / "code"

    @property
    def submit_lock(self) -> Path:
        """Held while cells are submitted, or the ends of jobs are written down."""
        return self.root / ".submit.lock"

    @property
    def journal(self) -> Path:
        """Trials of a search: its whole state."""
        return self.root / "study.journal"

    @property
    def search(self) -> Path:
        """What a search has found so far."""
        return self.root / "search.json"

    @property
    def search_lock(self) -> Path:
        """Held by the one process that leads a search."""
        return self.root / ".search.lock"

    def cell(self, cell_id: str) -> CellPaths:
        """Files of one cell of this sweep."""
        return CellPaths(self.cells / cell_id)


@dataclass(frozen=True)
class CellPaths:
    """Files of one cell directory."""

    root: Path

    @property
    def config(self) -> Path:
        """The resolved cell."""
        return self.root / "config.json"

    @property
    def status(self) -> Path:
        """State of the current attempt."""
        return self.root / "status.json"

    @property
    def steps(self) -> Path:
        """Step records, one JSON row each."""
        return self.root / "steps.jsonl"

    @property
    def checkpoint(self) -> Path:
        """What a restart continues from."""
        return self.root / "checkpoint" / "state.pt"

    @property
    def outcome(self) -> Path:
        """How the last attempt ended."""
        return self.root / "outcome.json"

    @property
    def log(self) -> Path:
        """What the worker printed."""
        return self.root / "log.txt"

    def stop(self, attempt: int) -> Path:
        """Asks the ranks of attempt `attempt` to stop."""
        return self.root / f"stop.{attempt}"

    def claim(self, attempt: int) -> Path:
        """Who runs attempt `attempt`."""
        return self.root / f"claim.{attempt}"

    def attempt(self, attempt: int) -> Path:
        """What an earlier attempt left behind."""
        return self.root / "attempts" / str(attempt)
