"""What crosses a seam: the rollout batch, the inputs of a loss, correction weights and the applied update.

Notation: B sequences (P prompts × G samples), T token positions (left-padded prompt, then completion), V vocabulary.
`mask_BT` is True on completion tokens, `position_BT` counts from 0 within a row and is −1 on padding. Arrays of
log-probs are 0 off the mask. Three policies: `behav` (μ, as the sampler reported it), `old` (the same weights, the
trainer's forward) and `theta` (the weights being updated).
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
from torch import Tensor


class BatchError(ValueError):
    """A record that breaks what its seam promises."""


@dataclass(frozen=True)
class RolloutBatch:
    """One rollout batch, in the order it was sampled.

    Attributes
    ----------
    tokens_BT, position_BT : int64
    mask_BT, kv_stale_BT : bool
        `kv_stale_BT` marks tokens whose key-value cache held states of an older version.
    logp_behav_BT, logp_old_BT, logp_ref_BT : float32, nats
    version_BT : int64
        Version of the weights that sampled each token; −1 off the mask.
    reward_B : float64; group_B : int64; truncated_B : bool
    scheduled_version_B, started_version_B, finished_version_B : int64
        Trainer version when the prompt was scheduled, its first token started, its last token finished.
    routes_LBTK : int16 or None
        Experts chosen at rollout, for models that have them.
    index : int
        Rollout-batch index M, from 1.
    """

    tokens_BT: Tensor
    position_BT: Tensor
    mask_BT: Tensor
    kv_stale_BT: Tensor
    logp_behav_BT: Tensor
    logp_old_BT: Tensor
    logp_ref_BT: Tensor
    version_BT: Tensor
    reward_B: Tensor
    group_B: Tensor
    truncated_B: Tensor
    scheduled_version_B: Tensor
    started_version_B: Tensor
    finished_version_B: Tensor
    routes_LBTK: Tensor | None
    index: int

    def check(self, trainer_version: int) -> Self:
        """Raise `BatchError` unless the batch keeps the promises of its seam at `trainer_version`."""
        shape = self.tokens_BT.shape
        for name in ("position_BT", "mask_BT", "logp_behav_BT", "logp_old_BT", "logp_ref_BT", "version_BT"):
            if getattr(self, name).shape != shape:
                raise BatchError(f"{name} has shape {tuple(getattr(self, name).shape)}, tokens_BT {tuple(shape)}")
        version = self.version_BT[self.mask_BT]
        if version.numel() and not (int(version.min()) >= 0 and int(version.max()) <= trainer_version):
            raise BatchError(f"token versions {version.min()}…{version.max()} outside 0…{trainer_version}")
        if bool((self.logp_behav_BT[self.mask_BT] > 0).any()):
            raise BatchError("a behaviour log-prob is above 0")
        if bool((self.version_BT.where(self.mask_BT, self.finished_version_B[:, None]) > trainer_version).any()):
            raise BatchError("a sequence finished after the trainer's version")
        return self

    def rows(self, rows: Tensor) -> Self:
        """The sequences `rows`, in that order."""
        picked: dict[str, Any] = {
            f.name: getattr(self, f.name)[rows] for f in fields(self) if f.name.endswith(("_B", "_BT"))
        }
        routes = None if self.routes_LBTK is None else self.routes_LBTK[:, rows]
        return replace(self, **picked, routes_LBTK=routes)

    def to(self, device: torch.device) -> Self:
        """Every tensor on `device`."""
        moved: dict[str, Any] = {
            f.name: v.to(device) for f in fields(self) if isinstance(v := getattr(self, f.name), Tensor)
        }
        return replace(self, **moved)


@dataclass(frozen=True)
class LossInputs:
    """What a surrogate and a correction may look at; off-mask entries are 0 and carry no gradient.

    `advantage_B` is one number a sequence; `logp_ref_BT` is None where no reference is known.
    """

    logp_theta_BT: Tensor
    logp_old_BT: Tensor
    logp_behav_BT: Tensor
    logp_ref_BT: Tensor | None
    advantage_B: Tensor
    mask_BT: Tensor

    def __post_init__(self) -> None:
        # Zero off the mask before any exp: 0 · inf is NaN, so a later multiplication by the mask would be too late.
        for name in ("logp_theta_BT", "logp_old_BT", "logp_behav_BT", "logp_ref_BT"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, torch.where(self.mask_BT, value, torch.zeros_like(value)))

    def detach(self) -> LossInputs:
        """The same numbers without a graph."""
        return replace(self, logp_theta_BT=self.logp_theta_BT.detach())

    @property
    def log_ratio_BT(self) -> Tensor:
        """log θ/old, with gradient."""
        return self.logp_theta_BT - self.logp_old_BT

    def anchored_BT(self, anchor: str) -> Tensor:
        """Detached log-ratio of the two policies that `anchor` (`theta/mu`, `old/mu`, `theta/old`) names."""
        policy = {"theta": self.logp_theta_BT, "old": self.logp_old_BT, "mu": self.logp_behav_BT}
        top, bottom = anchor.split("/")
        return (policy[top] - policy[bottom]).detach()


@dataclass(frozen=True)
class Weights:
    """What corrections say: a factor a token, whether a token stays in the loss, and a factor on the step."""

    weight_BT: Tensor
    keep_BT: Tensor
    step_scale: float


@dataclass(frozen=True)
class Update:
    """What was truly applied at one learner step."""

    lr_asked: float
    lr_scale: float
    lr_applied: float
    stepped: bool
    finite: bool
    grad_norm_raw: float
    grad_norm_applied: float
    clip_factor: float
    update_norm: float
    dist_from_start: float
    param_norm: float
    cos_grad: float | None
    cos_update: float | None

    def columns(self) -> dict[str, Any]:
        """Columns of the step record."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "finite"}
