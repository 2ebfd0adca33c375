"""The hand-made batch of the golden values."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from stalefront.batch import LossInputs

LN2 = math.log(2)


@pytest.fixture(scope="session")
def hand_batch() -> Callable[..., LossInputs]:
    """Two sequences of 2 and 3 tokens.

    log θ = [−1, −2], [−1, −3, −.5]; r = θ/old = [2, ½], [½, 1, 2] unless `ratio` says otherwise; A = [1, −2] unless
    `advantage` does; reference = old, unless `ref_ratio` = ref/θ is given.
    """

    def make(
        ratio: tuple[tuple[float, ...], tuple[float, ...]] = ((2, 0.5), (0.5, 1, 2)),
        advantage: tuple[float, float] = (1, -2),
        ref_ratio: tuple[tuple[float, ...], tuple[float, ...]] | None = None,
    ) -> LossInputs:
        def padded(rows: tuple[tuple[float, ...], ...], fill: float) -> torch.Tensor:
            return torch.tensor([[*row, *[fill] * (3 - len(row))] for row in rows], dtype=torch.float64)

        theta = padded(((-1, -2), (-1, -3, -0.5)), 0.0)
        old = theta - padded(ratio, 1.0).log()
        return LossInputs(
            logp_theta_BT=theta,
            logp_old_BT=old,
            logp_behav_BT=old,
            logp_ref_BT=old if ref_ratio is None else theta + padded(ref_ratio, 1.0).log(),
            advantage_B=torch.tensor(advantage, dtype=torch.float64),
            mask_BT=torch.tensor([[True, True, False], [True, True, True]]),
        )

    return make
