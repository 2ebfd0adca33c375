"""Laws that every loss of `conf/loss/` keeps; a new file is tested before its author thinks of it."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from stalefront.batch import BatchError, LossInputs, Weights
from stalefront.reduction import reduction_BT

NAMES = sorted(path.stem for path in (Path(__file__).parents[2] / "conf" / "loss").glob("*.yaml"))
BETAS = [0.0, 0.1]
LENGTH = 7
INF = math.inf


@pytest.fixture(params=NAMES)
def name(request):
    return request.param


def changed(inputs: LossInputs, **policies: torch.Tensor) -> LossInputs:
    """`inputs` with log-probs `theta`, `old`, `behav` or `ref` replaced."""
    return replace(inputs, **{f"logp_{policy}_BT": value for policy, value in policies.items()})


def lagging(inputs: LossInputs, shift: float) -> LossInputs:
    """log θ/old and log θ/μ of `shift` on every token."""
    old = inputs.logp_theta_BT - shift
    return changed(inputs, old=old, behav=old)


def widened(inputs: LossInputs, left: int, right: int, junk: float, *, per_token: bool = False) -> LossInputs:
    """The same batch with padding columns, and `junk` wherever the mask is off; advantages (B, T) if `per_token`."""
    mask = torch.nn.functional.pad(inputs.mask_BT, (left, right))

    def pad(value: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(value, (left, right)).masked_fill(~mask, junk)

    wide = {name: pad(value) for name, value in inputs.tensors().items() if name.startswith("logp")}
    advantage = inputs.advantage_B
    if per_token:
        advantage = advantage[:, None].expand_as(mask).masked_fill(~mask, junk)
    return replace(inputs, **wide, advantage_B=advantage, mask_BT=mask)


def without_advantage(inputs: LossInputs) -> LossInputs:
    return replace(inputs, advantage_B=torch.zeros_like(inputs.advantage_B))


def test_on_policy_gradient_is_the_declared_one(name, make_loss, random_inputs, grade):
    loss, inputs = make_loss(name), random_inputs(spread=0)
    if loss.on_policy == "other":
        pytest.skip("the loss's own test says what it is")
    share = reduction_BT(inputs.mask_BT, loss.reduction, max_completion_length=LENGTH)
    graded = grade(loss, inputs, length=LENGTH)
    expected = -loss.on_policy_scale * inputs.advantage_B[:, None] * share
    torch.testing.assert_close(graded.grad_BT, expected, rtol=1e-6, atol=1e-12)
    assert not (graded.value.clip_low_BT | graded.value.clip_high_BT).any()
    assert loss.on_policy == "scaled" or loss.on_policy_scale == 1


def test_a_reference_equal_to_the_policy_adds_nothing(name, make_loss, random_inputs, grade):
    inputs = random_inputs()
    inputs = changed(inputs, ref=inputs.logp_theta_BT)
    without, with_kl = (grade(make_loss(name, beta=beta), inputs) for beta in (0.0, 0.5))
    assert with_kl.loss == pytest.approx(without.loss, rel=1e-12)
    torch.testing.assert_close(with_kl.grad_BT, without.grad_BT, rtol=1e-12, atol=1e-12)


def test_kl_pulls_towards_the_reference(name, make_loss, random_inputs, grade):
    inputs = without_advantage(random_inputs(spread=0))
    graded = grade(make_loss(name, beta=0.5, use_bias_correction_kl=False), inputs)
    # Where the policy is above the reference, descent lowers it.
    above = inputs.logp_theta_BT > inputs.logp_ref_BT
    assert torch.equal(graded.grad_BT[inputs.mask_BT] > 0, above[inputs.mask_BT])
    assert graded.loss > 0


def test_no_advantage_no_gradient(name, make_loss, random_inputs, grade):
    loss = make_loss(name)
    graded = grade(loss, without_advantage(random_inputs()))
    assert bool(graded.grad_BT.any()) == loss.acts_without_advantage
    assert (graded.loss != 0) == loss.acts_without_advantage


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("junk", [0.0, -1e4, 3e38, INF, -INF, math.nan])
def test_padding_is_inert(name, junk, per_token, make_loss, random_inputs, grade):
    loss, inputs = make_loss(name, beta=0.1), random_inputs()
    plain = grade(loss, inputs, length=LENGTH)
    padded = grade(loss, widened(inputs, 2, 3, junk, per_token=per_token), length=LENGTH)
    assert padded.loss == pytest.approx(plain.loss, rel=1e-12)
    torch.testing.assert_close(padded.grad_BT[:, 2:-3], plain.grad_BT, rtol=1e-12, atol=1e-15)
    off = ~torch.nn.functional.pad(inputs.mask_BT, (2, 3))
    assert not padded.grad_BT[off].any()


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("whole_groups", [False, True])
def test_order_does_not_matter(name, beta, whole_groups, make_loss, random_inputs, grade):
    loss, inputs = make_loss(name, beta=beta), random_inputs()
    order = torch.randperm(len(inputs.mask_BT), generator=torch.Generator().manual_seed(1))
    if whole_groups:
        order = torch.tensor([4, 5, 0, 1, 2, 3])
    one, other = grade(loss, inputs, length=LENGTH), grade(loss, inputs.rows(order), length=LENGTH)
    assert one.loss == pytest.approx(other.loss, rel=1e-12)
    torch.testing.assert_close(one.grad_BT[order], other.grad_BT, rtol=1e-12, atol=1e-15)


def in_pieces(loss, inputs, sizes) -> tuple[float, torch.Tensor]:
    """Loss and gradient over micro-batches of `sizes` rows."""
    share = reduction_BT(inputs.mask_BT, loss.reduction, max_completion_length=LENGTH)
    theta = inputs.logp_theta_BT.clone().requires_grad_()
    total, start = 0.0, 0
    for size in sizes:
        rows = slice(start, start + size)
        part = loss(changed(inputs.rows(rows), theta=theta[rows]), None, share[rows]).loss
        part.backward()
        total, start = total + part.item(), start + size
    return total, theta.grad


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("sizes", [(3, 3), (1, 5), (2, 2, 2), (1, 1, 1, 1, 1, 1)])
def test_micro_batches_add_up(name, beta, sizes, make_loss, random_inputs, grade):
    loss, inputs = make_loss(name, beta=beta), random_inputs()
    whole = grade(loss, inputs, length=LENGTH)
    total, grad_BT = in_pieces(loss, inputs, sizes)
    if loss.scope == "batch":
        # The declaration is needed, and not a way around the law.
        assert total != pytest.approx(whole.loss, rel=1e-6)
        return
    assert total == pytest.approx(whole.loss, rel=1e-6)
    torch.testing.assert_close(grad_BT, whole.grad_BT, rtol=1e-6, atol=1e-15)


@pytest.mark.parametrize("shift", [100.0, -100.0, 300.0, -700.0])
def test_finite_at_any_ratio_that_has_a_number(name, shift, make_loss, random_inputs, grade):
    # In float64: float32 has no number for e^100, here as in TRL.
    graded = grade(make_loss(name, beta=0.1), lagging(random_inputs(), shift))
    assert torch.isfinite(graded.grad_BT).all()
    assert math.isfinite(graded.loss)


@pytest.mark.parametrize("shift", [100.0, -100.0])
def test_single_tokens_at_extreme_ratios(name, shift, make_loss, random_inputs, grade):
    inputs = random_inputs()
    far = torch.zeros_like(inputs.logp_old_BT)
    far[:, 0] = shift
    extreme = changed(inputs, old=inputs.logp_old_BT - far, behav=inputs.logp_behav_BT - far)
    graded = grade(make_loss(name), extreme)
    assert torch.isfinite(graded.grad_BT).all()
    assert math.isfinite(graded.loss)


@pytest.mark.parametrize("row", [0, 1])
def test_a_token_without_probability(name, row, make_loss, random_inputs, grade):
    # log θ = −∞ on a token of a good (row 0) or a bad answer (row 1).
    loss, inputs = make_loss(name), random_inputs()
    theta = inputs.logp_theta_BT.clone()
    theta[row, 0] = -INF
    graded = grade(loss, changed(inputs, theta=theta))
    others = torch.arange(len(theta)) != row
    assert torch.isfinite(graded.grad_BT[others]).all()
    if not loss.unbounded:
        assert math.isfinite(graded.loss)
        assert torch.isfinite(graded.grad_BT).all()


def test_what_is_declared_unbounded_is_recorded_as_such(name, make_loss, random_inputs, grade):
    loss, inputs = make_loss(name), random_inputs()
    if not loss.unbounded:
        return
    losses = []
    for row in (0, 1):
        theta = inputs.logp_theta_BT.clone()
        theta[row, 0] = -INF
        losses.append(grade(loss, changed(inputs, theta=theta)).loss)
    assert not all(map(math.isfinite, losses))


def test_what_corrections_reject_may_hold_anything(name, make_loss, random_inputs, grade):
    loss, inputs = make_loss(name), random_inputs()
    keep = torch.ones_like(inputs.mask_BT)
    keep[:, 0] = False
    weights = Weights.ones(inputs).keeping(keep)
    theta = inputs.logp_theta_BT.masked_fill(~keep, -INF)
    graded = grade(loss, changed(inputs, theta=theta), weights=weights)
    assert math.isfinite(graded.loss)
    assert torch.isfinite(graded.grad_BT).all()
    assert not graded.grad_BT[:, 0].any() or not stands_alone(loss, inputs, grade)
    # A weight without a number on a rejected token is out with it.
    wild = weights.times(torch.where(keep, 1.0, INF))
    assert grade(loss, changed(inputs, theta=theta), weights=wild).loss == graded.loss
    if stands_alone(loss, inputs, grade):
        old = inputs.logp_old_BT.masked_fill(~keep, -INF)
        graded = grade(loss, changed(inputs, old=old, behav=old), weights=weights)
        assert math.isfinite(graded.loss)
        assert torch.isfinite(graded.grad_BT).all()


def stands_alone(loss, inputs, grade) -> bool:
    """Whether a token's gradient depends on its own numbers alone."""
    moved = [value.clone() for value in (inputs.logp_old_BT, inputs.logp_behav_BT)]
    for value in moved:
        value[:, 0] -= 0.3
    one, other = grade(loss, inputs), grade(loss, changed(inputs, old=moved[0], behav=moved[1]))
    return torch.equal(one.grad_BT[:, 1:], other.grad_BT[:, 1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tokens_the_policy_gave_up_on(name, dtype, make_loss, random_inputs, grade):
    # log θ far below anything the exponential can show: r = 0, and a slope that vanishes with it.
    inputs = random_inputs(dtype=dtype)
    loss = make_loss(name)
    graded = grade(loss, changed(inputs, theta=inputs.logp_theta_BT - 1e4))
    assert torch.isfinite(graded.grad_BT).all()
    if not loss.unbounded:
        assert not graded.grad_BT.any()


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-4), (torch.bfloat16, None)])
@pytest.mark.parametrize("beta", BETAS)
def test_narrow_numbers(name, beta, dtype, rtol, make_loss, random_inputs, grade):
    loss, inputs = make_loss(name, beta=beta), random_inputs()
    cast = replace(inputs, **{k: v.to(dtype) for k, v in inputs.tensors().items() if v.is_floating_point()})
    graded = grade(loss, cast, length=LENGTH)
    assert graded.grad_BT.dtype == dtype
    assert math.isfinite(graded.loss)
    assert torch.isfinite(graded.grad_BT).all()
    if rtol is not None:
        wide = grade(loss, inputs, length=LENGTH)
        assert graded.loss == pytest.approx(wide.loss, rel=rtol, abs=1e-5)
        torch.testing.assert_close(graded.grad_BT.double(), wide.grad_BT, rtol=rtol, atol=1e-6)


@pytest.mark.parametrize("beta", BETAS)
def test_a_row_without_tokens_is_harmless(name, beta, make_loss, random_inputs, grade):
    inputs = random_inputs()
    mask = inputs.mask_BT.clone()
    mask[2] = False
    graded = grade(make_loss(name, beta=beta), replace(inputs, mask_BT=mask))
    assert torch.isfinite(graded.grad_BT).all()
    assert not graded.grad_BT[2].any()


def test_a_batch_without_tokens_has_no_loss(name, make_loss, random_inputs, grade):
    inputs = random_inputs()
    graded = grade(make_loss(name, beta=0.1), replace(inputs, mask_BT=torch.zeros_like(inputs.mask_BT)))
    assert graded.loss == 0
    assert not graded.grad_BT.any()


def test_a_batch_without_sequences_is_refused(name, make_loss, random_inputs):
    inputs = random_inputs().rows(slice(0, 0))
    with pytest.raises(BatchError, match="no sequences"):
        make_loss(name)(inputs, None, torch.zeros_like(inputs.logp_theta_BT))


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


@pytest.mark.parametrize(("rows", "width"), [(64, 3), (3, 64)])
def test_memory_is_linear_in_tokens(name, rows, width, make_loss, random_inputs, grade):
    # B² and T² are both above B·T here.
    inputs = random_inputs(rows=rows, width=width)
    loss = make_loss(name, beta=0.1)
    with Largest() as largest:
        grade(loss, inputs, weights=Weights.ones(inputs))
    assert largest.numel <= rows * width


@pytest.mark.parametrize("beta", BETAS)
def test_advantages_of_tokens(name, beta, make_loss, random_inputs, grade):
    loss, inputs = make_loss(name, beta=beta), random_inputs()
    spread = inputs.advantage_B[:, None].expand_as(inputs.mask_BT)
    one, other = grade(loss, inputs), grade(loss, replace(inputs, advantage_B=spread))
    assert one.loss == pytest.approx(other.loss, rel=1e-12)
    torch.testing.assert_close(one.grad_BT, other.grad_BT, rtol=1e-12, atol=1e-15)
    mixed = spread * torch.linspace(-1, 1, spread.shape[1], dtype=spread.dtype)
    graded = grade(loss, replace(inputs, advantage_B=mixed))
    assert math.isfinite(graded.loss)
    assert graded.loss != one.loss


def test_the_declared_ratio_is_the_one_that_acts(name, make_loss, random_inputs, grade):
    loss, inputs = make_loss(name), random_inputs()
    plain = grade(loss, inputs).grad_BT
    moved = {
        "theta/old": changed(inputs, old=inputs.logp_old_BT - 0.05),
        "theta/mu": changed(inputs, behav=inputs.logp_behav_BT - 0.05),
    }
    for anchor, other in moved.items():
        assert torch.equal(plain, grade(loss, other).grad_BT) == (loss.ratio != anchor)


def test_the_anchor_is_an_option(name, make_loss, random_inputs, grade):
    if make_loss(name).ratio is None:
        return
    inputs = random_inputs()
    same = changed(inputs, behav=inputs.logp_old_BT)
    one, other = (grade(make_loss(name, anchor=anchor), same) for anchor in ("theta/old", "theta/mu"))
    assert one.loss == other.loss
    assert torch.equal(one.grad_BT, other.grad_BT)


def test_needs_are_optional_inputs(name, make_loss):
    optional = {field.name for field in fields(LossInputs) if field.default is None}
    assert set(make_loss(name).needs) <= optional


numbers = st.floats(-8.0, -0.0625, width=32)


@st.composite
def batches(draw) -> LossInputs:
    """Two sequences of three places, any of them off."""

    def draw_BT(of: st.SearchStrategy, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        return torch.tensor([[draw(of) for _ in range(3)] for _ in range(2)], dtype=dtype)

    advantage = torch.tensor([draw(st.floats(0.125, 4.0, width=32)), -draw(st.floats(0.125, 4.0, width=32))])
    policies = {f"logp_{policy}_BT": draw_BT(numbers) for policy in ("theta", "old", "behav", "ref")}
    return LossInputs(
        **policies,
        advantage_B=advantage.double(),
        mask_BT=draw_BT(st.booleans(), torch.bool),
        reward_B=torch.tensor([1.0, 0.0], dtype=torch.float64),
    )


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=12, deadline=None)
@given(inputs=batches(), scale=st.sampled_from([0.25, 2.0, 8.0]))
def test_any_batch(name, inputs, scale, make_loss, grade):
    """Twice the advantage is twice the loss; descent never makes a good token less likely, nor a bad one more."""
    loss = make_loss(name)
    if loss.acts_without_advantage:
        return
    one, other = grade(loss, inputs), grade(loss, replace(inputs, advantage_B=scale * inputs.advantage_B))
    assert other.loss == pytest.approx(scale * one.loss, rel=1e-12)
    torch.testing.assert_close(other.grad_BT, scale * one.grad_BT, rtol=1e-12, atol=0)
    assert math.isfinite(one.loss)
    assert not one.grad_BT[~inputs.mask_BT].any()
    assert (one.grad_BT * inputs.advantage_B[:, None] <= 0).all()
