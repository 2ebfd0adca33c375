"""A cell on TRL's `GRPOTrainer`: our π₀, prompts, sampler, optimizer and records around TRL's loop and loss."""

from __future__ import annotations

import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import add_fused_lm_head

from stalefront.advantage import group_advantages
from stalefront.engine.trl import LOSSES
from stalefront.evaluate import batch_columns, validate
from stalefront.source import BatchSource
from stalefront.update import Updater, clip_factor, flat

if TYPE_CHECKING:
    from stalefront.batch import RolloutBatch
    from stalefront.build import Parts
    from stalefront.cell import Cell
    from stalefront.session import Session

# Metric of TRL → column, where the two mean the same.
METRICS = {"loss": "loss", "entropy": "entropy_nats"}
CLIP_METRICS = {"clip_ratio/low_mean": "clip_low_frac", "clip_ratio/high_mean": "clip_high_frac"}


def run_trl(cell: Cell, parts: Parts, session: Session) -> str:
    """Run a cell from its start; returns `completed`, `non-finite` or `interrupted`."""
    session.load_checkpoint()  # there is none: this only moves the rows of an earlier attempt out of the way
    recorder = Recorder(cell, parts, session)
    session.record({"step": 0, "batch": 0, "version": 0, **recorder.validation(0)})
    with tempfile.TemporaryDirectory() as folder, quiet():
        trainer = make_trainer(cell, parts, recorder, folder)
        trainer.train()
    return recorder.state


class Recorder(TrainerCallback):  # type: ignore[misc]
    """Samples for the trainer, and writes a step record after each of its updates."""

    def __init__(self, cell: Cell, parts: Parts, session: Session) -> None:
        self.cell, self.parts, self.session = cell, parts, session
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.source = BatchSource(cell, parts, self._clock)
        self.updater = Updater(parts.model, cell.optimizer)
        self.batch: RolloutBatch | None = None
        self.before: tuple[Tensor, Tensor, float] | None = None
        self.state = "completed"

    def rollout(self, prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        """Rollout batch that the step after `trainer.state.global_step` begins with, in TRL's form."""
        version = int(trainer.state.global_step)
        index = version // self.cell.delay.steps_per_batch + 1
        with self._clock("rollout"), evaluating(self.parts.model):
            batch = self.source.sample(self.parts.model, index, version)
        expected = [text for text in prompt_texts(self.cell, self.parts, index) for _ in range(self._group)]
        assert prompts == expected, f"TRL asks for other prompts than those of rollout batch {index}"
        self.batch = batch
        width = int(batch.mask_BT.any(0).float().argmax())
        rows = list(zip(batch.tokens_BT, batch.position_BT, batch.mask_BT, batch.logp_behav_BT, strict=True))
        return {
            "prompt_ids": [tokens[:width][place[:width] >= 0].tolist() for tokens, place, _, _ in rows],
            "completion_ids": [tokens[mask].tolist() for tokens, _, mask, _ in rows],
            "logprobs": [logp[mask].tolist() for _, _, mask, logp in rows],
            "sampled_reward": batch.reward_B.tolist(),
        }

    @property
    def _group(self) -> int:
        return self.cell.task.num_generations

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Start the clock of a learner step."""
        self.seconds.clear()
        self.started = time.perf_counter()

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Keep the gradient that is about to be applied, the weights it is applied to, and the rate."""
        gradient = flat([p.grad for p in self.updater.params if p.grad is not None])
        rate = float(self.updater.torch.param_groups[0]["lr"])
        self.before = flat(self.updater.params), gradient, rate

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        """Write the record of the step just taken; stop on non-finite weights or on request."""
        if self.before is None:
            return  # the summary at the end of training
        before, gradient, rate = self.before
        self.before = None
        self.seconds["learn"] = time.perf_counter() - self.started - self.seconds["rollout"]
        raw = float(logs["grad_norm"])
        factor = clip_factor(raw, self.cell.optimizer.max_grad_norm)
        update = self.updater.measure(before, gradient, raw=raw, factor=factor, lr=rate, lr_scale=1.0)
        step = int(state.global_step)
        self.session.record(
            {
                **self._place(step),
                **{column: logs[name] for name, column in self._metrics().items() if name in logs},
                **update.columns(),
                **self._reward_columns(),
                **self.validation(step),
                **{f"wall_{name}_s": self.seconds[name] for name in ("rollout", "learn", "val")},
            }
        )
        if not update.finite:
            self.state = "non-finite"
        elif self.session.stop_requested and step < self.cell.steps:
            self.state = "interrupted"
        control.should_training_stop = control.should_training_stop or self.state != "completed"

    def _place(self, step: int) -> dict[str, Any]:
        """Where in the schedule a step is: the whole batch was finished by the weights of its first step."""
        earlier, lag = divmod(step - 1, self.cell.delay.steps_per_batch)
        assert self.batch is not None
        return {
            "step": step,
            "batch": earlier + 1,
            "step_in_batch": lag + 1,
            "at_refresh": lag == 0,
            "version": step,
            "tokens": int(self.batch.mask_BT.sum()),
            "tokens_kept_frac": 1.0,
            "rows_kept_frac": 1.0,
            "lag_mean_updates": float(lag),
            "lag_max_updates": float(lag),
            "lag_wait_mean_updates": float(lag),
            "lag_gen_mean_updates": 0.0,
        }

    def _metrics(self) -> dict[str, str]:
        """TRL's cispo counts positive advantages alone, and its sequence level averages over sequences."""
        same = self.cell.loss.choice() not in ("cispo", "gspo")
        return METRICS | CLIP_METRICS if same else METRICS

    def _reward_columns(self) -> dict[str, Any]:
        assert self.batch is not None
        scale = self.cell.loss.scale_rewards
        advantages = group_advantages(self.batch.reward_B, num_generations=self._group, scale_rewards=scale)
        return batch_columns(self.batch, advantages)

    def validation(self, step: int) -> dict[str, Any]:
        """Held-out columns at this step, absent where none is due."""
        if step % self.cell.validation.every and step != self.cell.steps:
            return {}
        with self._clock("val"), evaluating(self.parts.model):
            return validate(self.cell, self.parts, step)

    @contextmanager
    def _clock(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - start


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Evaluation mode inside, the mode from before after it."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


@contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings that TRL gives about itself and about what it calls by an old name."""
    with warnings.catch_warnings():
        for message, category in (
            ("You are using 'rollout_func'", UserWarning),
            ("`is_gradient_checkpointing` is deprecated", FutureWarning),
        ):
            warnings.filterwarnings("ignore", message=message, category=category)
        yield


class QuietTrainer(GRPOTrainer):  # type: ignore[misc]
    """`GRPOTrainer` that reports to nobody."""

    def _send_telemetry(self) -> None:
        """TRL tells the hub which trainer is used; a cell makes no network request."""


def make_trainer(cell: Cell, parts: Parts, recorder: Recorder, folder: str) -> GRPOTrainer:
    """Trainer whose every step is a learner step of `cell`; `folder` is for what it insists on writing."""
    batches = -(-cell.steps // cell.delay.steps_per_batch)
    prompts = [text for index in range(1, batches + 1) for text in prompt_texts(cell, parts, index)]
    schedule = torch.optim.lr_scheduler.LambdaLR(
        recorder.updater.torch, lambda done: cell.optimizer.lr_at(done + 1) / cell.optimizer.lr
    )
    trainer = QuietTrainer(
        model=parts.model,
        reward_funcs=sampled_reward,
        args=GRPOConfig(**trainer_options(cell, folder)),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=parts.tokenizer,
        callbacks=[recorder],
        optimizers=(recorder.updater.torch, schedule),
        rollout_func=recorder.rollout,
    )
    trainer.remove_callback(PrinterCallback)
    if cell.loss.beta:
        # TRL loads a reference by the model's name, which a warmed-up model has none of: give it ours, prepared alike.
        add_fused_lm_head(parts.reference, temperature=cell.task.temperature)
        trainer.ref_model, trainer.beta = parts.reference, cell.loss.beta
    return trainer


def trainer_options(cell: Cell, folder: str) -> dict[str, Any]:
    """Keyword arguments of `GRPOConfig`: whole batches, S iterations on each, no saving, no reporting."""
    loss, task, optimizer = cell.loss, cell.task, cell.optimizer
    loss_type, level = LOSSES[loss.choice()]
    clip = {name: getattr(loss, name) for name in ("epsilon", "epsilon_high", "delta") if hasattr(loss, name)}
    accumulate = optimizer.grad_accum
    return clip | {
        "output_dir": folder,
        "loss_type": loss_type,
        "importance_sampling_level": level,
        "use_bias_correction_kl": loss.use_bias_correction_kl,
        "scale_rewards": loss.scale_rewards,
        "beta": 0.0,
        "num_iterations": cell.delay.steps_per_batch,
        "num_generations": task.num_generations,
        "per_device_train_batch_size": task.num_prompts * task.num_generations // accumulate,
        "gradient_accumulation_steps": accumulate,
        "steps_per_generation": accumulate,
        "shuffle_dataset": False,
        "max_steps": cell.steps,
        "max_completion_length": task.max_completion_length,
        "temperature": task.temperature,
        "learning_rate": optimizer.lr,
        "max_grad_norm": optimizer.max_grad_norm or 0.0,
        "disable_dropout": True,
        "bf16": False,
        "activation_checkpointing": False,
        "use_cpu": cell.device == "cpu",
        "seed": cell.seed,
        "report_to": [],
        "save_strategy": "no",
        "logging_strategy": "steps",
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "log_level": "error",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }


def prompt_texts(cell: Cell, parts: Parts, index: int) -> list[str]:
    """Rendered prompts of rollout batch `index`."""
    return [cell.task.render(row, parts.tokenizer) for row in cell.task.train_rows(cell.seed, index)]


def sampled_reward(sampled_reward: list[float], **_: Any) -> list[float]:
    """Reward that was scored when the completion was sampled."""
    return sampled_reward
