"""Float32 inside of float64: the rounded ratio and its gradient against torch's own casts, and rounded weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from stalefront.batch import Weights
from stalefront.cell import make_choice
from stalefront.single import with_single_ratios, with_single_weights


def test_ratio_and_gradient_are_those_of_a_cast(random_inputs):
    inputs = random_inputs(spread=3.0)
    upstream = torch.linspace(-1, 1, inputs.mask_BT.numel(), dtype=torch.float64).view(inputs.mask_BT.shape)
    theta = inputs.logp_theta_BT.clone().requires_grad_()
    cast = (theta - inputs.logp_old_BT).float().exp().double()
    (expected,) = torch.autograd.grad((cast * upstream).sum(), theta)
    ours = inputs.logp_theta_BT.clone().requires_grad_()
    ratio = with_single_ratios(replace(inputs, logp_theta_BT=ours)).log_ratio_of_BT("theta/old").exp()
    torch.testing.assert_close(ratio, cast.where(inputs.mask_BT, 1.0), rtol=1e-14, atol=0)
    (grad,) = torch.autograd.grad((ratio * upstream).sum(), ours)
    torch.testing.assert_close(grad, expected.where(inputs.mask_BT, 0.0), rtol=1e-14, atol=0)


def test_only_ratios_of_the_policy_are_rounded(random_inputs):
    inputs = random_inputs(spread=3.0)
    rounded = with_single_ratios(inputs)
    assert torch.equal(rounded.log_ratio_of_BT("old/mu"), inputs.log_ratio_of_BT("old/mu"))
    assert not torch.equal(rounded.log_ratio_of_BT("theta/mu"), inputs.log_ratio_of_BT("theta/mu"))


@pytest.mark.parametrize("shift", [-200.0, 200.0])
def test_a_ratio_beyond_float32_has_no_gradient(random_inputs, shift):
    inputs = random_inputs()
    theta = (inputs.logp_old_BT + shift).requires_grad_()
    ratio = with_single_ratios(replace(inputs, logp_theta_BT=theta)).log_ratio_of_BT("theta/old").clamp(-20, 20).exp()
    (grad,) = torch.autograd.grad(ratio.sum(), theta)
    assert torch.equal(grad, torch.zeros_like(grad))


@pytest.mark.parametrize("wide", [False, True])
def test_weights_and_their_bounds(random_inputs, conf_choice, wide):
    inputs = random_inputs(spread=3.0)
    rule = make_choice("correction", conf_choice("correction", "token_tis") | {"cap": 1.7})
    (single,) = with_single_weights([rule], wide_bounds=wide)
    ratio = (inputs.logp_theta_BT.float() - inputs.logp_behav_BT.float()).exp()
    expected = ratio.double().clamp(max=1.7) if wide else ratio.clamp(max=1.7).double()
    found = single(inputs, Weights.ones(inputs))
    assert torch.equal(found.weight_BT[inputs.mask_BT], expected[inputs.mask_BT])
    assert found.weight_BT.dtype == torch.float64
    assert single.choice() == "token_tis"
