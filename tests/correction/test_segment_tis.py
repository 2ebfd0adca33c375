"""Segment TIS: one weight a turn by hand, its identities, and ROLL's numbers."""

from __future__ import annotations

import pytest
import torch

from stalefront.correction import chain
from stalefront.ratios import over_segments


def test_one_weight_a_turn_by_hand(rule, sampled, weigh):
    # Turns of the first row: √(4 · 1) = 2 → 1.8, then ½; a turn does not go on into the next row.
    inputs = sampled([[4.0, 1.0, None, 0.5], [3.0, None, None, None]])
    weight, keep = weigh(inputs, rule("segment_tis", cap=1.8))
    assert weight[0] == pytest.approx([1.8, 1.8, 1.0, 0.5])
    assert weight[1] == pytest.approx([1.8, 1.0, 1.0, 1.0])
    assert all(all(row) for row in keep)


def test_gradient_by_hand(rule, sampled, make_loss, grade):
    # Weights 1.5 and ½, three positions of which two count: gradient −w A / 2.
    inputs = sampled([[1.5, None, 0.5]])
    graded = grade(make_loss("reinforce"), inputs, weights=chain([rule("segment_tis")], inputs))
    torch.testing.assert_close(graded.grad_BT, torch.tensor([[-0.75, 0.0, -0.25]], dtype=torch.float64))


def test_a_sequence_of_one_turn_has_the_geometric_mean(rule, random_inputs):
    inputs = random_inputs()
    one, other = (chain([rule(stem)], inputs).weight_BT for stem in ("segment_tis", "geometric_tis"))
    torch.testing.assert_close(one[inputs.mask_BT], other[inputs.mask_BT], rtol=1e-12, atol=0)


def test_means_against_a_loop():
    random = torch.Generator().manual_seed(0)
    value = torch.randn(7, 9, generator=random, dtype=torch.float64)
    mask, counted = (torch.rand(7, 9, generator=random) < 0.7 for _ in range(2))
    expected = torch.zeros_like(value)
    for row in range(7):
        start = 0
        while start < 9:
            if not mask[row, start]:
                start += 1
                continue
            end = start
            while end < 9 and mask[row, end]:
                end += 1
            inside = [float(value[row, t]) for t in range(start, end) if counted[row, t]]
            expected[row, start:end] = sum(inside) / len(inside) if inside else 0.0
            start = end
    torch.testing.assert_close(over_segments(value, mask, counted), expected, rtol=1e-12, atol=1e-15)


def test_roll(rule, agrees):
    segments = [rule("segment_tis", anchor="old/mu", cap=5.0)]
    agrees("roll__compute_train_infer_correction__segment_is_ub5", segments, weight="is_weight")
