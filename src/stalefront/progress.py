"""What the terminal shows while cells run. Refreshed by the launcher's own loop, so that no thread is needed."""

from __future__ import annotations

import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from stalefront.labels import clock, duration, only, varying
from stalefront.observe import read_tail
from stalefront.pool import Task

REFRESH_S = 0.5
LINE_EVERY_S = 10.0
# Rows of running cells that a terminal shows; the others are counted.
MAX_ROWS = 16
# Step files read for the hint at each refresh, so that a directory of ten thousand finished cells does not stall it.
HINTS_A_REFRESH = 100
# Wide enough for what comes, so that columns stay where they are.
MIN_WIDTHS = {"step": 8, "reward": 14}
SHOWN_BY_NAME = {"delay.S", "delay.lag_updates", "optimizer.lr", "seed"}

HINT = "collapsed = no pass in the last 300 or more held-out samples: a live hint, the verdict is in the report"


class Progress:
    """Live table on a terminal, a plain line every ten seconds elsewhere.

    Parameters
    ----------
    title
        Name of the sweep.
    tasks
        Cells of this launch; their state is read, never changed.
    slots : int
        Cells that run at a time, for the estimate of what is left.
    """

    def __init__(self, title: str, tasks: Sequence[Task], slots: int, console: Console | None = None) -> None:
        self.title, self.tasks, self.slots = title, tasks, max(1, slots)
        self.console = console or Console(soft_wrap=True)
        self._began = self._shown = time.monotonic()
        self._hints: dict[str, tuple[int, bool]] = {}
        self._reads_left = HINTS_A_REFRESH
        self._labels = labels(tasks)
        self._told: set[str] = set()
        self._note = ""
        self._live = Live(console=self.console, auto_refresh=False, transient=True) if self._is_live else None

    @property
    def _is_live(self) -> bool:
        return self.console.is_terminal

    def __enter__(self) -> Progress:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def __call__(self) -> None:
        """Show the state now, if it is time to."""
        now = time.monotonic()
        self._tell_failures()
        if now - self._shown < (REFRESH_S if self._live is not None else LINE_EVERY_S):
            return
        self._shown = now
        if self._live is not None:
            self._live.update(self.table(), refresh=True)
        else:
            print(f"[{clock(now - self._began)}] {self.line()}", flush=True)

    def say(self, text: str) -> None:
        """Print a sentence above the live table."""
        self.console.print(Text(text))

    def note(self, text: str) -> None:
        """Say `text` at the end of every line from now on."""
        self._note = text

    def _tell_failures(self) -> None:
        for task in self.tasks:
            cell_id = task.planned.cell.cell_id
            if task.ended and task.phase == "over" and task.seen.state == "failed" and cell_id not in self._told:
                self._told.add(cell_id)
                text = f"failed: {self._labels[cell_id]}: {task.seen.reason} (log: {task.paths.log})"
                self.console.print(Text(text, style="red"))

    def counts(self) -> Counter[str]:
        """Cells by state, and how many look collapsed."""
        found: Counter[str] = Counter()
        self._reads_left = HINTS_A_REFRESH
        for task in self.tasks:
            finished = task.seen.finished and task.phase == "over"
            running = task.phase == "here" or (task.phase == "elsewhere" and task.seen.live)
            key = "done" if finished else "running" if running else "waiting"
            found[task.seen.state if task.phase == "over" and not finished else key] += 1
            found["collapsed"] += (finished or running) and self._looks_collapsed(task)
        return found

    def _looks_collapsed(self, task: Task) -> bool:
        """The hint, read again when a cell has a new step; unknown counts as no."""
        cell_id = task.planned.cell.cell_id
        step, hint = self._hints.get(cell_id, (-1, False))
        if step != task.seen.step and self._reads_left > 0:
            self._reads_left -= 1
            hint = read_tail(task.paths.steps).no_pass
            self._hints[cell_id] = (task.seen.step, hint)
        return hint

    def line(self) -> str:
        """One line: counts and the time left."""
        counts = self.counts()
        parts = [f"{counts['done']} of {len(self.tasks)} cells done", f"{counts['running']} running"]
        parts += [f"{counts['collapsed']} collapsed so far (hint)"] if counts["collapsed"] else []
        parts += [f"{counts[state]} {state}" for state in ("failed", "interrupted") if counts[state]]
        left = self.seconds_left()
        parts += [] if left is None else [f"about {duration(left)} left"]
        return ", ".join(parts) + (f"; {self._note}" if self._note else "")

    def seconds_left(self) -> float | None:
        """Work left over slots, by the seconds a learner step took in cells of the same S; None before any step."""
        rates: dict[int, list[float]] = defaultdict(list)
        for task in self.tasks:
            rate = _seconds_per_step(task)
            if rate is not None:
                rates[task.planned.cell.S].append(rate)
        if not rates:
            return None
        known = {S: statistics.median(values) for S, values in rates.items()}
        work = [
            known[min(known, key=lambda S, own=task.planned.cell.S: abs(S - own))]  # type: ignore[misc]
            * max(0, task.planned.cell.steps - task.seen.step)
            for task in self.tasks
            if task.phase != "over"
        ]
        return max([sum(work) / self.slots, *work], default=0.0)

    def table(self) -> RenderableType:
        """Everything a terminal shows."""
        counts = self.counts()
        head = Text.assemble((self.title, "bold"), f"  {self.line()}  [{clock(time.monotonic() - self._began)}]")
        done = sum(1.0 if t.phase == "over" else t.seen.step / t.planned.cell.steps for t in self.tasks)
        bar = Table.grid()
        bar.add_row(ProgressBar(total=len(self.tasks), completed=done, width=60))
        running = [t for t in self.tasks if t.phase == "here" or (t.phase == "elsewhere" and t.seen.live)]
        rows = Table(box=None, pad_edge=False, header_style="dim")
        for name in ("running", "step", "of", "reward"):
            rows.add_column(name, justify="left" if name == "running" else "right", min_width=MIN_WIDTHS.get(name))
        for task in running[:MAX_ROWS]:
            rows.add_row(*self._row(task))
        more = [Text(f"… and {len(running) - MAX_ROWS} more", style="dim")] if len(running) > MAX_ROWS else []
        hint = [Text(HINT, style="dim")] if counts["collapsed"] else []
        return Group(head, bar, rows, *more, *hint)

    def _row(self, task: Task) -> tuple[str, str, str, str]:
        reward = "" if task.seen.reward_val is None else f"{task.seen.reward_val:.2f}"
        reward += " collapsed" if self._looks_collapsed(task) else ""
        step = str(task.seen.step) if task.seen.step else "starting"
        elsewhere = f" (job {task.seen.job})" if task.seen.job else " (another launcher's)"
        where = elsewhere if task.phase == "elsewhere" else ""
        return self._labels[task.planned.cell.cell_id] + where, step, str(task.planned.cell.steps), reward


def _seconds_per_step(task: Task) -> float | None:
    """Of what this launch saw a cell do; a cell too short for two looks counts with its start."""
    if task.pace.seconds_per_step is None and task.began and task.ended and task.seen.step:
        return (task.ended - task.began) / task.seen.step
    return task.pace.seconds_per_step


def labels(tasks: Sequence[Task]) -> dict[str, str]:
    """What tells each cell from the others: S, learning rate and seed, then whatever else varies."""
    keys = varying([task.planned.overrides for task in tasks]) - SHOWN_BY_NAME
    found = {}
    for task in tasks:
        cell = task.planned.cell
        own = [f"S={cell.S}", f"lr={cell.optimizer.lr:g}", f"seed={cell.seed}"]
        found[cell.cell_id] = " ".join(own + only(keys, task.planned.overrides))
    return found
