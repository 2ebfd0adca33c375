"""The learner loop: version → sample → admit → forward → weights → loss → apply → record, read from top to bottom."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from stalefront.advantage import Advantages, group_advantages
from stalefront.batch import LossInputs, RolloutBatch, Update
from stalefront.correction import chain
from stalefront.evaluate import batch_columns, validate
from stalefront.policy import token_logps
from stalefront.reduction import reduction_BT
from stalefront.source import BatchSource, pack, unpack
from stalefront.stats import Seen, lag_columns, step_columns
from stalefront.update import Updater

if TYPE_CHECKING:
    from stalefront.build import Parts
    from stalefront.cell import Cell
    from stalefront.session import Session


def run_loop(cell: Cell, parts: Parts, session: Session) -> str:
    """Run or continue a cell; returns `completed`, `non-finite` or `interrupted`."""
    learner = Learner(cell, parts)
    state = session.load_checkpoint()
    if state is None:
        session.record(learner.start_row())
    else:
        learner.load_state_dict(state)
    while learner.step < cell.steps:
        update, row = learner.advance()
        stop, due = session.agree(learner.step)
        session.record(row)
        if not update.finite:
            return "non-finite"
        if stop or due:
            session.save_checkpoint(learner.step, learner.state_dict())
        if stop and learner.step < cell.steps:
            return "interrupted"
    return "completed"


class Learner:
    """State of the loop: weights, batch in use, counters."""

    def __init__(self, cell: Cell, parts: Parts) -> None:
        self.cell, self.parts = cell, parts
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.source = BatchSource(cell, parts, self._clock)
        self.updater = Updater(parts.model, cell.optimizer)
        self.step = self.version = self.step_in_batch = 0
        self.batch: RolloutBatch | None = None

    def start_row(self) -> dict[str, Any]:
        """Record of π₀."""
        return {"step": 0, "batch": 0, "version": 0, **self.validation(0), **self._wall_columns()}

    def advance(self) -> tuple[Update, dict[str, Any]]:
        """One learner step and its record."""
        cell = self.cell
        if self.batch is None or self.step_in_batch == cell.delay.steps_per_batch:
            self.batch, self.step_in_batch = self.source.take(self.version), 0
        advantages = group_advantages(
            self.batch.reward_B, num_generations=cell.task.num_generations, scale_rewards=cell.loss.scale_rewards
        )
        with self._clock("learn"):
            columns = self._backward(self.batch, advantages)
            lag = lag_columns(self.batch, self.version)
            self.step += 1
            self.step_in_batch += 1
            update = self.updater.apply(self.step, columns.pop("step_scale"))
            self.parts.ranks.check_same("the norm of the parameters", update.param_norm)
            self.version += update.stepped
        row = {
            "step": self.step,
            "batch": self.batch.index,
            "step_in_batch": self.step_in_batch,
            "at_refresh": self.step_in_batch == 1,
            "version": self.version,
            **lag,
            **columns,
            **update.columns(),
            **batch_columns(self.batch, advantages),
            **self.validation(self.step),
            **self._wall_columns(),
        }
        return update, row

    def _backward(self, batch: RolloutBatch, advantages: Advantages) -> dict[str, Any]:
        """Accumulate the gradient of this step's part of the batch; returns its columns."""
        cell, ranks, temperature = self.cell, self.parts.ranks, self.cell.task.temperature
        pieces = self.parts.minibatch_rows[self.step_in_batch % cell.delay.parts_per_batch]
        mask_BT = batch.mask_BT[torch.cat(pieces)]
        reduction = reduction_BT(mask_BT, cell.loss.reduction, max_completion_length=cell.task.max_completion_length)
        self.updater.zero_grad()
        seen: list[Seen] = []
        for rows, reduction_piece in zip(pieces, torch.split(reduction, [len(r) for r in pieces]), strict=True):
            mine = ranks.share(rows)
            piece = batch.rows(mine)
            theta = token_logps(
                self.parts.model, piece.tokens_BT, piece.position_BT, piece.mask_BT, temperature=temperature
            )
            inputs = LossInputs(
                logp_theta_BT=theta.logp_BT,
                logp_old_BT=piece.logp_old_BT,
                logp_behav_BT=piece.logp_behav_BT,
                logp_ref_BT=piece.logp_ref_BT,
                advantage_B=advantages.advantage_B[mine],
                mask_BT=piece.mask_BT,
            )
            weights = chain(cell.correction, inputs)
            value = cell.loss(inputs, weights, ranks.share(reduction_piece))
            torch.autograd.backward(value.loss)
            seen.append(Seen(inputs.detach(), weights, value.detach(), theta.entropy_BT).of_all_ranks(ranks))
        # Weights of tokens are those of the whole part, so that gradients add up over micro-batches and over ranks.
        ranks.sum_(self.updater.gradients())
        return step_columns(seen)

    def validation(self, step: int) -> dict[str, Any]:
        """Held-out columns at this step, absent where none is due."""
        if step % self.cell.validation.every and step != self.cell.steps:
            return {}
        with self._clock("val"):
            return validate(self.cell, self.parts, step)

    def _wall_columns(self) -> dict[str, Any]:
        """Seconds since the last record, by what they were spent on."""
        columns = {f"wall_{name}_s": self.seconds[name] for name in ("rollout", "score", "learn", "val")}
        self.seconds.clear()
        return columns

    @contextmanager
    def _clock(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - start

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on."""
        return {
            "step": self.step,
            "version": self.version,
            "step_in_batch": self.step_in_batch,
            "batch": None if self.batch is None else pack(self.batch),
            "model": self.parts.model.state_dict(),
            "updater": self.updater.state_dict(),
            "source": self.source.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        self.step, self.version, self.step_in_batch = state["step"], state["version"], state["step_in_batch"]
        self.batch = None if state["batch"] is None else unpack(state["batch"])
        self.parts.model.load_state_dict(state["model"])
        self.updater.load_state_dict(state["updater"])
        self.source.load_state_dict(state["source"])
