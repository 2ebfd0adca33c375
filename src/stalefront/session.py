"""What an engine needs of the outside while a cell runs: records, checkpoints, status, and requests to stop."""

from __future__ import annotations

import os
import pickle
import re
import signal
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stalefront.choice import OptionError
from stalefront.paths import CellPaths
from stalefront.ranks import SINGLE, RankError, Ranks
from stalefront.record import StepWriter, read_rows, rewind


def parse_interval(value: int | str) -> tuple[int | None, float | None]:
    """(learner steps, seconds) of a `checkpoint_every`: a whole number is steps, a number with `m` is minutes."""
    text = str(value).strip()
    if re.fullmatch(r"\d+", text) and int(text) > 0:
        return int(text), None
    if re.fullmatch(r"\d+(\.\d+)?m", text) and float(text[:-1]) > 0:
        return None, 60 * float(text[:-1])
    legal = "a number of learner steps (64) or of minutes (10m)"
    raise OptionError("run.checkpoint_every", value, legal)


class Session:
    """One attempt at a cell.

    Parameters
    ----------
    paths
        Files of the cell.
    attempt : int
        From 1.
    checkpoint_every
        Learner steps, or minutes with suffix `m`.
    on_status
        Called with (step, latest validation reward or None) after every record.
    ranks
        The processes that share the cell; the first of them writes.
    asked
        Whether the first rank finds a request to stop that came by another way than a signal.
    """

    def __init__(
        self,
        paths: CellPaths,
        *,
        attempt: int,
        checkpoint_every: int | str,
        on_status: Callable[[int, float | None], None],
        ranks: Ranks = SINGLE,
        asked: Callable[[], bool] = lambda: False,
    ) -> None:
        self.paths, self.attempt, self.on_status = paths, attempt, on_status
        self.ranks, self.asked = ranks, asked
        self.every_steps, self.every_seconds = parse_interval(checkpoint_every)
        self.stop_requested = False
        self.resumed_from_step = 0
        self.last_step: int | None = None
        self.reward_val: float | None = None
        self.warnings: list[str] = []
        self._saved_at = time.monotonic()
        self._writer: StepWriter | None = None

    def stop_on_signals(self) -> None:
        """SIGTERM and SIGUSR2 ask for a checkpoint and an orderly end after the current learner step."""
        for number in (signal.SIGTERM, signal.SIGUSR2):
            signal.signal(number, self._stop)

    def _stop(self, *_: object) -> None:
        self.stop_requested = True

    def load_checkpoint(self) -> dict[str, Any] | None:
        """State to continue from, with the step file brought back to it; None starts over.

        Rows that the continuation will compute again are moved to `attempts/<n>/steps.jsonl` first. A checkpoint that
        cannot be read, or whose rows are not all there, is set aside with them: the cell starts over and says so.
        Of several ranks the first does that, and the others read what it left.
        """
        with self.ranks.first_goes_first():
            state = self._continued()
        self.ranks.check_same("the step to continue from", self.resumed_from_step if state else -1)
        return state

    def _continued(self) -> dict[str, Any] | None:
        state = self._readable_checkpoint()
        rows = [] if state is None else [r for r in read_rows(self.paths.steps) if r["step"] <= state["step"]]
        if state is not None and [row["step"] for row in rows] != list(range(state["step"] + 1)):
            self._start_over(f"the step file does not hold every row up to step {state['step']} of the checkpoint")
            state, rows = None, []
        self.resumed_from_step = 0 if state is None else int(state["step"])
        rewind(self.paths.steps, self.resumed_from_step if state else -1, self._earlier / self.paths.steps.name)
        if rows:
            self.last_step = self.resumed_from_step
            self.reward_val = next((r["reward_val"] for r in reversed(rows) if r["reward_val"] is not None), None)
            self.on_status(self.last_step, self.reward_val)
        return state

    @property
    def _earlier(self) -> Path:
        """Where the attempt before this one is kept."""
        return self.paths.attempt(max(self.attempt - 1, 0))

    def _readable_checkpoint(self) -> dict[str, Any] | None:
        import torch

        if not self.paths.checkpoint.exists():
            return None
        try:
            state: dict[str, Any] = torch.load(
                self.paths.checkpoint, weights_only=True, map_location=self.ranks.map_location
            )
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError, zipfile.BadZipFile) as problem:
            self._start_over(f"the checkpoint cannot be read ({type(problem).__name__})")
            return None
        return state

    def _start_over(self, why: str) -> None:
        """Set the checkpoint aside and note the reason."""
        if not self.ranks.leads:
            raise RankError(f"rank {self.ranks.rank} cannot continue from what the first rank continues from: {why}")
        self.warnings.append(
            f"started over: {why}; what there was lies in {self._earlier.relative_to(self.paths.root)}"
        )
        self._earlier.mkdir(parents=True, exist_ok=True)
        os.replace(self.paths.checkpoint, self._earlier / self.paths.checkpoint.name)

    def record(self, row: dict[str, Any]) -> None:
        """Append a step record and tell the status."""
        if self.ranks.leads:
            self._writer = self._writer or StepWriter(self.paths.steps)
            self._writer.append(row)
        self.last_step = int(row["step"])
        if row.get("reward_val") is not None:
            self.reward_val = float(row["reward_val"])
        self.on_status(self.last_step, self.reward_val)

    def agree(self, step: int) -> tuple[bool, bool]:
        """Whether to stop after this learner step, and whether a checkpoint is due; the same on all ranks."""
        asked = self.stop_requested or (self.ranks.leads and self.asked())
        stop, due = self.ranks.any(asked, self.checkpoint_due(step))
        return stop, due

    def checkpoint_due(self, step: int) -> bool:
        """True when the interval has passed."""
        if self.every_steps is not None:
            return step % self.every_steps == 0
        return time.monotonic() - self._saved_at >= float(self.every_seconds or 0)

    def save_checkpoint(self, step: int, state: dict[str, Any]) -> None:
        """Write a checkpoint in one step; the one before it is valid until then. All ranks hold the same state."""
        if self.ranks.leads:
            self._write_checkpoint(state)
        self._saved_at = time.monotonic()

    def _write_checkpoint(self, state: dict[str, Any]) -> None:
        import torch

        path = self.paths.checkpoint
        path.parent.mkdir(parents=True, exist_ok=True)
        if self._writer is not None:
            self._writer.sync()  # a checkpoint must never be ahead of the rows on the disk
        tmp = path.with_suffix(".tmp")
        with tmp.open("wb") as out:
            torch.save(state, out)
            out.flush()
            os.fsync(out.fileno())
        os.replace(tmp, path)

    def close(self) -> None:
        """Close the step file."""
        if self._writer is not None:
            self._writer.close()
