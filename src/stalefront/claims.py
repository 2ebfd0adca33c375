"""Who runs a cell: a file `claim.<n>` for attempt n, made with O_EXCL by the process that runs it.

A claim is never removed or rewritten. Attempt n + 1 may begin when the process behind claim n is gone, and begins by
making claim n + 1, which succeeds for one process only; so there is no moment at which a cell has two owners.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Protocol

from stalefront.files import read_json
from stalefront.paths import CellPaths

# A claim of another machine counts as stale when neither it nor status.json was touched for this long. Its owner
# touches it every HEARTBEAT_S, also while a single learner step takes hours. (assumed: ten missed beats)
HEARTBEAT_S = 60.0
STALE_AFTER_S = 600.0
# A claim is written right after it is made; an empty one is believed for this long. (assumed)
EMPTY_GRACE_S = 10.0


@dataclass(frozen=True)
class Claim:
    """Content of a claim file, and the attempt it is for.

    Attributes
    ----------
    host, boot, pid_namespace : str
        Together the place in which `pid` means something.
    start : int or None
        Start of the process in ticks since boot: a pid that was given to another process has another one.
    launcher : str
        Id of the launcher that started the process.
    job, restart : str, int
        Slurm job (`123`, or `123_4` for a task of an array) and how often it had been requeued; empty outside Slurm.
    """

    attempt: int
    host: str
    boot: str
    pid_namespace: str
    pid: int
    start: int | None
    launcher: str
    utc: str
    job: str = ""
    restart: int = 0

    @property
    def is_here(self) -> bool:
        """True when the process is, or was, one of this machine as it runs now."""
        return (self.host, self.boot, self.pid_namespace) == place()


class Jobs(Protocol):
    """What is known about Slurm jobs."""

    def runs(self, job: str, restart: int) -> bool | None:
        """True while processes of this run of the job may exist; None when that is not known."""


def take(paths: CellPaths, attempt: int, launcher: str) -> bool:
    """Claim `attempt` for this process; False when somebody has it already."""
    host, boot, namespace = place()
    pid = os.getpid()
    utc = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    claim = Claim(attempt, host, boot, namespace, pid, start_of(pid), launcher, utc, *slurm_job())
    try:
        handle = os.open(paths.claim(attempt), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        return False
    try:
        os.write(handle, (json.dumps(asdict(claim), indent=1) + "\n").encode())
    finally:
        os.close(handle)
    return True


def latest(paths: CellPaths) -> Claim | None:
    """Claim with the highest attempt, or None."""
    attempt = last_attempt(paths)
    if attempt == 0:
        return None
    path = paths.claim(attempt)
    try:
        return Claim(**read_json(path))
    except (json.JSONDecodeError, TypeError):
        # Between its making and its writing, or its maker died there: its place is unknown, its time is not.
        return Claim(attempt, "", "", "", 0, None, "", "")


def last_attempt(paths: CellPaths) -> int:
    """Highest attempt that was ever claimed; 0 for none."""
    try:
        names = os.listdir(paths.root)
    except FileNotFoundError:
        return 0
    numbers = [name.removeprefix("claim.") for name in names if name.startswith("claim.")]
    return max((int(number) for number in numbers if number.isdigit()), default=0)


def slurm_job() -> tuple[str, int]:
    """Slurm job that this process belongs to and its count of requeues; ("", 0) outside Slurm."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    job = f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID", "")
    return job, int(os.environ.get("SLURM_RESTART_COUNT") or 0) if job else 0


def is_live(paths: CellPaths, claim: Claim, jobs: Jobs | None = None) -> bool:
    """True while the process behind the claim may be running.

    A process of this machine is looked up. Of another machine's, Slurm knows when it belongs to a job and `jobs` is
    given; only without that do the times of its files decide.
    """
    if not claim.host:
        return _age_s(paths.claim(claim.attempt)) < EMPTY_GRACE_S
    if claim.is_here:
        return is_running(claim.pid, claim.start)
    # The queue is one user's; another's jobs are not in it.
    if jobs is not None and claim.job and _is_ours(paths.claim(claim.attempt)):
        known = jobs.runs(claim.job, claim.restart)
        if known is not None:
            return known
    if claim.host == place()[0] and claim.boot != place()[1]:
        return False  # this machine, before it was started anew
    return min(_age_s(paths.claim(claim.attempt)), _age_s(paths.status)) < STALE_AFTER_S


def is_running(pid: int, start: int | None) -> bool:
    """True when process `pid` of this machine runs and began at `start`; one that has ended unreaped does not run."""
    found = _stat(pid)
    if found is None:
        return False
    state, began = found
    return state not in ("Z", "X") and (start is None or began is None or began == start)


def launcher_id() -> str:
    """Id of this process as a launcher: host, pid and start."""
    return f"{place()[0]}/{os.getpid()}/{start_of(os.getpid())}"


def launcher_runs(launcher: str) -> bool:
    """True when the launcher with this id is known to run: here, that is."""
    host, _, process = launcher.partition("/")
    pid, _, start = process.partition("/")
    return host == place()[0] and pid.isdigit() and is_running(int(pid), int(start) if start.isdigit() else None)


def start_of(pid: int) -> int | None:
    """Start of a process in clock ticks since boot; None where that is not known."""
    found = _stat(pid)
    return None if found is None else found[1]


def _stat(pid: int) -> tuple[str, int | None] | None:
    """(state, start) of a process, None when there is none. Without /proc the start is not known."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        if Path("/proc/self/stat").exists():
            return None
        return ("R", None) if _answers(pid) else None
    # The second field is the command in brackets and may hold anything; fields are counted from its end.
    fields = text.rpartition(")")[2].split()
    return fields[0], int(fields[19])


def _answers(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


@lru_cache(maxsize=1)
def place() -> tuple[str, str, str]:
    """Host, its current boot, and the pid namespace of this process; empty where the system does not tell."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    namespace = Path("/proc/self/ns/pid")
    return (
        socket.gethostname(),
        boot.read_text(encoding="ascii").strip() if boot.exists() else "",
        os.readlink(namespace) if namespace.is_symlink() else "",
    )


def _is_ours(path: Path) -> bool:
    try:
        return path.stat().st_uid == os.getuid()
    except FileNotFoundError:
        return True


def _age_s(path: Path) -> float:
    """Seconds since the last change; the file is opened for it, which makes a network file system ask its server."""
    try:
        with path.open("rb") as file:
            return time.time() - os.fstat(file.fileno()).st_mtime
    except FileNotFoundError:
        return float("inf")


def keep_alive(paths: CellPaths, attempt: int) -> None:
    """Touch the claim from a thread as long as this process runs, for those who cannot see the process."""

    def beat() -> None:
        while True:
            time.sleep(HEARTBEAT_S)
            os.utime(paths.claim(attempt))

    threading.Thread(target=beat, name="heartbeat", daemon=True).start()
