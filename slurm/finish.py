"""The job that comes after all others: settles what they left, and writes the report."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from stalefront.paths import SweepPaths
from stalefront.slurm.settle import settle


@dataclass(frozen=True)
class Finish:
    """Settle and report; what submitit pickles is the directory."""

    root: str

    def __call__(self) -> None:
        """Run it."""
        from stalefront.analysis.report import build_report

        settle(SweepPaths(Path(self.root)))
        build_report(Path(self.root))

    def checkpoint(self) -> object:
        """A signal starts it over."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)

    __submitit_checkpoint__ = checkpoint
