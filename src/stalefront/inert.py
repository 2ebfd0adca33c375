"""Which controls of a cell have ever acted: a clip, mask, weight or controller that never did is worth a warning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from stalefront.batch import LossInputs, Weights

if TYPE_CHECKING:
    from stalefront.cell import Cell
    from stalefront.controller import Controllers
    from stalefront.loss import Loss
    from stalefront.ranks import Ranks

# Learner steps below which nothing is said: a control may well wait that long.
MIN_STEPS = 16


class Acted:
    """What has acted since the cell began, by name: `loss.<choice>` for its clip, `correction.<choice>`."""

    def __init__(self, cell: Cell) -> None:
        names = [f"correction.{correction.choice()}" for correction in cell.correction]
        self.loss = f"loss.{cell.loss.choice()}"
        self.found = dict.fromkeys([self.loss] * can_clip(cell.loss) + names, False)

    def clip(self, columns: Mapping[str, float]) -> None:
        """Take in a step's clip fractions."""
        if self.loss in self.found and (columns["clip_low_frac"] or columns["clip_high_frac"]):
            self.found[self.loss] = True

    def correction(self, name: str, before: Weights, after: Weights, mask_BT: torch.Tensor) -> None:
        """Take in what one correction made of a micro-batch's weights."""
        key = f"correction.{name}"
        if not self.found[key]:
            changed = (after.weight_BT != before.weight_BT) | (after.keep_BT != before.keep_BT)
            self.found[key] = bool((changed & mask_BT).any()) or after.step_scale != before.step_scale

    def agree(self, ranks: Ranks) -> None:
        """What has acted on one rank has acted."""
        if self.found:
            self.found = dict(zip(self.found, ranks.any(*self.found.values()), strict=True))

    def warning(self, controllers: Controllers, steps: int) -> str | None:
        """What a run of `steps` learner steps has to say."""
        all_found = self.found | {f"controller.{name}": acted for name, acted in controllers.acted.items()}
        inert = [name for name, acted in all_found.items() if not acted]
        return f"inert: {inert}" if inert and steps >= MIN_STEPS else None


def can_clip(loss: Loss) -> bool:
    """Whether the surrogate calls a clip active anywhere, by trying far-off policies with both signs of advantage."""
    near, far = -1e-3, -30.0
    theta_BT = torch.tensor([[near, far], [far, near], [near, far], [far, near]], dtype=torch.float64)
    other_BT = torch.tensor([[far, near], [near, far], [far, near], [near, far]], dtype=torch.float64)
    # Rows of one token: sequence-level ratios of the others are 1.
    mask_BT = torch.tensor([[True, True], [True, False], [True, False], [True, False]])
    advantage_B = torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=torch.float64)
    flags = []
    for sign in (1, -1):
        inputs = LossInputs(
            logp_theta_BT=theta_BT,
            logp_old_BT=other_BT,
            logp_behav_BT=other_BT,
            logp_ref_BT=other_BT,
            advantage_B=sign * advantage_B,
            mask_BT=mask_BT,
            reward_B=sign * advantage_B,
            group_B=torch.zeros(4, dtype=torch.int64),
            lag_BT=mask_BT.long(),
            entropy_behav_BT=mask_BT.double(),
        )
        found = loss.surrogate(inputs)
        flags += [found.clip_low_BT.any(), found.clip_high_BT.any()]
    return any(bool(flag) for flag in flags)
