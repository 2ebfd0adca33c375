"""`stalefront retry`: runs cells again from their recorded configuration, the way they were run last."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stalefront.choice import OptionError
from stalefront.commands.planned import Sweep
from stalefront.commands.snapshot import Row, has_squeue, look_at_queue, take_snapshot
from stalefront.files import read_json
from stalefront.slurm.batches import Batch, read_batches
from stalefront.slurm.settle import settle

if TYPE_CHECKING:
    from stalefront.compose import Planned
    from stalefront.launch import Backend

LAUNCHERS = ("local", "slurm")


def retry(
    sweep: Sweep, cell_ids: Sequence[str], *, launcher: str | None, fresh: bool, wait: bool, workers: int | None
) -> int:
    """Run unfinished cells, or those named; the exit code is the launch's."""
    from stalefront.app import working_directory_importable
    from stalefront.launch import Options, launch
    from stalefront.plan import Header

    if fresh and not cell_ids:
        way_out = "To run every cell again from scratch, add hydra.launcher.rerun=all to the command of the sweep."
        raise OptionError("--fresh", "without CELL", "together with the cells to start over", way_out)
    rerun = "all" if fresh else "missing"
    backend = choose_backend(sweep, launcher, rerun=rerun, wait=wait, workers=workers)
    settle_first(sweep)
    chosen = choose_cells(sweep, take_snapshot(sweep, look_at_queue(sweep.paths)).rows, cell_ids, fresh=fresh)
    if not chosen:
        return 0
    planned = [read_planned(sweep, cell_id) for cell_id in chosen]
    with working_directory_importable():
        header = Header(sweep.name, sweep.question, sweep.axes)
        return launch(sweep.paths.root, header, planned, Options(rerun, report=has_report(sweep)), backend).code


def settle_first(sweep: Sweep) -> None:
    """Write down how jobs ended that have left the queue, as far as that can be known here."""
    # A dry run's scripts may never have been submitted.
    if not any(batch.job is not None or not batch.dry_run for batch in read_batches(sweep.paths)):
        return
    if not has_squeue():
        print("warning: squeue is not installed here: cells of jobs that wait in a queue are not seen", file=sys.stderr)
    elif settle(sweep.paths) is None:
        print("warning: the Slurm controller does not answer: what jobs have left is not settled", file=sys.stderr)


def choose_cells(sweep: Sweep, rows: Sequence[Row], cell_ids: Sequence[str], *, fresh: bool) -> list[str]:
    """Cells to run, in the order of the plan; says which of those asked for are not to be run."""
    wanted = [row for row in rows if not cell_ids or row.cell_id in cell_ids]
    busy = [row for row in wanted if row.goes_on]
    done = [row for row in wanted if not row.goes_on and row.seen.finished]
    if fresh and busy:
        way_out = f"End it first: stalefront cancel {sweep.paths.root} {busy[0].cell_id}"
        raise OptionError("CELL", busy[0].cell_id, "a cell that neither runs nor waits", way_out)
    runs = {row.cell_id for row in wanted if not row.goes_on and (fresh or not row.seen.finished)}
    counts = Counter(row.state for row in busy)
    if busy:
        print(f"{', '.join(f'{n} {state}' for state, n in counts.items())}: left alone")
    if cell_ids and done and not fresh:
        print(f"{len(done)} of the named cells finished before; --fresh starts them over")
    if not runs:
        print(f"nothing to run in {sweep.paths.root}")
    return [cell_id for cell_id in sweep.cells if cell_id in runs]


def read_planned(sweep: Sweep, cell_id: str) -> Planned:
    """The cell as it was planned, from its `config.json`; raises `OptionError` when that is not the cell any more."""
    from stalefront.cell import Cell
    from stalefront.compose import Planned

    path = sweep.paths.cell(cell_id).config
    try:
        config: Mapping[str, Any] | None = read_json(path)
    except json.JSONDecodeError as error:
        raise OptionError(str(path), "<unreadable>", "the configuration of a cell", str(error)) from error
    if config is None:
        way_out = "Run the command of the sweep again: it writes what is missing."
        raise OptionError(str(path), "<absent>", "the configuration of a cell", way_out)
    cell = Cell.from_config(config["cell"])
    if cell.cell_id != cell_id:
        way_out = "It was edited, or files that it names have changed; run the command of the sweep again."
        raise OptionError(str(path), cell.cell_id, f"a cell with the id {cell_id}", way_out)
    return Planned(cell, config["run"], tuple(config["overrides"]), config.get("framework"))


def has_report(sweep: Sweep) -> bool:
    """A report is due where there was one or where several cells can be compared; a single run has none."""
    return len(sweep.cells) > 1 or (sweep.paths.root / "report.html").exists()


def choose_backend(sweep: Sweep, launcher: str | None, *, rerun: str, wait: bool, workers: int | None) -> Backend:
    """The launcher that is asked for, or the one that had the cells last."""
    if launcher not in (None, *LAUNCHERS):
        raise OptionError("--launcher", launcher, f"one of {', '.join(LAUNCHERS)}")
    batches = [batch for batch in read_batches(sweep.paths, closed=True) if batch.job is not None]
    if launcher == "slurm" and not batches:
        way_out = "Run the command of the sweep with hydra/launcher=slurm slurm=PROFILE."
        raise OptionError("--launcher", launcher, "local: no job of this sweep says which profile to use", way_out)
    if launcher == "slurm" or (launcher is None and batches):
        if workers is not None:
            way_out = "Jobs take hydra.launcher.width of the submission before, or add --launcher local."
            raise OptionError("--workers", workers, "left out with --launcher slurm", way_out)
        return slurm_backend(batches[-1], rerun=rerun, wait=wait, report=has_report(sweep))
    if not wait:
        raise OptionError("--no-wait", "given", "left out with --launcher local, which ends with its cells")
    from stalefront.launch import LocalBackend

    return LocalBackend(workers, ())


def slurm_backend(batch: Batch, *, rerun: str, wait: bool, report: bool) -> Backend:
    """Jobs like those of `batch`."""
    from stalefront.slurm.backend import SlurmBackend, SlurmOptions
    from stalefront.slurm.profile import Profile

    names = {field.name for field in dataclasses.fields(SlurmOptions)}
    stored = {key: value for key, value in batch.options.items() if key in names}
    stored |= {"dry_run": False, **({} if wait else {"wait": False})}
    return SlurmBackend(Profile.from_config(batch.profile), SlurmOptions(**stored), rerun=rerun, report=report)
