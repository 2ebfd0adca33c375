"""An exponentially weighted average of the trainer's parameters, and the module that runs it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stalefront.policy import token_logps
from stalefront.setup import trainer_copy

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from stalefront.batch import RolloutBatch
    from stalefront.model import Model


class Average:
    """θ̄ ← decay · θ̄ + (1 − decay) · θ in float32, from the weights that `model` has now."""

    def __init__(self, model: PreTrainedModel, decay: float, options: Model) -> None:
        self.live, self.decay = list(model.parameters()), decay
        self.module = trainer_copy(model, options)
        self._scored = list(self.module.parameters())
        # A float32 model is its own average; one of another type is rounded from it.
        self.values: list[Tensor] = [p.detach().float() for p in self._scored]

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights after an update."""
        for value, live in zip(self.values, self.live, strict=True):
            value.lerp_(live.float(), 1 - self.decay)
        self._round()

    @torch.no_grad()
    def _round(self) -> None:
        """Bring the average into the module where it is not its own."""
        for value, scored in zip(self.values, self._scored, strict=True):
            if value.data_ptr() != scored.data_ptr():
                scored.copy_(value)

    @torch.no_grad()
    def logp_BT(self, piece: RolloutBatch, temperature: float) -> Tensor:
        """log-probs of a micro-batch's tokens."""
        return token_logps(
            self.module,
            piece.tokens_BT,
            piece.position_BT,
            piece.mask_BT,
            temperature=temperature,
            support_BTK=piece.support_BTK,
        ).logp_BT

    def state_dict(self) -> list[Tensor]:
        """The averaged parameters."""
        return self.values

    @torch.no_grad()
    def load_state_dict(self, values: list[Tensor]) -> None:
        """Continue from `state_dict`."""
        for value, stored in zip(self.values, values, strict=True):
            value.copy_(stored)
        self._round()
