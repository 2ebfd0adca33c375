"""`jobs/<batch>/batch.json`: which cells a submission gave to which job. Written before the submission."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stalefront.choice import OptionError
from stalefront.files import read_json, write_json
from stalefront.paths import SweepPaths

if TYPE_CHECKING:
    from stalefront.slurm.queue import Queue

FORMAT = 1
FILE = "batch.json"


@dataclass(frozen=True)
class Batch:
    """One job array, or one job.

    Attributes
    ----------
    name : str
        Folder in `jobs/`; part of the job's name in Slurm, by which it is found when its number is not known.
    cells : sequence of sequences of str
        Cell ids of each job, in the order they are started.
    base : mapping
        Cell id → attempts there were at submission; a later attempt is this batch's, or follows it.
    fresh : bool
        Cells start over.
    job : str or None
        Number that Slurm gave; None before the answer came, and for a dry run.
    options : mapping
        Options of the launcher, for those who submit the rest.
    closed : bool
        Nothing of it is in the queue any more, and every cell of it has an outcome.
    report_job : str or None
        Job that writes the report when this batch and those before it have ended.
    """

    name: str
    job_name: str
    submitted_utc: str
    profile: Mapping[str, Any]
    code: Mapping[str, Any]
    cells: Sequence[Sequence[str]]
    base: Mapping[str, int]
    fresh: bool
    dry_run: bool
    options: Mapping[str, Any]
    job: str | None = None
    closed: bool = False
    report_job: str | None = None

    @property
    def is_array(self) -> bool:
        """Tasks have numbers of their own: submitit sends a single job as such."""
        return len(self.cells) > 1

    @property
    def width(self) -> int:
        """Cells of a job side by side."""
        return int(self.options["width"])

    @property
    def timeouts(self) -> int:
        """How often a job is requeued because its time was up."""
        return int(self.options["timeouts"])

    def key(self, index: int) -> str | None:
        """Slurm's number of job `index`."""
        return None if self.job is None else f"{self.job}_{index}" if self.is_array else self.job

    def index(self, key: str) -> int:
        """Index of the job with this number."""
        return int(key.partition("_")[2]) if self.is_array else 0

    def numbers(self) -> dict[str, int]:
        """Number → index of every job."""
        return {} if self.job is None else {str(self.key(i)): i for i in range(len(self.cells))}

    def with_(self, **changes: Any) -> Batch:
        """A copy with other values."""
        return dataclasses.replace(self, **changes)


def numbered(batch: Batch, queue: Queue) -> Batch:
    """The batch with its number, found by name when it is not known: a dry run's script, a launcher that died."""
    found = [] if batch.job is not None else queue.named(batch.job_name)
    return batch.with_(job=found[0].key.partition("_")[0], dry_run=False) if found else batch


def folder(paths: SweepPaths, name: str) -> Path:
    """Folder of a batch: its record, its scripts and the logs of its jobs."""
    return paths.jobs / name


def write_batch(paths: SweepPaths, batch: Batch) -> None:
    """Write the record of a batch."""
    write_json(folder(paths, batch.name) / FILE, {"format": FORMAT, **dataclasses.asdict(batch)}, indent=None)


def read_batch(path: Path) -> Batch:
    """Batch of a record."""
    stored = read_json(path / FILE)
    if stored is None or stored.pop("format", None) != FORMAT:
        raise OptionError(str(path / FILE), "<unreadable>", f"a batch in format {FORMAT}", "Use another directory.")
    return Batch(**stored)


def read_batches(paths: SweepPaths, *, closed: bool = False) -> Iterator[Batch]:
    """Batches in the order they were submitted; closed ones only when asked for."""
    try:
        names = sorted(os.listdir(paths.jobs))
    except FileNotFoundError:
        return
    for name in names:
        if (paths.jobs / name / FILE).is_file():
            batch = read_batch(paths.jobs / name)
            if closed or not batch.closed:
                yield batch


def new_name(paths: SweepPaths, prefix: str = "") -> str:
    """Name for a new batch: the time, so that names sort, and a number where two begin in one second."""
    stamp = prefix + time.strftime("%Y%m%dT%H%M%S", time.gmtime())
    number = 0
    while (paths.jobs / f"{stamp}-{number}").exists():
        number += 1
    return f"{stamp}-{number}"
