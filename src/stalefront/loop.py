"""The learner loop: version → sample → admit → forward → weights → loss → decide → apply → record, read downwards."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from stalefront.advantage import Advantages, group_advantages
from stalefront.average import Average
from stalefront.batch import LossInputs, RolloutBatch, Update, Weights
from stalefront.calibration import calibrate
from stalefront.controller import Controllers, Step
from stalefront.correction import chain
from stalefront.evaluate import batch_columns, validate
from stalefront.inert import Acted
from stalefront.objective import counted_BT
from stalefront.policy import token_logps
from stalefront.proximal.ema import EMA
from stalefront.sampler_stats import sampler_columns
from stalefront.source import BatchSource, pack, unpack
from stalefront.stats import Seen, joined, lag_columns, step_columns
from stalefront.trainer_routers import LearnerRouters
from stalefront.update import Updater, flat

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
    del state  # it holds a second copy of the weights
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
    if warning := learner.inert():
        session.warnings.append(warning)
    return "completed"


class Learner:
    """State of the loop: weights, batch in use, what controllers remember, counters."""

    def __init__(self, cell: Cell, parts: Parts) -> None:
        self.cell, self.parts = cell, parts
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.source = BatchSource(cell, parts, self._clock)
        self.updater = Updater(parts.model, cell.optimizer)
        self.controllers = Controllers(cell.controller, cell)
        self.average = Average(parts.model, cell.proximal.decay, cell.model) if isinstance(cell.proximal, EMA) else None
        self.acted = Acted(cell)
        self.routers = LearnerRouters(cell, parts)
        self.step = self.version = self.step_in_batch = 0
        self.steps_per_batch = cell.delay.steps_per_batch
        self.batch: RolloutBatch | None = None

    def start_row(self) -> dict[str, Any]:
        """Record of π₀; the strength of the mismatch is found first."""
        with self._clock("score"):
            found = calibrate(self.cell, self.parts, self.source.inference)
        size = {} if found is None else {"mismatch_factor": found.factor, "mismatch_kl_nats": found.kl_nats}
        return {"step": 0, "batch": 0, "version": 0, **size, **self.validation(0), **self._wall_columns()}

    def advance(self) -> tuple[Update, dict[str, Any]]:
        """One learner step and its record."""
        batch, new_weights = self._batch()
        advantages = self._advantages(batch.reward_B)
        self.routers.start(self.step + 1)
        with self._clock("learn"):
            seen = self._backward(batch, advantages)
            columns = step_columns(seen)
            self.acted.clip(columns)
            lag = lag_columns(batch, self.version)
            self.step += 1
            self.step_in_batch += 1
            update = self._apply(seen, columns.pop("step_scale"), new_weights=new_weights)
            self.parts.ranks.check_same("the norm of the parameters", update.param_norm)
            self.version += update.stepped
        row = {
            "step": self.step,
            "batch": batch.index,
            "step_in_batch": self.step_in_batch,
            "at_refresh": self.step_in_batch == 1,
            "version": self.version,
            **lag,
            **columns,
            **update.columns(),
            **self.controllers.columns(),
            **batch_columns(batch, advantages),
            **sampler_columns(batch),
            **self.routers.columns(),
            **self.validation(self.step),
            **self._wall_columns(),
        }
        return update, row

    def _batch(self) -> tuple[RolloutBatch, bool]:
        """The rollout batch of this step, and whether it is the first one from the weights that sampled it."""
        before = self.batch
        if before is not None and self.step_in_batch < self.steps_per_batch:
            return before, False
        self.batch, self.step_in_batch = self.source.take(self.version), 0
        self.steps_per_batch = self.cell.delay.steps_divided_by(self.controllers.staleness_divisor)
        return self.batch, before is not None and _newest(self.batch) > _newest(before)

    def _advantages(self, reward_B: Tensor, keep_B: Tensor | None = None) -> Advantages:
        task, loss = self.cell.task, self.cell.loss
        return group_advantages(
            reward_B, num_generations=task.num_generations, scale_rewards=loss.scale_rewards, keep_B=keep_B
        )

    def _backward(self, batch: RolloutBatch, advantages: Advantages) -> list[Seen]:
        """Accumulate the gradient of this step's part of the batch; returns what its micro-batches looked like."""
        cell, ranks = self.cell, self.parts.ranks
        pieces = self.parts.minibatch_rows[self.step_in_batch % cell.delay.parts_per_batch]
        sizes = [len(rows) for rows in pieces]
        part = torch.cat(pieces)
        number_B = torch.repeat_interleave(torch.arange(len(pieces)), torch.tensor(sizes)).to(part.device)
        reduction_BT = self._reduction_BT(batch.mask_BT[part], batch.group_B[part], number_B)
        self.updater.zero_grad()
        seen: list[Seen] = []
        for rows, share_BT in zip(pieces, torch.split(reduction_BT, sizes), strict=True):
            mine = ranks.share(rows)
            piece = batch.rows(mine)
            # Around the backward too: with gradient checkpointing it runs the forward again.
            with self.routers.around(piece):
                inputs, entropy_BT = self._inputs(piece, advantages.advantage_B[mine])
                weights = chain(cell.correction, inputs, self._watch(inputs.mask_BT))
                inputs = self._over_kept(inputs, weights)
                if cell.reduction.denominator == "kept":  # the step is in one piece then: see pairs.check_pairs
                    counted = counted_BT(cell.reduction, inputs, weights)
                    share_BT = self._reduction_BT(counted, batch.group_B[rows], number_B)
                value = cell.loss(inputs, weights, ranks.share(share_BT))
                torch.autograd.backward(value.loss)
            inputs = inputs.detach()
            self.routers.probe(piece, inputs.logp_theta_BT)
            seen.append(Seen(inputs, weights, value.detach(), entropy_BT).of_all_ranks(ranks))
        # Weights of tokens are those of the whole part, so that gradients add up over micro-batches and over ranks.
        ranks.sum_(self.updater.gradients())
        return seen

    def _inputs(self, piece: RolloutBatch, advantage_B: Tensor) -> tuple[LossInputs, Tensor]:
        """Loss inputs of a micro-batch, its proximal policy in place, and the present policy's entropy."""
        temperature = self.cell.task.temperature
        theta = token_logps(
            self.parts.model,
            piece.tokens_BT,
            piece.position_BT,
            piece.mask_BT,
            temperature=temperature,
            support_BTK=piece.support_BTK,
        )
        inputs = LossInputs(
            logp_theta_BT=theta.logp_BT,
            logp_old_BT=piece.logp_old_BT if self.average is None else self._averaged_BT(self.average, piece),
            logp_behav_BT=piece.logp_behav_BT,
            logp_ref_BT=piece.logp_ref_BT,
            advantage_B=advantage_B,
            mask_BT=piece.mask_BT,
            reward_B=piece.reward_B,
            group_B=piece.group_B,
            lag_BT=torch.where(piece.mask_BT, self.version - piece.version_BT, 0),
            entropy_behav_BT=piece.entropy_behav_BT,
            logp_recomputed_BT=piece.logp_old_BT,
        )
        return self.cell.proximal(inputs), theta.entropy_BT

    def _averaged_BT(self, average: Average, piece: RolloutBatch) -> Tensor:
        """Log-probs under the averaged weights, by the experts that θ takes where those are replayed."""
        with self.routers.like_theta(average.module, piece):
            return average.logp_BT(piece, self.cell.task.temperature)

    def _watch(self, mask_BT: Tensor) -> Callable[[str, Weights, Weights], None]:
        return lambda name, before, after: self.acted.correction(name, before, after, mask_BT)

    def _over_kept(self, inputs: LossInputs, weights: Weights | None) -> LossInputs:
        """The inputs with advantages over the sequences that corrections left a token of, where that is asked for."""
        if weights is None or self.cell.reduction.advantages_over == "all":
            return inputs
        assert inputs.reward_B is not None
        kept_B = (weights.keep_BT & inputs.mask_BT).any(-1)
        return replace(inputs, advantage_B=self._advantages(inputs.reward_B, kept_B).advantage_B)

    def _reduction_BT(self, mask_BT: Tensor, group_B: Tensor, number_B: Tensor) -> Tensor:
        """Weights of the tokens of a step's part; `number_B` says which micro-batch a sequence is in."""
        return self.cell.reduction.weights_BT(
            mask_BT,
            self.cell.loss.reduction,
            max_completion_length=self.cell.task.max_completion_length,
            group_B=group_B,
            micro_batch_B=number_B,
        )

    def _apply(self, seen: list[Seen], step_scale: float, *, new_weights: bool) -> Update:
        """Ask the controllers, apply the update, and tell them and the average what was applied."""
        controllers, updater = self.controllers, self.updater
        now = Step(
            step=self.step,
            inputs=joined([piece.inputs for piece in seen]),
            gradient=flat(updater.gradients()) if controllers.needs_gradient else None,
            previous_gradient=updater.previous_grad,
            first_of_batch=self.step_in_batch == 1,
            new_weights=new_weights,
        )
        update = updater.apply(self.step, step_scale, controllers.decide(now))
        controllers.observe(update)
        if self.average is not None and update.stepped:
            self.average.update()
        return update

    def inert(self) -> str | None:
        """Warning about controls that never acted."""
        self.acted.agree(self.parts.ranks)
        return self.acted.warning(self.controllers, self.step)

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
        self.acted.agree(self.parts.ranks)
        return {
            "step": self.step,
            "version": self.version,
            "step_in_batch": self.step_in_batch,
            "steps_per_batch": self.steps_per_batch,
            "controllers": self.controllers.state_dict(),
            "average": None if self.average is None else self.average.state_dict(),
            "acted": self.acted.found,
            "batch": None if self.batch is None else pack(self.batch),
            "model": self.parts.model.state_dict(),
            "updater": self.updater.state_dict(),
            "source": self.source.state_dict(),
            "mismatch_factor": self.source.inference.factor,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        self.step, self.version, self.step_in_batch = state["step"], state["version"], state["step_in_batch"]
        self.batch = None if state["batch"] is None else unpack(state["batch"])
        # A checkpoint from before there were controllers has none of these.
        self.steps_per_batch = state.get("steps_per_batch", self.steps_per_batch)
        self.acted.found |= state.get("acted", {})
        if "controllers" in state:
            self.controllers.load_state_dict(state["controllers"])
        if self.average is not None:
            self.average.load_state_dict(state["average"])
        self.parts.model.load_state_dict(state["model"])
        self.updater.load_state_dict(state["updater"])
        self.source.load_state_dict(state["source"])
        self.source.inference.scale(state.get("mismatch_factor", 1.0))


def _newest(batch: RolloutBatch) -> int:
    """Latest version that sampled a token of the batch."""
    return int(batch.version_BT.max())
