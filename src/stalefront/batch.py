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


def real_BT(position_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Tokens of prompts and completions, masked ones inside a completion included: what is no padding."""
    inside = mask_BT.flip(1).cumsum(1).flip(1) > 0
    prompt = ~(mask_BT.any(0).cumsum(0) > 0)
    return (position_BT >= 0) & (inside | prompt)


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
    entropy_behav_BT : float32, nats, or None
        Entropy of the sampling weights' full distribution at the sampling temperature, by the trainer's forward.
    tail_mass_BT : float32, or None
        By that forward, the mass of the tokens whose probability is below `stalefront.stats.TAIL`.
    own_routes_LBTK : int16, or None
        Experts that the trainer's forward chooses under the sampling weights; −1 off the tokens it was fed.
    route_hash_B : int64, or None
        Hash of the tokens that the routes belong to.
    support_BTK : int32, or None
        Ids of the tokens that a truncated sampler kept at each place, −1 beyond them; −1 alone is no truncation.
    misaligned_B : int64, or None
        Sampled tokens of a row that have no log-prob any more, since its text was encoded again.
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
    entropy_behav_BT: Tensor | None = None
    tail_mass_BT: Tensor | None = None
    own_routes_LBTK: Tensor | None = None
    route_hash_B: Tensor | None = None
    support_BTK: Tensor | None = None
    misaligned_B: Tensor | None = None

    def check(self, trainer_version: int, *, noisy_log: bool = False) -> Self:
        """Raise `BatchError` unless the batch keeps the promises of its seam at `trainer_version`.

        With a `noisy_log` a behaviour log-prob may be above 0.
        """
        shape = self.tokens_BT.shape
        for name in ("position_BT", "mask_BT", "logp_behav_BT", "logp_old_BT", "logp_ref_BT", "version_BT"):
            if getattr(self, name).shape != shape:
                raise BatchError(f"{name} has shape {tuple(getattr(self, name).shape)}, tokens_BT {tuple(shape)}")
        version = self.version_BT[self.mask_BT]
        if version.numel() and not (int(version.min()) >= 0 and int(version.max()) <= trainer_version):
            raise BatchError(f"token versions {version.min()}…{version.max()} outside 0…{trainer_version}")
        if not noisy_log and bool((self.logp_behav_BT[self.mask_BT] > 0).any()):
            raise BatchError("a behaviour log-prob is above 0")
        self._check_routes()
        if bool((self.version_BT.where(self.mask_BT, self.finished_version_B[:, None]) > trainer_version).any()):
            raise BatchError("a sequence finished after the trainer's version")
        return self

    @property
    def real_BT(self) -> Tensor:
        """See `real_BT`."""
        return real_BT(self.position_BT, self.mask_BT)

    def _check_routes(self) -> None:
        if self.route_hash_B is None:
            return
        from stalefront.routing import token_hash_B

        other = int((self.route_hash_B != token_hash_B(self.tokens_BT, self.real_BT)).sum())
        if other:
            raise BatchError(f"the routes of {other} sequences were recorded on other tokens than theirs")

    def rows(self, rows: Tensor) -> Self:
        """The sequences `rows`, in that order."""
        named = (
            (f.name, getattr(self, f.name)) for f in fields(self) if f.name.endswith(("_B", "_BT", "_BTK", "_LBTK"))
        )
        picked: dict[str, Any] = {
            name: value[:, rows] if name.endswith("_LBTK") else value[rows]
            for name, value in named
            if value is not None
        }
        return replace(self, **picked)

    def to(self, device: torch.device) -> Self:
        """Every tensor on `device`."""
        moved: dict[str, Any] = {
            f.name: v.to(device) for f in fields(self) if isinstance(v := getattr(self, f.name), Tensor)
        }
        return replace(self, **moved)


LOGPS = ("logp_theta_BT", "logp_old_BT", "logp_behav_BT", "logp_ref_BT", "entropy_behav_BT", "logp_recomputed_BT")


@dataclass(frozen=True)
class LossInputs:
    """What a surrogate and a correction may look at; off-mask entries are 0 and carry no gradient.

    Attributes
    ----------
    logp_theta_BT, logp_old_BT, logp_behav_BT : nats
    logp_ref_BT : or None
        None where no reference is known.
    advantage_B : (B,) or (B, T)
        One number a sequence, or one a token.
    mask_BT : bool
        Completion tokens.
    reward_B : (B,), or None
    group_B : int64 (B,), or None
        Which prompt a sequence belongs to.
    lag_BT : int64, updates, or None
        Trainer version minus the version that sampled the token.
    entropy_behav_BT : nats, or None
        Entropy of the behaviour policy's full distribution.
    logp_recomputed_BT : nats, or None
        Log-prob under the sampling weights by the trainer's forward, where `logp_old_BT` may be another policy's.
    keep_BT : bool, or None
        Tokens that corrections left in the loss, where a surrogate's own statistics leave the others out.
    """

    logp_theta_BT: Tensor
    logp_old_BT: Tensor
    logp_behav_BT: Tensor
    logp_ref_BT: Tensor | None
    advantage_B: Tensor
    mask_BT: Tensor
    reward_B: Tensor | None = None
    group_B: Tensor | None = None
    lag_BT: Tensor | None = None
    entropy_behav_BT: Tensor | None = None
    keep_BT: Tensor | None = None
    logp_recomputed_BT: Tensor | None = None

    def __post_init__(self) -> None:
        # Zero off the mask before any exp: 0 · inf is NaN, so a later multiplication by the mask would be too late.
        for name in LOGPS:
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, torch.where(self.mask_BT, value, torch.zeros_like(value)))
        if self.advantage_B.dim() == 2:
            object.__setattr__(self, "advantage_B", self.advantage_B.where(self.mask_BT, 0.0))

    def detach(self) -> LossInputs:
        """The same numbers without a graph."""
        return replace(self, logp_theta_BT=self.logp_theta_BT.detach())

    def tensors(self) -> dict[str, Tensor]:
        """Every field that is there."""
        return {f.name: v for f in fields(self) if (v := getattr(self, f.name)) is not None}

    def rows(self, rows: Tensor | slice) -> LossInputs:
        """The sequences `rows`, in that order."""
        return replace(self, **{name: value[rows] for name, value in self.tensors().items()})

    @property
    def advantage_B1(self) -> Tensor:
        """Advantages in a shape that meets (B, T): (B, 1), or (B, T) where they differ from token to token."""
        return self.advantage_B[:, None] if self.advantage_B.dim() == 1 else self.advantage_B

    @property
    def log_ratio_BT(self) -> Tensor:
        """log θ/old, with gradient."""
        return self.logp_theta_BT - self.logp_old_BT

    def policies_BT(self, anchor: str) -> tuple[Tensor, Tensor]:
        """Log-probs of the two policies that `anchor` (`theta/mu`, `old/mu`, `theta/old`) names, with gradient."""
        policy = {"theta": self.logp_theta_BT, "old": self.logp_old_BT, "mu": self.logp_behav_BT}
        top, bottom = anchor.split("/")
        return policy[top], policy[bottom]

    def log_ratio_of_BT(self, anchor: str) -> Tensor:
        """Log-ratio of the two policies that `anchor` names, with gradient."""
        top_BT, bottom_BT = self.policies_BT(anchor)
        return top_BT - bottom_BT

    def anchored_BT(self, anchor: str) -> Tensor:
        """The same, detached."""
        return self.log_ratio_of_BT(anchor).detach()


@dataclass(frozen=True)
class Weights:
    """What corrections say: a factor a token, whether a token stays in the loss, and a factor on the step.

    Attributes
    ----------
    removed_by_BT : int8, or None
        Number, from 1, of the rule in `rules` after which a token no longer counted (it was not kept, or had weight 0);
        0 for tokens that count. Set by `stalefront.correction.chain`.
    """

    weight_BT: Tensor
    keep_BT: Tensor
    step_scale: float
    removed_by_BT: Tensor | None = None
    rules: tuple[str, ...] = ()

    @classmethod
    def ones(cls, inputs: LossInputs) -> Weights:
        """Nothing weighted, nothing rejected."""
        return cls(torch.ones_like(inputs.logp_theta_BT.detach()), torch.ones_like(inputs.mask_BT), 1.0)

    @property
    def removed_BT(self) -> Tensor:
        """`removed_by_BT`; without names of rules 1 stands for all of them."""
        return (~self.counts_BT).to(torch.int8) if self.removed_by_BT is None else self.removed_by_BT

    @property
    def counts_BT(self) -> Tensor:
        """Tokens whose loss counts: kept, with a weight other than 0."""
        return self.keep_BT & (self.weight_BT != 0)

    def times(self, weight_BT: Tensor) -> Weights:
        """Each token's factor multiplied by another one, (B, T) or (B, 1)."""
        return replace(self, weight_BT=self.weight_BT * weight_BT)

    def keeping(self, keep_BT: Tensor) -> Weights:
        """Only tokens that are kept by both, (B, T) or (B, 1)."""
        return replace(self, keep_BT=self.keep_BT & keep_BT)


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
    cap_factor: float = 1.0

    def columns(self) -> dict[str, Any]:
        """Columns of the step record."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("finite", "cap_factor")}
