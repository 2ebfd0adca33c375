"""From cells to job arrays: packing, splitting, and handing them to `submitit.SlurmExecutor`."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stalefront.freeze import import_first
from stalefront.paths import SweepPaths
from stalefront.slurm.batches import Batch, folder, write_batch
from stalefront.slurm.job import Pack
from stalefront.slurm.profile import Profile

if TYPE_CHECKING:
    from stalefront.cell import Cell
    from stalefront.pool import Task

# Never reached: this package counts ends of the time limit itself, since submitit takes every signal of a short job
# for one.
SUBMITIT_TIMEOUTS = 10**6


class SubmissionError(RuntimeError):
    """Slurm did not take a submission."""


@dataclass(frozen=True)
class Share:
    """How many jobs of an array run at a time, and the array of the same launch that has to end before it."""

    parallel: int
    after: int | None


def pack(tasks: Sequence[Task], cells_per_job: int) -> list[list[Task]]:
    """Cells of each job: `cells_per_job` at most, only such as need the same of a node, longest first."""
    kinds: dict[tuple[object, ...], list[Task]] = {}
    for task in tasks:
        cell = task.planned.cell
        kinds.setdefault((cell.device, cell.threads, cell.model.ranks), []).append(task)
    return [
        kind[start : start + cells_per_job] for kind in kinds.values() for start in range(0, len(kind), cells_per_job)
    ]


def split(jobs: Sequence[list[Task]], max_array: int) -> list[list[list[Task]]]:
    """Jobs in arrays no longer than the cluster takes; jobs of one array need the same of a node."""
    arrays: list[list[list[Task]]] = []
    for job in jobs:
        cell = job[0].planned.cell
        last = arrays[-1][-1][0].planned.cell if arrays else None
        alike = last is not None and (last.device, last.threads, last.model.ranks) == (
            cell.device,
            cell.threads,
            cell.model.ranks,
        )
        if not alike or len(arrays[-1]) == max_array:
            arrays.append([])
        arrays[-1].append(job)
    return arrays


def shares(arrays: int, throttle: int | None) -> list[Share]:
    """Split a throttle over the arrays of a launch, so that together they never run more.

    With more arrays than the throttle allows jobs, each runs one job at a time and waits for an earlier array.
    """
    if throttle is None:
        return [Share(sys.maxsize, None)] * arrays
    if throttle >= arrays:
        return [Share(throttle // arrays + (i < throttle % arrays), None) for i in range(arrays)]
    return [Share(1, i - throttle if i >= throttle else None) for i in range(arrays)]


def job_name(sweep: str, batch: str) -> str:
    """Name in Slurm: unique, since a batch is found by it when its number was lost."""
    return "sf-" + re.sub(r"[^\w.-]", "_", f"{sweep}-{batch}")


def parameters(profile: Profile, name: str, cells: Sequence[Cell], width: int, code: Sequence[str]) -> dict[str, Any]:
    """Parameters of `submitit.SlurmExecutor` for jobs whose cells run `width` at a time."""
    ranks = max((-(-cell.model.ranks // profile.nodes) for cell in cells), default=1)
    threads = max((cell.threads for cell in cells), default=1)
    cpus = profile.cpus_per_task or threads * ranks * width
    own = ("partition", "account", "qos", "constraint", "exclude", "nodelist", "gres", "gpus_per_node", "nodes")
    # The step has to be told: from 22.05 on srun does not take the CPUs of a task from the batch script.
    step = [f"--cpus-per-task={cpus}", *profile.srun_args]
    # The ranks of several nodes are a step of their own, which shares what this one has; both have to allow that.
    step += ["--nodes=1", "--ntasks=1", "--overlap", "--mem=0"] if profile.nodes > 1 else []
    found = {
        **{key: getattr(profile, key) for key in own},
        "job_name": name,
        "time": profile.time_min,
        "ntasks_per_node": 1,
        "cpus_per_task": cpus,
        "mem": None if profile.mem_gb is None else f"{int(profile.mem_gb * 1024)}M",
        "signal_delay_s": profile.signal_delay_s,
        "setup": setup_lines(profile, code),
        "stderr_to_stdout": True,
        "srun_args": step,
        "additional_parameters": {"requeue": True, **{k: v for k, v in profile.sbatch.items() if v is not None}},
        "wckey": None,
    }
    return {key: value for key, value in found.items() if value is not None or key == "wckey"}


def code_paths(code: Mapping[str, Any]) -> list[str]:
    """Folders that a batch's frozen code is imported from."""
    return [str(code[key]) for key in ("path", "user_path") if code.get(key)]


def setup_lines(profile: Profile, code: Sequence[str]) -> list[str]:
    """Shell lines before the command: the site's, then the frozen code in front of any installed one."""
    variables = import_first(code)
    path = f"{shlex.quote(variables.pop('PYTHONPATH'))}${{PYTHONPATH:+:$PYTHONPATH}}"
    rest = "".join(f" {name}={shlex.quote(value)}" for name, value in variables.items())
    return [*profile.setup, f"export PYTHONPATH={path}{rest}"]


def python(profile: Profile) -> str:
    """Command of the interpreter on the nodes."""
    return profile.python or shlex.quote(sys.executable)


def submit(paths: SweepPaths, batch: Batch, settings: Mapping[str, Any], share: Share, after: Sequence[str]) -> Batch:
    """Hand a batch to Slurm, its record first; returns it with its number. Raises `SubmissionError`."""
    write_batch(paths, batch)
    packs = [Pack(str(paths.root), batch.name, index) for index in range(len(batch.cells))]
    extra = {"array_parallelism": min(share.parallel, len(packs)), **dependency("afterany", after)}
    jobs = _submit(folder(paths, batch.name), Profile.from_config(batch.profile), {**settings, **extra}, packs)
    batch = batch.with_(job=jobs[0].partition("_")[0])
    write_batch(paths, batch)
    return batch


def submit_report(paths: SweepPaths, batch: Batch, profile: Profile, after: Sequence[str]) -> str:
    """Submit the job that writes the report when the jobs `after` have ended, however they end."""
    from stalefront.slurm.finish import Finish

    report = profile.for_report()
    name = f"{batch.job_name}-report"
    settings = {**parameters(report, name, [], 1, code_paths(batch.code)), **dependency("afterany", after)}
    return _submit(folder(paths, batch.name), report, settings, [Finish(str(paths.root))])[0]


def dependency(kind: str, jobs: Sequence[str]) -> dict[str, str]:
    """The parameter that makes a job wait for others; none for none."""
    return {"dependency": ":".join([kind, *jobs])} if jobs else {}


def _submit(where: Path, profile: Profile, settings: Mapping[str, Any], calls: Sequence[Any]) -> list[str]:
    """Numbers of submitted jobs; more than one call makes an array."""
    import submitit
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    # Slurm before 23.02 does not make the folder of a log.
    where.mkdir(parents=True, exist_ok=True)
    try:
        executor = submitit.SlurmExecutor(
            folder=_without_percent(where), max_num_timeout=SUBMITIT_TIMEOUTS, python=python(profile)
        )
        executor.update_parameters(**settings)
        return [str(job.job_id) for job in executor.submit_array(calls)]
    except (FailedJobError, FailedSubmissionError, RuntimeError, OSError) as error:
        raise SubmissionError(f"sbatch refused: {str(error).strip() or type(error).__name__}") from error


def _without_percent(where: Path) -> Path:
    """`where`, in which Slurm would take % for a pattern."""
    if "%" in str(where):
        raise SubmissionError(f"{where} holds a %, which Slurm takes for a pattern: choose another hydra.sweep.dir")
    return where


def write_scripts(paths: SweepPaths, batch: Batch, settings: Mapping[str, Any], share: Share) -> Path:
    """Script of a dry run: what would be submitted, runnable by plain sbatch, without pickles. Returns its path."""
    # The one private name of submitit that is used: it has no public way to render a script.
    from submitit.slurm.slurm import _make_sbatch_string

    write_batch(paths, batch)
    where = _without_percent(folder(paths, batch.name))
    command = [python(Profile.from_config(batch.profile)), "-u", "-m", "stalefront.slurm.job"]
    command += [shlex.quote(str(paths.root)), shlex.quote(batch.name), '"${SLURM_ARRAY_TASK_ID:-0}"']
    size = len(batch.cells)
    array = {"map_count": size, "array_parallelism": min(share.parallel, size)} if size > 1 else {}
    text = _make_sbatch_string(command=" ".join(command), folder=where, **{**settings, **array})
    script = where / "job.sbatch"
    script.write_text(text.replace("%t", "0"), encoding="utf-8")
    os.chmod(script, 0o755)
    return script
