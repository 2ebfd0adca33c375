"""Clamped REINFORCE: hand-computed values, CISPO's formula, and PipelineRL's and ROLL's numbers."""

from __future__ import annotations

import pytest
import torch

from stalefront.choice import OptionError


def test_golden(make_loss, hand_batch, grade):
    # w = clamp(r, .75, 1.5) = [1.5, .75], [.75, 1, 1.5]; −w A log θ = [1.5, 1.5], [−1.5, −6, −1.5]; sum −6 over B = 2.
    # Gradient −w A / 2.
    graded = grade(make_loss("reinforce_clamp", floor=0.75, cap=1.5), hand_batch())
    assert graded.loss == pytest.approx(-3.0, rel=1e-6)
    expected = torch.tensor([[-0.75, -0.375, 0], [0.75, 1, 1.5]], dtype=torch.float64)
    torch.testing.assert_close(graded.grad_BT, expected, rtol=1e-6, atol=0)
    assert graded.value.clip_low_BT.tolist() == [[False, True, False], [True, False, False]]
    assert graded.value.clip_high_BT.tolist() == [[True, False, False], [False, False, True]]


def test_the_formula_is_cispos(make_loss, random_inputs):
    inputs = random_inputs()
    ours = make_loss("reinforce_clamp", floor=0.8, cap=1.2).surrogate(inputs)
    other = make_loss("cispo", floor=0.8, epsilon_high=1.2, anchor="theta/mu").surrogate(inputs)
    assert all(torch.equal(a, b) for a, b in zip(ours, other, strict=True))


@pytest.mark.parametrize(
    ("file", "options"),
    [
        ("pipelinerl__rl_step__reinforce_base_yaml", {"cap": 1.02}),
        ("pipelinerl__rl_step__reinforce_clamp5", {"cap": 5}),
        ("roll__pg_tis__tis_0_1", {"cap": 1, "anchor": "theta/old", "reduction": "sequence_mean", "rtol": 5e-9}),
    ],
)
def test_frameworks(file, options, agrees):
    agrees(file, "reinforce_clamp", **options)


@pytest.mark.parametrize("options", [{"cap": 0}, {"floor": -1}, {"floor": 2, "cap": 1}])
def test_refused(make_loss, options):
    with pytest.raises(OptionError, match=r"loss\.(cap|floor)"):
        make_loss("reinforce_clamp", **options)
