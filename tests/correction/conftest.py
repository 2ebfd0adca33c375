"""Fixtures of the corrections' tests: a rule by its stem, hand-made ratios, and the numbers of peer frameworks."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from stalefront.batch import LossInputs, Weights
from stalefront.cell import make_choice
from stalefront.correction import Correction, chain

PEERS = Path(__file__).parents[1] / "golden" / "peers"


@pytest.fixture(scope="session")
def rule(conf_choice) -> Callable[..., Correction]:
    """`rule("icepop", high=3.0)`: the rule of a file in `conf/correction/`, fields replaced."""
    return lambda stem, **fields: make_choice("correction", conf_choice("correction", stem) | fields)


@pytest.fixture(scope="session")
def sampled() -> Callable[..., LossInputs]:
    """`sampled([[2.0, 0.5]])`: inputs with these ratios θ/μ and θ/old, float64; None is padding.

    Every token has probability e^−1 under θ; `advantage` is 1 for every sequence unless given.
    """

    def make(ratio: list[list[float | None]], **more: Any) -> LossInputs:
        mask = torch.tensor([[value is not None for value in row] for row in ratio])
        value = torch.tensor([[1.0 if value is None else value for value in row] for row in ratio], dtype=torch.float64)
        theta = torch.full_like(value, -1.0)
        advantage = torch.as_tensor(more.pop("advantage", [1.0] * len(ratio)), dtype=torch.float64)
        below = theta - value.log()
        return LossInputs(theta, below, below, None, advantage, mask, **more)

    return make


@pytest.fixture(scope="session")
def weigh() -> Callable[..., tuple[list[list[float]], list[list[bool]]]]:
    """`weigh(inputs, *rules)`: weights and keeps of the chain, as lists."""

    def run(inputs: LossInputs, *rules: Correction) -> tuple[list[list[float]], list[list[bool]]]:
        weights = chain(rules, inputs)
        return weights.weight_BT.tolist(), weights.keep_BT.tolist()

    return run


def number(value: Any) -> float:
    return float(value)  # "nan", "inf" and "-inf" are stored as strings


def matrix(rows: list[list[Any]], dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.tensor([[number(value) for value in row] for row in rows], dtype=dtype)


@pytest.fixture(scope="session")
def agrees() -> Callable[..., None]:
    """`agrees(name, rules, weight="…", keep="…")`: the chain gives the numbers of that peer's file.

    `weight` and `keep` name outputs of the file. Weights are compared on kept tokens, since some peers leave weights on
    tokens that their masks remove; with `everywhere` on all of them, rejected ones having weight 0. Peers that form
    ratios in float32 get float32 inputs.
    """

    def check(
        name: str,
        rules: Sequence[Correction],
        *,
        weight: str | None = None,
        keep: str | None = None,
        dtype: torch.dtype = torch.float64,
        everywhere: bool = False,
    ) -> None:
        stored = json.loads((PEERS / f"{name}.json").read_text())
        given, outputs = stored["inputs"], stored["outputs"]
        mask = matrix(given["mask"]).bool()
        logps = [matrix(given[key], dtype) for key in ("logp_theta", "logp_old", "logp_mu")]
        inputs = LossInputs(*logps, None, matrix(given["advantages"], dtype), mask)
        weights = chain(rules, inputs) or Weights.ones(inputs)
        if keep is not None:
            assert torch.equal(weights.keep_BT[mask], matrix(outputs[keep]).bool().expand_as(mask)[mask])
        if weight is not None:
            compared = mask if everywhere else mask & weights.keep_BT
            ours = (weights.weight_BT * weights.keep_BT)[compared]
            theirs = matrix(outputs[weight], dtype).expand_as(mask)[compared]
            tolerance = 1e-9 if dtype == torch.float64 else 5e-8
            torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=0)

    return check
