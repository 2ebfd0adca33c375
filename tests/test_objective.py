"""The loss of a batch as one pure function."""

from dataclasses import replace

import pytest
import torch

from stalefront.batch import LossInputs
from stalefront.objective import objective
from stalefront.recipe import entry, recipe


def batch():
    logp = torch.tensor([[-1.0, -2.0, -1.0], [-0.5, -1.0, -7.0]], dtype=torch.float64, requires_grad=True)
    old = logp.detach() - torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
    mask = torch.tensor([[True, True, True], [True, True, False]])
    return LossInputs(logp, old, old, None, torch.tensor([1.0, -2.0], dtype=torch.float64), mask)


def parts(**reduction):
    mask = entry("correction", "token_mask", anchor="theta/old")
    return recipe(
        entry("loss", "reinforce"), correction=[mask], reduction=entry("reduction", "token_mean", **reduction)
    ).parts()


@pytest.mark.parametrize(("denominator", "count"), [("valid", 5), ("kept", 4)])
def test_rejected_tokens_and_denominators(denominator, count):
    """The third token (ratio e) is rejected: (1 + 2 − 2 · .5 − 2 · 1) over 5 or 4 tokens."""
    inputs = batch()
    found = objective(parts(denominator=denominator), inputs, max_completion_length=3)
    assert float(found.value.loss.detach()) == pytest.approx(0.0)
    (grad,) = torch.autograd.grad(found.value.loss, inputs.logp_theta_BT)
    torch.testing.assert_close(grad, torch.tensor([[-1.0, -1, 0], [2, 2, 0]], dtype=torch.float64) / count)
    assert found.reduction_BT.dtype == torch.float64


def test_without_corrections_nothing_is_weighted():
    inputs = batch()
    found = objective(recipe(entry("loss", "grpo")).parts(), inputs, max_completion_length=3)
    assert found.weights is None
    assert float(found.value.loss.detach()) == pytest.approx((-(1 + 1 + 1.2) / 3 + 2) / 2)


def test_the_proximal_policy_comes_first():
    inputs = replace(batch(), lag_BT=torch.ones(2, 3, dtype=torch.int64))
    made = recipe(entry("loss", "grpo"), proximal=entry("proximal", "a3po")).parts()
    found = objective(made, inputs, max_completion_length=3)
    assert torch.equal(found.inputs.logp_old_BT, made.proximal(inputs).logp_old_BT)
