"""What Slurm says about jobs: one `squeue` for all of them, `scontrol` for those that left, `sacct` where there is one.

A controller that does not answer is no news about a job: callers get None, never an empty queue.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

# A busy controller answers late; submission and polling wait this long for it. (assumed)
TIMEOUT_S = 60
# States in which processes of a job may exist.
ALIVE = ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "CONFIGURING", "RESIZING")
# States that a job is left in for good; a requeued one may be seen without them after it has left the queue.
FINAL = (
    *("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "BOOT_FAIL"),
    *("DEADLINE", "REVOKED", "SPECIAL_EXIT", "LAUNCH_FAILED", "UNKNOWN"),
)
# The reason comes last, since it may hold the separator.
SQUEUE_FIELDS = "%F|%K|%A|%T|%N|%j|%r"
SACCT_FIELDS = "JobID,State,ExitCode,NodeList"


@dataclass(frozen=True)
class QueuedJob:
    """A job that Slurm has in its queue.

    Attributes
    ----------
    key : str
        `123`, or `123_4` for a task of an array: the same through every requeue.
    name, state, reason, nodes : str
        Slurm's words; the reason says why a pending job waits.
    """

    key: str
    name: str
    state: str
    reason: str
    nodes: str

    @property
    def alive(self) -> bool:
        """True when processes of the job may exist."""
        return self.state in ALIVE

    @property
    def waits_for(self) -> str:
        """Why the job waits, in Slurm's word where there is one yet."""
        if self.reason not in ("", "None"):
            return self.reason
        return "not looked at by Slurm yet" if self.state == "PENDING" else self.state


def queue_text(jobs: Iterable[QueuedJob]) -> list[str]:
    """How many of `jobs` run, and how many wait for what: parts of a sentence."""
    found = list(jobs)
    running = sum(job.alive for job in found)
    waiting = Counter(job.waits_for for job in found if not job.alive)
    parts = [f"{running} {'job runs' if running == 1 else 'jobs run'}"] if running else []
    return parts + [f"{count} pending ({reason})" for reason, count in waiting.most_common()]


@dataclass(frozen=True)
class Queue:
    """This user's jobs at one moment; answers `stalefront.claims.Jobs`."""

    jobs: Mapping[str, QueuedJob]

    def runs(self, job: str, restart: int) -> bool | None:
        """True while the job has processes. A requeue seen from outside counts as the same run until it starts."""
        found = self.jobs.get(job)
        return found is not None and found.alive

    def named(self, name: str) -> list[QueuedJob]:
        """Jobs with this name."""
        return [job for job in self.jobs.values() if job.name == name]


@dataclass(frozen=True)
class Ended:
    """How a job left the queue.

    Attributes
    ----------
    state : str
        COMPLETED, FAILED, CANCELLED, TIMEOUT, NODE_FAIL, OUT_OF_MEMORY, PREEMPTED, …; UNKNOWN when nobody knows.
    exit_code : str
        `code:signal`, empty when not known.
    """

    state: str
    exit_code: str = ""
    reason: str = ""
    nodes: str = ""

    @property
    def final(self) -> bool:
        """False for a job that goes on."""
        return self.state in FINAL

    @property
    def text(self) -> str:
        """In words, with what to do about it."""
        # What a cancelled job waited for before says nothing about its end.
        told = self.state != "CANCELLED" or self.exit_code not in ("", "0:0")
        details = [f"exit {self.exit_code}"] if self.exit_code and told else []
        details += [f"reason {self.reason}"] if self.reason not in ("", "None") and told else []
        details += [f"on {self.nodes}"] if self.nodes and self.nodes != "(null)" else []
        hint = HINTS.get(self.state, "")
        return self.state + (f" ({', '.join(details)})" if details else "") + (f"; {hint}" if hint else "")


HINTS = {
    "OUT_OF_MEMORY": "raise slurm.mem_gb, or lower hydra.launcher.width",
    "TIMEOUT": "it was killed before its learner step ended: raise slurm.signal_delay_s or slurm.time",
    "UNKNOWN": "neither scontrol nor sacct remembers it",
}


def run(command: Sequence[str]) -> subprocess.CompletedProcess[str] | None:
    """Run a command of Slurm; None when it is not installed or the controller does not answer."""
    # The expression of a long array's tasks is cut by default.
    env = {**os.environ, "SLURM_BITSTR_LEN": "0", "SLURM_TIME_FORMAT": "standard"}
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, env=env)
    except (OSError, subprocess.TimeoutExpired):
        return None


def read_queue() -> Queue | None:
    """All jobs of this user in one call; None when that is not known."""
    done = run(["squeue", "-h", "-r", "-u", str(os.getuid()), "-o", SQUEUE_FIELDS])
    if done is None or done.returncode != 0:
        return None
    return Queue({job.key: job for job in map(parse_squeue, done.stdout.splitlines()) if job is not None})


def parse_squeue(line: str) -> QueuedJob | None:
    """Job of a line of squeue; None for a line of another form, such as a warning."""
    parts = line.split("|", 6)
    if len(parts) != 7 or not parts[0].isdigit():
        return None
    array, task, _, state, nodes, name, reason = parts
    return QueuedJob(f"{array}_{task}" if task.isdigit() else array, name, state, reason, nodes)


def ended(jobs: Iterable[str]) -> dict[str, Ended]:
    """How each of these jobs ended, by one `scontrol` an array and one `sacct` for what is left."""
    wanted = set(jobs)
    found: dict[str, Ended] = {}
    for array in sorted({key.partition("_")[0] for key in wanted}, key=int):
        done = run(["scontrol", "-o", "show", "job", array])
        if done is not None and done.returncode == 0:
            found |= {key: end for line in done.stdout.splitlines() for key, end in parse_scontrol(line)}
    left = sorted(wanted - found.keys())
    if left and shutil.which("sacct"):
        arrays = ",".join(dict.fromkeys(key.partition("_")[0] for key in left))
        done = run(["sacct", "-X", "-n", "-P", "-j", arrays, "-o", SACCT_FIELDS])
        if done is not None and done.returncode == 0:
            for line in done.stdout.splitlines():
                found |= {key: end for key, end in parse_sacct(line) if key in left}
    return {key: found.get(key, Ended("UNKNOWN")) for key in wanted}


def parse_scontrol(line: str) -> Iterator[tuple[str, Ended]]:
    """(key, end) of every job that a line of `scontrol -o show job` is about."""
    fields = dict(re.findall(r"(\S+?)=(\S*)", line))
    if "JobId" not in fields:
        return
    told = (fields.get(name, "") for name in ("ExitCode", "Reason", "NodeList"))
    end = Ended(fields.get("JobState", "UNKNOWN"), *told)
    array, tasks = fields.get("ArrayJobId"), fields.get("ArrayTaskId")
    for key in [fields["JobId"]] if array is None or tasks is None else expand(array, tasks):
        yield key, end


def parse_sacct(line: str) -> Iterator[tuple[str, Ended]]:
    """(key, end) of every job that a line of sacct is about."""
    parts = line.split("|")
    if len(parts) != 4:
        return
    job, state, exit_code, nodes = parts
    array, _, tasks = job.partition("_")
    # A cancelled job's state names who did it: "CANCELLED by 1000".
    end = Ended(state.split(" ")[0], exit_code, "", nodes)
    for key in expand(array, tasks.strip("[]")) if tasks else [job]:
        yield key, end


def expand(array: str, tasks: str) -> list[str]:
    """Keys of an array's tasks: `3`, `0-2,5` or `4-9%2`."""
    keys = []
    for part in tasks.partition("%")[0].split(","):
        first, _, last = part.partition("-")
        if first.isdigit():
            keys += [f"{array}_{task}" for task in range(int(first), int(last.split(":")[0] or first) + 1)]
    return keys


def job_state(job: str) -> str | None:
    """State of one job as the controller has it now; None when that is not known."""
    done = run(["scontrol", "-o", "show", "job", job])
    if done is None or done.returncode != 0:
        return None
    found = dict(pair for line in done.stdout.splitlines() for pair in parse_scontrol(line))
    return found[job].state if job in found else None


def max_array_size() -> int | None:
    """MaxArraySize of the cluster; None when that is not known."""
    done = run(["scontrol", "show", "config"])
    found = re.search(r"^MaxArraySize\s*=\s*(\d+)", done.stdout, re.MULTILINE) if done is not None else None
    return int(found.group(1)) if found else None
