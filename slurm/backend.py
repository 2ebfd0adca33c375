"""The launcher's side of Slurm: what it may ask for, what is submitted, and following it."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field

from stalefront.cell import Cell
from stalefront.choice import OptionError
from stalefront.compose import Planned
from stalefront.files import locked
from stalefront.freeze import freeze, freeze_modules
from stalefront.launch import Ending
from stalefront.observe import observe
from stalefront.outcome import utc_now
from stalefront.paths import SweepPaths
from stalefront.pool import Task, start_order
from stalefront.progress import Progress
from stalefront.slurm.batches import Batch, new_name, read_batches, write_batch
from stalefront.slurm.profile import Profile, is_whole
from stalefront.slurm.queue import Queue, max_array_size, read_queue, run
from stalefront.slurm.settle import locate
from stalefront.slurm.submit import (
    Share,
    SubmissionError,
    code_paths,
    job_name,
    pack,
    parameters,
    shares,
    split,
    submit,
    submit_report,
    write_scripts,
)
from stalefront.slurm.wait import Stop, Watch

# What Slurm ships with; used where the cluster does not say.
MAX_ARRAY = 1001
GIB = 2**30


@dataclass(frozen=True)
class SlurmOptions:
    """Options of `hydra/launcher=slurm` beside those that every launcher has.

    Attributes
    ----------
    wait : bool
        Follow the jobs to their end; false submits, leaves a job that writes the report, and returns.
    dry_run : bool
        Write cells and scripts, submit nothing.
    cells_per_job, width : int
        Cells that one job runs, and how many of them side by side.
    throttle : int or None
        Jobs of this launch that run at a time; None for no limit.
    poll_s : float
        Seconds between two looks at the queue.
    timeouts : int
        How often a job is requeued because its time limit came.
    max_array : int or None
        Longest array; None for the cluster's MaxArraySize.
    """

    wait: bool
    dry_run: bool
    cells_per_job: int
    width: int
    throttle: int | None
    poll_s: float
    timeouts: int
    max_array: int | None

    def __post_init__(self) -> None:
        for name in ("wait", "dry_run"):
            self._require(isinstance(getattr(self, name), bool), name, "true or false")
        for name in ("cells_per_job", "width"):
            self._require(is_whole(getattr(self, name)), name, "a whole number of at least 1")
        for name in ("throttle", "max_array"):
            value = getattr(self, name)
            self._require(value is None or is_whole(value), name, "a whole number of at least 1, or null")
        way_out = "Raise hydra.launcher.cells_per_job."
        self._require(self.width <= self.cells_per_job, "width", f"at most cells_per_job={self.cells_per_job}", way_out)
        is_time = isinstance(self.poll_s, int | float) and not isinstance(self.poll_s, bool) and self.poll_s >= 1
        self._require(is_time, "poll_s", "at least 1 second: every look asks the controller")
        is_number = is_whole(self.timeouts) or (isinstance(self.timeouts, int) and self.timeouts == 0)
        self._require(is_number, "timeouts", "a whole number, 0 for never")

    def _require(self, holds: bool, name: str, legal: str, way_out: str = "") -> None:
        if not holds:
            raise OptionError(f"hydra.launcher.{name}", getattr(self, name), legal, way_out)


@dataclass
class SlurmBackend:
    """Runs cells as Slurm jobs; see `stalefront.launch.Backend`."""

    profile: Profile
    options: SlurmOptions
    rerun: str
    report: bool
    queue: Queue | None = field(default=None, init=False)

    def prepare(self, planned: Sequence[Planned]) -> None:
        """Refuse what cannot work before anything is written: tools, GPUs, ranks, memory."""
        cells = [p.cell for p in planned]
        if not self.options.dry_run:
            for tool in ("sbatch", "srun", "squeue", "scontrol"):
                if shutil.which(tool) is None:
                    way_out = "Run this on a login node, or write the scripts with hydra.launcher.dry_run=true."
                    raise OptionError("hydra/launcher", "slurm", f"a machine with {tool}", way_out)
            self.queue = read_queue()
            if self.queue is None:
                done = run(["squeue", "-h"])
                said = done.stderr.strip().splitlines()[-1:] if done is not None else ["no answer in time"]
                way_out = f"squeue says: {''.join(said)}. Try again when it answers."
                raise OptionError("hydra/launcher", "slurm", "a Slurm controller that answers", way_out)
        check_devices(self.profile, cells)
        check_ranks(self.profile, self.options, cells)
        check_memory(self.profile, self.options, cells)

    def jobs(self) -> Queue | None:
        """The queue as it was when the launch began."""
        return self.queue

    def slots(self, tasks: Sequence[Task]) -> int:
        """Cells that may run at a time, for the estimate of what is left."""
        jobs = -(-len(tasks) // self.options.cells_per_job)
        return max(1, min(self.options.throttle or jobs, jobs) * self.options.width)

    def run(self, paths: SweepPaths, name: str, tasks: Sequence[Task], progress: Progress) -> Ending:
        """Submit what is not in the queue yet, then follow everything, or return when it is not to be waited for."""
        stop = Stop()
        with stop.listening():
            if self.options.dry_run:
                return self._dry_run(paths, name, tasks, progress)
            with locked(paths.submit_lock):
                batches, failed = self._submit(paths, name, tasks, progress, stop)
            if not self.options.wait and stop.by is None:
                return self._detach(paths, batches, progress, failed=failed)
            watch = Watch(
                paths,
                batches,
                tasks,
                poll_s=self.options.poll_s,
                stop=stop,
                tell=progress,
                note=progress.note,
            )
            watch.run()
        if stop.by is not None:
            progress.say(f"The jobs go on. {advice(paths)}")
        return Ending(stop.by, left=stop.by is not None)

    def _submit(
        self, paths: SweepPaths, name: str, tasks: Sequence[Task], progress: Progress, stop: Stop
    ) -> tuple[list[Batch], bool]:
        """Batches to follow: those that have jobs in the queue, and new ones for the cells that have none."""
        queue = self.queue = read_queue() or self.queue
        assert queue is not None
        batches = self._adopt(paths, tasks, queue)
        adopted = sum(task.phase == "elsewhere" for task in tasks)
        if adopted:
            progress.say(f"{adopted} cells are in the queue or running already; they are not submitted again.")
        arrays = self._arrays(tasks)
        code = frozen_code(paths, tasks) if arrays else None
        done: list[Batch] = []
        for array, share in zip(arrays, shares(len(arrays), self.options.throttle), strict=True):
            if stop.by is not None or code is None:
                break
            batch, settings = self._batch(paths, name, array, code, dry_run=False)
            after = [] if share.after is None else [str(done[share.after].job)]
            try:
                batch = submit(paths, batch, settings, share, after)
            except SubmissionError as error:
                write_batch(paths, batch.with_(closed=True))
                progress.say(f"error: {error}. The cells not submitted yet stay planned; the same command goes on.")
                return [*batches, *done], True
            done.append(batch)
            for job in array:
                for task in job:
                    task.phase = "elsewhere"
            progress.say(f"submitted {len(array)} {'job' if len(array) == 1 else 'jobs'} as {batch.job}")
        return [*batches, *done], False

    def _adopt(self, paths: SweepPaths, tasks: Sequence[Task], queue: Queue) -> list[Batch]:
        """Batches of earlier launches with jobs in the queue; their cells are not waiting to be submitted."""
        by_id = {task.planned.cell.cell_id: task for task in tasks}
        found = []
        for stored in read_batches(paths):
            batch = locate(paths, stored, queue)
            present = [index for job, index in batch.numbers().items() if job in queue.jobs]
            ours = [by_id[cell_id] for index in present for cell_id in batch.cells[index] if cell_id in by_id]
            for task in ours:
                if not (task.seen.finished and not batch.fresh):
                    task.phase, task.seen = "elsewhere", observe(task.paths, queue)
            if ours:
                found.append(batch)
        return found

    def _arrays(self, tasks: Sequence[Task]) -> list[list[list[Task]]]:
        waiting = start_order([task for task in tasks if task.phase == "waiting"])
        limit = self.options.max_array or (None if self.options.dry_run else max_array_size()) or MAX_ARRAY
        return split(pack(waiting, self.options.cells_per_job), limit)

    def _batch(
        self, paths: SweepPaths, name: str, array: Sequence[Sequence[Task]], code: dict[str, object], *, dry_run: bool
    ) -> tuple[Batch, dict[str, object]]:
        batch_name = new_name(paths, "dry-" if dry_run else "")
        cells = [[task.planned.cell.cell_id for task in job] for job in array]
        batch = Batch(
            name=batch_name,
            job_name=job_name(name, batch_name),
            submitted_utc=utc_now(),
            profile=self.profile.as_dict(),
            code=code,
            cells=cells,
            base={task.planned.cell.cell_id: task.seen.attempt for job in array for task in job},
            fresh=self.rerun == "all",
            dry_run=dry_run,
            options=dataclasses.asdict(self.options),
        )
        planned = [task.planned.cell for job in array for task in job]
        settings = parameters(self.profile, batch.job_name, planned, self.options.width, code_paths(code))
        return batch, settings

    def _dry_run(self, paths: SweepPaths, name: str, tasks: Sequence[Task], progress: Progress) -> Ending:
        arrays = self._arrays(tasks)
        code = frozen_code(paths, tasks)
        names: list[str] = []
        for array, share in zip(arrays, shares(len(arrays), self.options.throttle), strict=True):
            batch, settings = self._batch(paths, name, array, code, dry_run=True)
            script = write_scripts(paths, batch, settings, Share(share.parallel, None))
            names.append(batch.job_name)
            after = "" if share.after is None else f" --dependency=afterany:<the number of {names[share.after]}>"
            progress.say(f"sbatch{after} {script}")
        progress.say(f"Nothing is submitted. When the jobs have ended: stalefront report {paths.root}")
        return Ending(None, left=True)

    def _detach(self, paths: SweepPaths, batches: list[Batch], progress: Progress, *, failed: bool) -> Ending:
        if batches and self.report:
            # An earlier launch's report job would come before the new cells have ended.
            for batch in batches:
                if batch.report_job is not None:
                    run(["scancel", batch.report_job])
            jobs = [str(batch.job) for batch in batches]
            try:
                report_job = submit_report(paths, batches[-1], self.profile, jobs)
            except SubmissionError as error:
                progress.say(f"error: no job for the report: {error}")
                return Ending(None, left=True, failed=True)
            for batch in batches:
                write_batch(paths, batch.with_(report_job=report_job))
            progress.say(f"job {report_job} writes the report when they have ended")
        progress.say(advice(paths))
        return Ending(None, left=True, failed=failed)


def frozen_code(paths: SweepPaths, tasks: Sequence[Task]) -> dict[str, object]:
    """The code that jobs will run, copied into the sweep's directory: this package's, and the user's own rewards."""
    frozen = freeze(paths.code)
    rewards = {str(getattr(task.planned.cell.task, "reward_function", "")) for task in tasks}
    user = freeze_modules(paths.code, [name.partition(":")[0] for name in rewards if ":" in name])
    code = {**dataclasses.asdict(frozen), "path": str(frozen.path)}
    return {**code, "user_path": None if user is None else str(user)}


def advice(paths: SweepPaths) -> str:
    """How to come back to jobs that were left alone."""
    where = paths.root
    return (
        f"The same command re-attaches. Meanwhile: stalefront status {where} --watch; to end them: "
        f"stalefront cancel {where}"
    )


def check_devices(profile: Profile, cells: Sequence[Cell]) -> None:
    """Refuse GPUs that no cell would use, and cells on GPUs in jobs without any."""
    on_gpu = [cell.device.startswith("cuda") for cell in cells]
    if profile.gpus and not all(on_gpu):
        device = next(cell.device for cell in cells if not cell.device.startswith("cuda"))
        way_out = "Add device=cuda, or slurm=cpu, or slurm.gpus_per_node=null."
        raise OptionError("device", device, f"cuda: slurm={profile.name} asks for {profile.gpus} GPUs a node", way_out)
    if not profile.gpus and any(on_gpu):
        way_out = "Add slurm.gpus_per_node=1."
        raise OptionError("slurm.gpus_per_node", profile.gpus_per_node, "at least 1 with device=cuda", way_out)
    indexed = [cell.device for cell in cells if ":" in cell.device]
    if indexed:
        raise OptionError("device", indexed[0], "cuda: a job sees only its own devices", "Leave out the index.")


def check_ranks(profile: Profile, options: SlurmOptions, cells: Sequence[Cell]) -> None:
    """Refuse cells of more ranks than a job has places for."""
    for cell in cells:
        ranks = cell.model.ranks
        if ranks % profile.nodes:
            raise OptionError("model.ranks", ranks, f"a multiple of slurm.nodes={profile.nodes}")
        if cell.device.startswith("cuda") and ranks > profile.gpus * profile.nodes:
            legal = f"at most {profile.gpus} GPUs a node × {profile.nodes} nodes"
            raise OptionError("model.ranks", ranks, legal, f"Raise slurm.gpus_per_node to {ranks // profile.nodes}.")
        if profile.nodes > 1 and options.width > 1:
            raise OptionError("hydra.launcher.width", options.width, "1 with slurm.nodes above 1")
        if cell.device.startswith("cuda") and options.width * ranks > profile.gpus * profile.nodes and ranks > 1:
            legal = f"at most {profile.gpus // ranks}: a cell of {ranks} ranks takes {ranks} GPUs"
            raise OptionError("hydra.launcher.width", options.width, legal)


def check_memory(profile: Profile, options: SlurmOptions, cells: Sequence[Cell]) -> None:
    """Refuse packing that the memory asked for cannot hold, by the estimate of each cell's need."""
    if profile.mem_gb is None and profile.gpu_mem_gb is None:
        return
    from stalefront.memory import cell_bytes

    known = [(cell, memory) for cell in cells if (memory := cell_bytes(cell)) is not None]
    # The estimate is for one rank; the ranks of a cell share a node's memory, and have a GPU each.
    host = max((memory.host_bytes * -(-cell.model.ranks // profile.nodes) for cell, memory in known), default=0)
    device = max((memory.device_bytes for _, memory in known), default=0)
    sizes = (
        ("mem_gb", profile.mem_gb, host, options.width),
        ("gpu_mem_gb", profile.gpu_mem_gb, device, -(-options.width // max(1, profile.gpus))),
    )
    for name, size_gb, need, beside in sizes:
        if size_gb is not None and need * beside > size_gb * GIB:
            fits = int(size_gb * GIB // need)
            legal = f"at most {fits} of these cells in slurm.{name}={size_gb}: each needs about {need / GIB:.1f} GiB"
            way_out = f"Raise slurm.{name}, or lower hydra.launcher.width."
            raise OptionError("hydra.launcher.width", options.width, legal, way_out)
