"""The process that runs one cell: claims it, sets aside what an earlier attempt left, runs, and is gone."""

from __future__ import annotations

import faulthandler
import os
import shutil
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

from stalefront.claims import keep_alive, take
from stalefront.files import read_json
from stalefront.paths import CellPaths

# Exit codes beside 0: another process claimed the attempt first; the cell did not end completed or non-finite.
TAKEN, UNFINISHED = 75, 1
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True)
class Order:
    """One attempt at one cell.

    Attributes
    ----------
    fresh : bool
        Start over: records and checkpoint of earlier attempts are set aside first.
    gpu : str or None
        CUDA devices that the process may see, as in `0,1`; None leaves the environment as it is.
    """

    root: Path
    attempt: int
    fresh: bool
    launcher: str
    threads: int
    gpu: str | None


def work(order: Order) -> None:
    """Entry point of the process."""
    # A terminal sends its signals to every process of the group; the launcher decides what they mean for cells.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGUSR2})
    paths = CellPaths(order.root)
    if not take(paths, order.attempt, order.launcher):
        sys.exit(TAKEN)
    keep_alive(paths, order.attempt)
    set_aside(paths, order.attempt, fresh=order.fresh)
    write_to_log(paths.log, order.attempt)
    os.environ |= dict.fromkeys(THREAD_VARIABLES, str(order.threads))
    if order.gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = order.gpu
    from stalefront.ranked import ranks_of, run_ranks
    from stalefront.run import run_cell

    if ranks_of(paths) > 1:
        sys.exit(0 if run_ranks(paths, order.attempt) in ("completed", "non-finite") else UNFINISHED)
    outcome = run_cell(order.root, attempt=order.attempt)
    if outcome["error"]:
        print(outcome["error"], file=sys.stderr)
    sys.exit(0 if outcome["state"] in ("completed", "non-finite") else UNFINISHED)


def set_aside(paths: CellPaths, attempt: int, *, fresh: bool) -> None:
    """Move an earlier attempt's outcome, and all it left when starting over, to `attempts/<n>/`.

    The checkpoint goes first: without one, rows of an earlier attempt are set aside by whoever starts over.
    """
    done = read_json(paths.outcome)
    before = attempt - 1 if done is None else int(done.get("attempt") or 1)
    kept = paths.attempt(before)
    names = [paths.checkpoint.parent, paths.outcome, paths.steps, paths.log, paths.status] if fresh else [paths.outcome]
    for path in names:
        if path.exists():
            kept.mkdir(parents=True, exist_ok=True)
            shutil.move(path, _free_name(kept / path.name))


def _free_name(path: Path) -> Path:
    """`path`, or with a number before its suffix where that is taken."""
    candidate, number = path, 1
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.stem}.{number}{path.suffix}")
    return candidate


def write_to_log(log: Path, attempt: int) -> None:
    """Send what this process prints to `log`, what a crash prints included."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for target in (1, 2):
        os.dup2(handle, target)
    os.close(handle)
    # The streams of a forked process may be those of its parent's terminal or of a test's capture.
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable(file=2)
    from stalefront.outcome import utc_now

    print(f"--- attempt {attempt}, pid {os.getpid()}, {utc_now()} ---")
