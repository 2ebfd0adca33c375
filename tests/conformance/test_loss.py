"""Laws that every loss of `conf/loss/` keeps; a new file is tested before its author thinks of it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from stalefront.batch import LossInputs
from stalefront.reduction import reduction_BT

NAMES = sorted(path.stem for path in (Path(__file__).parents[2] / "conf" / "loss").glob("*.yaml"))
BETAS = [0.0, 0.1]
LENGTH = 7


@pytest.fixture(params=NAMES)
def name(request):
    return request.param


def widened(inputs: LossInputs, left: int, right: int, junk: float) -> LossInputs:
    """The same batch with padding columns, and `junk` wherever the mask is off."""
    mask = torch.nn.functional.pad(inputs.mask_BT, (left, right))

    def pad(value: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(value, (left, right)).masked_fill(~mask, junk)

    wide = {f"logp_{p}_BT": pad(getattr(inputs, f"logp_{p}_BT")) for p in ("theta", "old", "behav", "ref")}
    return LossInputs(**wide, advantage_B=inputs.advantage_B, mask_BT=mask)


def test_on_policy_gradient_is_the_policy_gradient(name, make_loss, random_inputs, grade):
    loss, inputs = make_loss(name), random_inputs(spread=0)
    share = reduction_BT(inputs.mask_BT, loss.reduction, max_completion_length=LENGTH)
    graded = grade(loss, inputs, length=LENGTH)
    torch.testing.assert_close(graded.grad_BT, -inputs.advantage_B[:, None] * share, rtol=1e-6, atol=1e-12)
    assert not (graded.value.clip_low_BT | graded.value.clip_high_BT).any()


def test_a_reference_equal_to_the_policy_adds_nothing(name, make_loss, random_inputs, grade):
    inputs = random_inputs()
    inputs = replace(inputs, logp_ref_BT=inputs.logp_theta_BT)
    without, with_kl = (grade(make_loss(name, beta=beta), inputs) for beta in (0.0, 0.5))
    assert with_kl.loss == pytest.approx(without.loss, rel=1e-12)
    torch.testing.assert_close(with_kl.grad_BT, without.grad_BT, rtol=1e-12, atol=1e-12)


def test_kl_pulls_towards_the_reference(name, make_loss, random_inputs, grade):
    inputs = random_inputs(spread=0)
    inputs = replace(inputs, advantage_B=torch.zeros_like(inputs.advantage_B))
    graded = grade(make_loss(name, beta=0.5, use_bias_correction_kl=False), inputs)
    # Where the policy is above the reference, descent lowers it.
    above = inputs.logp_theta_BT > inputs.logp_ref_BT
    assert torch.equal(graded.grad_BT[inputs.mask_BT] > 0, above[inputs.mask_BT])
    assert graded.loss > 0


def test_no_advantage_no_gradient(name, make_loss, random_inputs, grade):
    inputs = random_inputs()
    inputs = replace(inputs, advantage_B=torch.zeros_like(inputs.advantage_B))
    graded = grade(make_loss(name), inputs)
    assert graded.loss == 0
    assert not graded.grad_BT.any()


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("junk", [0.0, -1e4, 3e38, float("inf"), float("-inf"), float("nan")])
def test_padding_is_inert(name, beta, junk, make_loss, random_inputs, grade):
    loss, inputs = make_loss(name, beta=beta), random_inputs()
    plain = grade(loss, inputs, length=LENGTH)
    padded = grade(loss, widened(inputs, 2, 3, junk), length=LENGTH)
    assert padded.loss == pytest.approx(plain.loss, rel=1e-12)
    torch.testing.assert_close(padded.grad_BT[:, 2:-3], plain.grad_BT, rtol=1e-12, atol=1e-15)
    off = ~torch.nn.functional.pad(inputs.mask_BT, (2, 3))
    assert not padded.grad_BT[off].any()


@pytest.mark.parametrize("beta", BETAS)
def test_row_order_does_not_matter(name, beta, make_loss, random_inputs, grade):
    loss, inputs = make_loss(name, beta=beta), random_inputs()
    order = torch.randperm(len(inputs.mask_BT), generator=torch.Generator().manual_seed(1))
    moved = LossInputs(**{field: value[order] for field, value in vars(inputs).items()})
    one, other = grade(loss, inputs, length=LENGTH), grade(loss, moved, length=LENGTH)
    assert one.loss == pytest.approx(other.loss, rel=1e-12)
    torch.testing.assert_close(one.grad_BT[order], other.grad_BT, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("sizes", [(3, 3), (1, 5), (2, 2, 2), (1, 1, 1, 1, 1, 1)])
def test_micro_batches_add_up(name, beta, sizes, make_loss, random_inputs, grade):
    loss, inputs = make_loss(name, beta=beta), random_inputs()
    whole = grade(loss, inputs, length=LENGTH)
    share = reduction_BT(inputs.mask_BT, loss.reduction, max_completion_length=LENGTH)
    theta = inputs.logp_theta_BT.clone().requires_grad_()
    total, start = 0.0, 0
    for size in sizes:
        rows = slice(start, start + size)
        piece = LossInputs(**{field: value[rows] for field, value in vars(inputs).items()})
        part = loss(replace(piece, logp_theta_BT=theta[rows]), None, share[rows]).loss
        part.backward()
        total, start = total + part.item(), start + size
    assert total == pytest.approx(whole.loss, rel=1e-6)
    torch.testing.assert_close(theta.grad, whole.grad_BT, rtol=1e-6, atol=1e-15)


@pytest.mark.parametrize("shift", [100.0, -100.0, 300.0, -700.0])
def test_finite_at_any_ratio_that_has_a_number(name, shift, make_loss, random_inputs, grade):
    # In float64: float32 has no number for e^100, here as in TRL.
    inputs = random_inputs()
    inputs = replace(inputs, logp_old_BT=inputs.logp_theta_BT - shift)
    graded = grade(make_loss(name, beta=0.1), inputs)
    assert torch.isfinite(graded.grad_BT).all()
    assert math.isfinite(graded.loss)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tokens_the_policy_gave_up_on(name, dtype, make_loss, random_inputs, grade):
    # log θ far below anything the exponential can show: r = 0, and a slope that vanishes with it.
    inputs = random_inputs(dtype=dtype)
    inputs = replace(inputs, logp_theta_BT=inputs.logp_theta_BT - 1e4)
    graded = grade(make_loss(name), inputs)
    assert torch.isfinite(graded.grad_BT).all()
    if make_loss(name).ratio is not None:
        assert not graded.grad_BT.any()


def test_a_row_without_tokens_is_harmless(name, make_loss, random_inputs, grade):
    inputs = random_inputs()
    mask = inputs.mask_BT.clone()
    mask[2] = False
    graded = grade(make_loss(name, beta=0.1), replace(inputs, mask_BT=mask))
    assert torch.isfinite(graded.grad_BT).all()
    assert not graded.grad_BT[2].any()


def test_the_declared_ratio_is_the_one_that_acts(name, make_loss, random_inputs, grade):
    loss, inputs = make_loss(name), random_inputs()
    moved = replace(inputs, logp_old_BT=inputs.logp_old_BT - 0.05)
    same = torch.equal(grade(loss, inputs).grad_BT, grade(loss, moved).grad_BT)
    assert same == (loss.ratio is None)
    other = replace(inputs, logp_behav_BT=inputs.logp_behav_BT - 1)
    assert torch.equal(grade(loss, inputs).grad_BT, grade(loss, other).grad_BT)
