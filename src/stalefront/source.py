"""Where rollout batches come from: samples with the version the delay asks for, or lets batches wait in a queue."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from stalefront.batch import RolloutBatch
from stalefront.model import clean_copy
from stalefront.policy import token_logps
from stalefront.rollout import Prompts

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from stalefront.build import Parts
    from stalefront.cell import Cell
    from stalefront.rollout import Samples

TRAIN = "rollout"


class VersionStore:
    """The last `keep` versions of the weights, as clones, and one clean module to run them in."""

    def __init__(self, model: PreTrainedModel, keep: int) -> None:
        self.live, self.keep = model, keep
        self.states: dict[int, dict[str, Tensor]] = {}
        self.module = clean_copy(model) if keep else None

    def publish(self, version: int) -> None:
        """Remember the live weights as `version`; forget those no delay can ask for any more."""
        if not self.keep or version in self.states:  # a version is a number of updates: it never changes
            return
        for old in [v for v in self.states if v < version - self.keep]:
            del self.states[old]
        self.states[version] = _clones(self.live.state_dict())

    def at(self, version: int, version_now: int) -> PreTrainedModel:
        """Model holding the weights of `version`."""
        if version == version_now:
            return self.live
        assert self.module is not None, "a delay that samples with older weights declares kept_versions"
        self.module.load_state_dict(self.states[version])
        return self.module


def _clones(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copy of a state dict, in which tied weights stay one tensor."""
    copies: dict[tuple[int, torch.Size, tuple[int, ...]], Tensor] = {}
    cloned: dict[str, Tensor] = {}
    for name, value in state.items():
        place = (value.data_ptr(), value.shape, value.stride())
        # An empty tensor lies nowhere: several share the address 0.
        if not value.numel() or place not in copies:
            copies[place] = value.detach().clone()
        cloned[name] = copies[place]
    return cloned


class BatchSource:
    """Produces rollout batches in order; batch M is the same whoever waits for it."""

    def __init__(self, cell: Cell, parts: Parts, clock: Callable[[str], AbstractContextManager[None]]) -> None:
        """`clock(name)` times what runs inside it: `rollout` and `score`."""
        self.cell, self.parts, self.clock = cell, parts, clock
        self.store = VersionStore(parts.model, cell.delay.kept_versions)
        self.total = -(-cell.steps // cell.delay.steps_per_batch)
        self.produced = 0
        self.queue: deque[RolloutBatch] = deque()

    def take(self, version_now: int) -> RolloutBatch:
        """Next batch for a trainer at `version_now`; samples what the queue lacks, with the weights of now."""
        self.store.publish(version_now)
        consumed = self.produced - len(self.queue)
        # One more is always due: a controller may have made batches serve fewer steps than the total was made from.
        due = max(consumed + 1, min(consumed + 1 + self.cell.delay.queue_batches, self.total))
        while self.produced < due:
            self.produced += 1
            self.queue.append(self._produce(self.produced, version_now))
        return self.queue.popleft().check(version_now)

    def _produce(self, index: int, version_now: int) -> RolloutBatch:
        delay = self.cell.delay
        version = delay.behaviour_version(version_now) if delay.kept_versions else version_now
        model = self.store.at(version, version_now)
        with self.clock("rollout"):
            batch = self.sample(model, index, version, version_now)
        with self.clock("score"):
            return self._with_logps(model, batch)

    def sample(
        self, model: PreTrainedModel, index: int, version: int, trainer_version: int | None = None
    ) -> RolloutBatch:
        """Rollout batch `index` with its rewards, sampled by `model`, whose weights are `version`.

        `trainer_version` is the trainer's meanwhile, by default the same. Log-probs under `old` and the reference
        are not known yet and 0.
        """
        task, parts = self.cell.task, self.parts
        rows = task.train_rows(self.cell.seed, index)
        prompts = parts.sampler.pad(task.encode(rows, parts.tokenizer), parts.device)
        mine = parts.ranks.span(len(rows))
        samples = parts.sampler.sample(
            model,
            Prompts(prompts.tokens_PL[mine], prompts.position_PL[mine]),
            num_generations=task.num_generations,
            seed=self.cell.seed,
            purpose=TRAIN,
            batch=index,
            first_row=mine.start * task.num_generations,
        )
        columns = [row for row in rows[mine] for _ in range(task.num_generations)]
        reward = task.score(columns, samples.texts, samples.completion_ids)
        whole, reward_B = self._of_all_ranks(samples, reward)
        return self._batch(whole, reward_B, index, version, version if trainer_version is None else trainer_version)

    def _of_all_ranks(self, samples: Samples, reward: list[float]) -> tuple[Samples, Tensor]:
        """Sequences and rewards of every rank in the order of rows, as wide as the longest; texts stay this rank's."""
        ranks = self.parts.ranks
        width = int(max(ranks.numbers(samples.tokens_BT.shape[1])))
        wide = samples.widened(width, self.parts.sampler.tokenizer.pad_token_id)
        names = ("tokens_BT", "position_BT", "mask_BT", "logp_behav_BT", "truncated_B")
        reward_B = torch.tensor(reward, dtype=torch.float64, device=wide.mask_BT.device)
        *gathered, reward_B = ranks.gather([*(getattr(wide, name) for name in names), reward_B])
        columns: dict[str, Any] = dict(zip(names, gathered, strict=True))
        return replace(wide, **columns), reward_B

    def _batch(
        self, samples: Samples, reward_B: Tensor, index: int, version: int, trainer_version: int
    ) -> RolloutBatch:
        mask, size = samples.mask_BT, samples.mask_BT.shape[0]
        zero = torch.zeros_like(samples.logp_behav_BT)
        # Sampled in one go: the trainer's version is the same when a sequence is scheduled, started and finished.
        trainer_B = torch.full((size,), trainer_version, device=mask.device)
        return RolloutBatch(
            tokens_BT=samples.tokens_BT,
            position_BT=samples.position_BT,
            mask_BT=mask,
            kv_stale_BT=torch.zeros_like(mask),
            logp_behav_BT=samples.logp_behav_BT,
            logp_old_BT=zero,
            logp_ref_BT=zero,
            version_BT=torch.where(mask, version, -1),
            reward_B=reward_B,
            group_B=torch.arange(size, device=mask.device) // self.cell.task.num_generations,
            truncated_B=samples.truncated_B,
            scheduled_version_B=trainer_B,
            started_version_B=trainer_B,
            finished_version_B=trainer_B,
            routes_LBTK=None,
            index=index,
        )

    @torch.no_grad()
    def _with_logps(self, model: PreTrainedModel, batch: RolloutBatch) -> RolloutBatch:
        """Adds the trainer's log-probs under the sampling weights and under the reference.

        In the very slices that the learner will use: a forward's last bits depend on its shape, and on-policy
        log θ/old must be exactly 0.
        """
        old, ref = torch.zeros_like(batch.logp_old_BT), torch.zeros_like(batch.logp_ref_BT)
        entropy = torch.zeros_like(old) if needs(self.cell, "entropy_behav_BT") else None
        for rows in (self.parts.ranks.share(rows) for part in self.parts.minibatch_rows for rows in part):
            piece = batch.rows(rows)
            inputs = (piece.tokens_BT, piece.position_BT, piece.mask_BT)
            temperature = self.cell.task.temperature
            found = token_logps(model, *inputs, temperature=temperature)
            old[rows] = found.logp_BT
            if entropy is not None:
                entropy[rows] = found.entropy_BT
            ref[rows] = token_logps(self.parts.reference, *inputs, temperature=temperature).logp_BT
        # Every row was scored by one rank and is 0 on the others.
        self.parts.ranks.sum_([old, ref] if entropy is None else [old, ref, entropy])
        return replace(batch, logp_old_BT=old, logp_ref_BT=ref, entropy_behav_BT=entropy)

    def state_dict(self) -> dict[str, Any]:
        """Waiting batches, kept versions and the count."""
        return {
            "produced": self.produced,
            "queue": [pack(batch) for batch in self.queue],
            "versions": self.store.states,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        self.produced = state["produced"]
        self.queue = deque(unpack(batch) for batch in state["queue"])
        self.store.states = state["versions"]


def needs(cell: Cell, field: str) -> bool:
    """Whether some rule of the cell needs the optional `field` of the loss inputs."""
    declared = [cell.loss.needs, cell.proximal.needs, *(correction.needs for correction in cell.correction)]
    return any(field in names for names in declared)


def pack(batch: RolloutBatch) -> dict[str, Any]:
    """Plain mapping of a batch."""
    return {f.name: getattr(batch, f.name) for f in fields(batch)}


def unpack(values: dict[str, Any]) -> RolloutBatch:
    """Batch of `pack`."""
    return RolloutBatch(**values)
