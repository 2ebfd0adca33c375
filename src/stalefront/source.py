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
from stalefront.inference import Place
from stalefront.mismatch import Logging
from stalefront.mismatch.parity import Parity
from stalefront.policy import token_logps
from stalefront.setup import make_inference, trainer_copy
from stalefront.stats import TAIL
from stalefront.trainer_routers import TrainerRouters

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from stalefront.build import Parts
    from stalefront.cell import Cell
    from stalefront.rollout import Samples

TRAIN = "rollout"
# Columns of samples whose first dimension is rows.
GATHERED = (
    *("tokens_BT", "position_BT", "mask_BT", "logp_behav_BT", "truncated_B"),
    *("support_BTK", "route_hash_B", "misaligned_B"),
)


class VersionStore:
    """The last `keep` versions of the weights, as clones, and one clean module to run them in."""

    def __init__(self, model: PreTrainedModel, keep: int, module: PreTrainedModel | None) -> None:
        self.live, self.keep, self.module = model, keep, module
        self.states: dict[int, dict[str, Tensor]] = {}

    def publish(self, version: int) -> None:
        """Remember the live weights as `version`; forget those no delay can ask for any more."""
        if not self.keep or version in self.states:  # a version is a number of updates: it never changes
            return
        for old in [v for v in self.states if v < version - self.keep]:
            del self.states[old]
        self.states[version] = _clones(self.live.state_dict())

    def pushed_before(self, version: int, pushes: int) -> int | None:
        """Version that was pushed `pushes` weight pushes before `version`, or the oldest one; None where none was."""
        older = sorted((v for v in self.states if v < version), reverse=True)[:pushes]
        return older[-1] if older else None

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
        keep = cell.kept_versions
        self.store = VersionStore(parts.model, keep, trainer_copy(parts.model, cell.model) if keep else None)
        self.inference = make_inference(cell, parts)
        self.routers = TrainerRouters(parts.routed)
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
        return self.queue.popleft().check(version_now, noisy_log=bool(self.inference.of(Logging)))

    def _produce(self, index: int, version_now: int) -> RolloutBatch:
        delay = self.cell.delay
        version = delay.behaviour_version(version_now) if delay.kept_versions else version_now
        with self.clock("rollout"):
            # Before the model is loaded: the store has one module for all its versions.
            before = self._before(version, version_now)
            model = self.store.at(version, version_now)
            batch = self.sample(model, index, version, version_now, before=before)
        with self.clock("score"):
            return self._with_logps(model, batch)

    def _before(self, version: int, version_now: int) -> PreTrainedModel | None:
        """Module with the older weights that a stale cache was filled by; None where there is none."""
        pushes = max((entry.older_pushes for entry in self.inference.active), default=0)
        older = self.store.pushed_before(version, pushes) if pushes else None
        return None if older is None else self.inference.load_before(self.store.at(older, version_now))

    def sample(
        self,
        model: PreTrainedModel,
        index: int,
        version: int,
        trainer_version: int | None = None,
        *,
        before: PreTrainedModel | None = None,
    ) -> RolloutBatch:
        """Rollout batch `index` with its rewards, sampled by `model`, whose weights are `version`.

        `trainer_version` is the trainer's meanwhile, by default the same. `before` filled the cache of the prompts.
        Log-probs under `old` and the reference are not known yet and 0.
        """
        task, parts = self.cell.task, self.parts
        rows = task.train_rows(self.cell.seed, index)
        prompts = parts.sampler.pad(task.encode(rows, parts.tokenizer), parts.device)
        mine = parts.ranks.span(len(rows))
        place = Place(self.cell.seed, TRAIN, index, mine.start * task.num_generations)
        samples = parts.sampler.sample(
            self.inference.load(model, before),
            prompts.rows(mine),
            num_generations=task.num_generations,
            **place._asdict(),
            inference=self.inference,
        )
        columns = [row for row in rows[mine] for _ in range(task.num_generations)]
        reward = task.score(columns, samples.texts, samples.completion_ids)
        samples = self.inference.handed_over(samples, place, parts.sampler)
        # On the path of parity every token was drawn in the shapes of the full width.
        full = task.max_completion_length if self.inference.of(Parity) else 0
        whole, reward_B = self._of_all_ranks(samples, reward, prompts.tokens_PL.shape[1] + full)
        batch = self._batch(whole, reward_B, index, version, version if trainer_version is None else trainer_version)
        # All but the last token of a prompt is what a cache holds: a single token is fed anew.
        stale = before is not None and prompts.tokens_PL.shape[1] > 1
        return replace(batch, kv_stale_BT=batch.mask_BT) if stale else batch

    def _of_all_ranks(self, samples: Samples, reward: list[float], width: int) -> tuple[Samples, Tensor]:
        """Sequences and rewards of every rank in the order of rows, at least `width` wide; texts stay this rank's."""
        ranks = self.parts.ranks
        kept = 0 if samples.support_BTK is None else samples.support_BTK.shape[2]
        widths, supports = ranks.numbers(max(width, samples.tokens_BT.shape[1])), ranks.numbers(kept)
        wide = samples.widened(int(max(widths)), self.parts.sampler.tokenizer.pad_token_id, int(max(supports)))
        # Rows first: ranks put theirs below one another.
        columns = {name: value for name in GATHERED if (value := getattr(wide, name)) is not None}
        if wide.routes_LBTK is not None:
            columns["routes_LBTK"] = wide.routes_LBTK.transpose(0, 1)
        reward_B = torch.tensor(reward, dtype=torch.float64, device=wide.mask_BT.device)
        *gathered, reward_B = ranks.gather([*columns.values(), reward_B])
        found: dict[str, Any] = dict(zip(columns, gathered, strict=True))
        if "routes_LBTK" in found:
            found["routes_LBTK"] = found["routes_LBTK"].transpose(0, 1).contiguous()
        return replace(wide, **found), reward_B

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
            routes_LBTK=samples.routes_LBTK,
            index=index,
            support_BTK=samples.support_BTK,
            route_hash_B=samples.route_hash_B,
            misaligned_B=samples.misaligned_B,
        )

    @torch.no_grad()
    def _with_logps(self, model: PreTrainedModel, batch: RolloutBatch) -> RolloutBatch:
        """Adds the trainer's log-probs under the sampling weights and under the reference.

        In the very slices that the learner will use: a forward's last bits depend on its shape, and on-policy
        log θ/old must be exactly 0.
        """
        found: dict[str, Tensor] = {
            name: torch.zeros_like(batch.logp_old_BT)
            for name in ("logp_old_BT", "logp_ref_BT", "entropy_behav_BT", "tail_mass_BT")
        }
        own: Tensor | None = None
        options: dict[str, Any] = {"temperature": self.cell.task.temperature, "tail_below": TAIL}
        for rows in (self.parts.ranks.share(rows) for part in self.parts.minibatch_rows for rows in part):
            piece = batch.rows(rows)
            inputs = (piece.tokens_BT, piece.position_BT, piece.mask_BT)
            with self.routers.around(model, piece, self.cell.replay.in_old(piece)) as seen:
                old = token_logps(model, *inputs, support_BTK=piece.support_BTK, **options)
            found["logp_old_BT"][rows], found["entropy_behav_BT"][rows] = old.logp_BT, old.entropy_BT
            assert old.tail_BT is not None
            found["tail_mass_BT"][rows] = old.tail_BT
            if self.parts.routed:
                routes = seen.own_LBTK.int()
                own = routes.new_zeros(len(routes), *batch.mask_BT.shape, routes.shape[-1]) if own is None else own
                own[:, rows] = routes
            # The reference is another policy: it routes as it likes.
            reference = token_logps(self.parts.reference, *inputs, support_BTK=piece.support_BTK, **options)
            found["logp_ref_BT"][rows] = reference.logp_BT
        # Every row was scored by one rank and is 0 on the others.
        self.parts.ranks.sum_([*found.values(), *([] if own is None else [own])])
        columns: dict[str, Any] = dict(found)
        if own is not None:
            columns["own_routes_LBTK"] = self._known(own, batch)
        return replace(batch, **columns)

    def _known(self, own_LBTK: Tensor, batch: RolloutBatch) -> Tensor:
        return own_LBTK.to(torch.int16).masked_fill(~batch.real_BT[None, :, :, None], -1)

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


def pack(batch: RolloutBatch) -> dict[str, Any]:
    """Plain mapping of a batch."""
    return {f.name: getattr(batch, f.name) for f in fields(batch)}


def unpack(values: dict[str, Any]) -> RolloutBatch:
    """Batch of `pack`."""
    return RolloutBatch(**values)
