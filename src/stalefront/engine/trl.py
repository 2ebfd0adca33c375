"""TRL's `GRPOTrainer` as the learner: the same cell, prompts and completions, with TRL's own loss and update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stalefront.choice import OptionError
from stalefront.engine import Engine

if TYPE_CHECKING:
    from stalefront.build import Parts
    from stalefront.cell import Cell
    from stalefront.session import Session

# Our loss → TRL's loss_type and importance_sampling_level.
LOSSES = {
    "grpo": ("grpo", "token"),
    "bnpo": ("bnpo", "token"),
    "dr_grpo": ("dr_grpo", "token"),
    "dapo": ("dapo", "token"),
    "cispo": ("cispo", "token"),
    "gspo": ("grpo", "sequence"),
}
# The only reduction, and the only values of some fields of a loss, that TRL's own losses stand for.
REDUCTION = {"choice": "own", "denominator": "valid", "advantages_over": "all", "skip_empty": False, "epsilon": 0.0}
LOSS_FIELDS = {
    **{"anchor": "theta/old", "clamp_nats": None, "dual_clip": None, "value_cap": None},
    **{"floor": 0.0, "ppo_mask": False, "gradient": "sequence", "sequence_clamp_nats": None},
}
WAY_OUT = "Or take engine=native."


@dataclass(frozen=True)
class TRL(Engine):
    """What TRL's synchronous trainer can do: reuse of whole batches, without corrections.

    Columns that TRL does not compute are null. There are no checkpoints: an interrupted cell starts over.
    """

    def refuse(self, cell: Cell) -> None:
        """Raise `OptionError` for what the trainer has no seam for, or would do differently."""

        def require(ok: bool, field: str, value: object, legal: str) -> None:
            if not ok:
                raise OptionError(field, value, f"{legal} with engine=trl", WAY_OUT)

        delay, loss, optimizer = cell.delay.choice(), cell.loss.choice(), cell.optimizer
        require(delay in ("none", "reuse"), "delay", delay, "none or reuse")
        require(cell.delay.parts_per_batch == 1, "delay.minibatches", cell.delay.parts_per_batch, "1")
        require(loss in LOSSES, "loss", loss, ", ".join(LOSSES))
        names = [correction.choice() for correction in cell.correction]
        require(not names, "correction", names, "none")
        names = [controller.choice() for controller in cell.controller]
        require(not names, "controller", names, "none")
        names = [entry.choice() for entry in cell.mismatch]
        require(not names, "mismatch", names, "none")
        require(not cell.replay.acts, "replay", cell.replay.choice(), "none")
        require(cell.model.fp32_head == "none", "model.fp32_head", cell.model.fp32_head, "none")
        require(not cell.model.deterministic_topk, "model.deterministic_topk", True, "false")
        require(cell.proximal.choice() == "recompute", "proximal", cell.proximal.choice(), "recompute")
        for field, plain in REDUCTION.items():
            value = cell.reduction.as_dict()[field]
            require(value == plain, "reduction" if field == "choice" else f"reduction.{field}", value, str(plain))
        for field, plain in LOSS_FIELDS.items():
            value = getattr(cell.loss, field, plain)
            require(value == plain, f"loss.{field}", value, str(plain))
        require(cell.model.ranks == 1, "model.ranks", cell.model.ranks, "1")
        require(optimizer.kind != "nsgd", "optimizer.kind", optimizer.kind, "adamw or sgd")
        # TRL divides every micro-batch of bnpo by its own tokens, so the split would change the loss.
        whole = loss != "bnpo" or optimizer.grad_accum == 1
        require(whole, "optimizer.grad_accum", optimizer.grad_accum, "1 for loss=bnpo")
        require(cell.device in ("cpu", "cuda", "cuda:0"), "device", cell.device, "cpu or the only visible CUDA device")

    def run(self, cell: Cell, parts: Parts, session: Session) -> str:
        """See `stalefront.trl_loop.run_trl`."""
        from stalefront.trl_loop import run_trl

        return run_trl(cell, parts, session)
