"""Modules of a cell beside its live one: copies that compute as the trainer does, and those of the sampler."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from stalefront.inference import Inference
from stalefront.mismatch import HalfPath
from stalefront.mismatch.parity import Parity
from stalefront.mismatch.stale_kv import StaleKV
from stalefront.model import clean_copy
from stalefront.routing import RouterTap, find_routers, stable_topk
from stalefront.sampler_module import SamplerModule, float32_head

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from stalefront.build import Parts
    from stalefront.cell import Cell
    from stalefront.model import Model


def dress(model: PreTrainedModel, options: Model) -> PreTrainedModel:
    """Make `model` compute as the trainer does: float32 head, deterministic choice of experts, where asked for."""
    if options.fp32_head != "none":
        float32_head(model)
    if options.deterministic_topk:
        RouterTap(model).always(StableChoice())
    return model


def trainer_copy(model: PreTrainedModel, options: Model) -> PreTrainedModel:
    """Another module with the weights of `model` that computes as the trainer does."""
    return dress(clean_copy(model), options)


class StableChoice:
    """Router change: of experts with equal scores those with the lowest indices, on any device and in any shape."""

    def logits(self, logits_NE: Tensor, layer: int) -> Tensor:
        """As they are."""
        return logits_NE

    def choose(self, scores_NE: Tensor, own_NK: Tensor, layer: int) -> Tensor:
        """The stable choice."""
        return stable_topk(scores_NE, own_NK.shape[-1])


def make_inference(cell: Cell, parts: Parts) -> Inference:
    """The sampler of a cell, with the modules of its own that the mismatch asks for.

    Raises
    ------
    RoutingError
        If routes are to be replayed or changed, and the model has none or none that are understood.
    """
    if cell.replay.acts or any(entry.needs_experts for entry in cell.mismatch):
        find_routers(parts.model)

    def module(dtype: torch.dtype | None = None) -> SamplerModule:
        made = SamplerModule(parts.model, cell.mismatch, dtype=dtype, float32_head=cell.model.fp32_head == "both")
        if cell.model.deterministic_topk:
            RouterTap(made.module).always(StableChoice())
        return made

    half = next((entry for entry in cell.mismatch if isinstance(entry, HalfPath)), None)
    # A head in float32 that is the trainer's alone: the sampler cannot run the trainer's module.
    own = any(entry.own_module for entry in cell.mismatch) or cell.model.fp32_head == "trainer"
    return Inference(
        cell.task.temperature,
        cell.mismatch,
        module=module() if own else None,
        half=None if half is None else module(half.dtype),
        before=module() if any(isinstance(entry, StaleKV) for entry in cell.mismatch) else None,
        routed=parts.routed and not any(isinstance(entry, Parity) for entry in cell.mismatch),
        slices=[rows for part in parts.minibatch_rows for rows in part],
        pad=parts.tokenizer.pad_token_id,
    )
