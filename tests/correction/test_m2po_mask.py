"""AReaL's M2PO mask: the budget by hand, ties, a search over subsets, and AReaL's masks."""

from __future__ import annotations

import math

import pytest
import torch

from stalefront.choice import OptionError
from stalefront.correction import chain
from stalefront.ratios import last_with_mean_below, smallest_with_mean_below


def ratios(*logs: float) -> list[float]:
    return [math.exp(value) for value in logs]


def test_by_hand(rule, sampled, weigh):
    # Squares .01, .04, .09 | 1, .0025: means from the smallest on .0025, .00625, .0175, .0356, .2285.
    inputs = sampled([ratios(0.1, -0.2, 0.3), [*ratios(-1.0, 0.05), None]])
    weight, keep = weigh(inputs, rule("m2po_mask"))
    assert weight == [[1.0] * 3] * 2
    assert keep == [[True] * 3, [False, True, True]]
    assert weigh(inputs, rule("m2po_mask", budget=0.02))[1] == [[True, True, False], [False, True, True]]


def test_gradient_by_hand(rule, sampled, make_loss, grade):
    inputs = sampled([ratios(0.1, 1.0)])
    graded = grade(make_loss("reinforce"), inputs, weights=chain([rule("m2po_mask")], inputs))
    torch.testing.assert_close(graded.grad_BT, torch.tensor([[-0.5, 0.0]], dtype=torch.float64))


@pytest.mark.parametrize(
    ("values", "budget", "kept"),
    [
        ([0.0, 1.0, 1.0, 1.0], 0.6, [True, False, False, False]),  # a tie goes as one
        ([0.0, 1.0, 1.0, 1.0], 0.8, [True, True, True, True]),
        ([1.0, 1.0], 1.0, [True, True]),  # nothing is below: the smallest stay
        ([2.0, 3.0], 1.0, [True, False]),
        ([math.nan, 0.0, math.inf], 1.0, [False, True, False]),
        ([math.nan, math.nan], 1.0, [False, False]),
        ([0.5, 1.5], 1.0, [True, False]),  # a mean on the budget is not below it
    ],
)
def test_ties_and_extremes(values, budget, kept):
    value = torch.tensor([values], dtype=torch.float64)
    assert smallest_with_mean_below(value, torch.ones_like(value, dtype=torch.bool), budget).tolist() == [kept]


@pytest.mark.parametrize(
    ("values", "budget", "kept"),
    [
        ([1.0, 0.0, 1.0, 1.0], 0.6, [False, True, False, True]),  # as many as must go, the first before the others
        ([2.0, 3.0], 1.0, [True, False]),
        ([math.nan, 0.0], 1.0, [False, True]),
        ([math.nan, math.nan], 1.0, [False, False]),
    ],
)
def test_ties_in_order(values, budget, kept):
    value = torch.tensor([values], dtype=torch.float64)
    assert last_with_mean_below(value, torch.ones_like(value, dtype=torch.bool), budget).tolist() == [kept]


def test_without_ties_both_are_the_same(random_inputs):
    inputs = random_inputs(rows=8)
    square = inputs.anchored_BT("theta/mu").square()
    one, other = (f(square, inputs.mask_BT, 0.1) for f in (smallest_with_mean_below, last_with_mean_below))
    assert torch.equal(one, other)


def test_it_keeps_the_most_that_the_budget_allows(random_inputs):
    inputs = random_inputs(rows=8)
    square = inputs.anchored_BT("theta/mu").square()
    for budget in (0.01, 0.1, 0.3):
        kept = smallest_with_mean_below(square, inputs.mask_BT, budget)
        value = sorted(square[inputs.mask_BT].tolist())
        fits = [n for n in range(1, len(value) + 1) if sum(value[:n]) / n < budget]
        assert int(kept.sum()) == max(fits, default=1)


def test_areal(rule, agrees):
    for name, budget in (("thr004", 0.04), ("thr05", 0.5)):
        mask = rule("m2po_mask", anchor="old/mu", budget=budget)
        agrees(f"areal__apply_m2po_masking__{name}", [mask], keep="loss_mask")


def test_refused(rule, make_cell):
    with pytest.raises(OptionError, match=r"m2po_mask\.budget"):
        rule("m2po_mask", budget=0.0)
    with pytest.raises(OptionError, match="must not be split") as caught:
        make_cell(loss="grpo", correction=["m2po_mask"], **{"optimizer.grad_accum": 2})
    assert caught.value.field == "optimizer.grad_accum"
