"""The hand-made batch of the golden values, and the vectors of other frameworks."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stalefront.batch import LossInputs, Weights
from stalefront.loss import Loss

LN2 = math.log(2)
PEERS = Path(__file__).parents[1] / "golden" / "peers"


@pytest.fixture(scope="session")
def hand_batch() -> Callable[..., LossInputs]:
    """Two sequences of 2 and 3 tokens.

    log θ = [−1, −2], [−1, −3, −.5]; r = θ/old = [2, ½], [½, 1, 2] unless `ratio` says otherwise; A = [1, −2] unless
    `advantage` does; reference = old, unless `ref_ratio` = ref/θ is given. μ = old; the reward of the first is 1, of
    the second 0.
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
            reward_B=torch.tensor([1.0, 0.0], dtype=torch.float64),
        )

    return make


def tensor(values: Any) -> torch.Tensor:
    """Numbers of a vector file: `nan`, `inf` and `-inf` stand as strings."""
    if isinstance(values, list):
        return torch.stack([tensor(value) for value in values])
    return torch.tensor(float(values), dtype=torch.float64)


def exact_share_BT(mask_BT: torch.Tensor, kind: str) -> torch.Tensor:
    """Weights of a reduction in double precision, rows without tokens left out; `constant` divides by 16."""
    mask = mask_BT.double()
    length, rows = mask.sum(-1, keepdim=True), int(mask_BT.any(-1).sum())
    return {
        "token_mean": mask / mask.sum(),
        "sequence_mean": mask / (length.clamp(min=1) * rows),
        "sequence_sum": mask / rows,
        "constant": mask / (rows * 16),
    }[kind]


def peer_inputs(file: str) -> tuple[LossInputs, dict[str, Any]]:
    """Inputs of a vector file, and its outputs."""
    record = json.loads((PEERS / f"{file}.json").read_text())
    columns = {name: tensor(values) for name, values in record["inputs"].items() if name != "versions"}
    inputs = LossInputs(
        logp_theta_BT=columns["logp_theta"],
        logp_old_BT=columns["logp_old"],
        logp_behav_BT=columns["logp_mu"],
        logp_ref_BT=None,
        advantage_B=columns["advantages"],
        mask_BT=columns["mask"].bool(),
        reward_B=tensor(record["settings"]["scores"]) if "scores" in record["settings"] else None,
    )
    return inputs, record["outputs"]


@pytest.fixture(scope="session")
def agrees(make_loss: Callable[..., Loss]) -> Callable[..., None]:
    """`agrees(file, name, epsilon=.1)`: a loss gives a framework's value and gradient.

    `reduction` replaces the loss's own, `weights` makes corrections' weights of the inputs, `rtol` is relative to the
    value, and to the largest gradient.
    """

    def check(
        file: str,
        name: str,
        *,
        reduction: str | None = None,
        weights: Callable[[LossInputs], Weights] | None = None,
        rtol: float = 1e-9,
        **fields: Any,
    ) -> None:
        inputs, outputs = peer_inputs(file)
        loss = make_loss(name, **fields)
        theta = inputs.logp_theta_BT.clone().requires_grad_()
        share = exact_share_BT(inputs.mask_BT, reduction or loss.reduction)
        given = None if weights is None else weights(inputs)
        value = loss(replace(inputs, logp_theta_BT=theta), given, share).loss
        value.backward()
        expected = tensor(outputs["grad_logp_theta"]).where(inputs.mask_BT, 0.0)
        assert value.item() == pytest.approx(outputs["loss"], rel=rtol)
        torch.testing.assert_close(theta.grad, expected, rtol=rtol, atol=rtol * float(expected.abs().max()))

    return check


@pytest.fixture(scope="session")
def behaviour_weight() -> Callable[..., Callable[[LossInputs], Weights]]:
    """`behaviour_weight(cap, level)`: weights min(old/μ, cap) of tokens or of whole sequences' products."""

    def make(cap: float = math.inf, level: str = "token", *, reject: bool = False) -> Callable[[LossInputs], Weights]:
        def weights(inputs: LossInputs) -> Weights:
            log_ratio = inputs.anchored_BT("old/mu")
            ratio = (log_ratio if level == "token" else log_ratio.sum(-1, keepdim=True).expand_as(log_ratio)).exp()
            given = Weights.ones(inputs)
            return given.times(ratio).keeping(ratio <= cap) if reject else given.times(ratio.clamp(max=cap))

        return weights

    return make
