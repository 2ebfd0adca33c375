"""Weights of token losses by hand, and micro-batches that add up."""

from __future__ import annotations

import pytest
import torch

from stalefront.cell import make_choice
from stalefront.choice import OptionError
from stalefront.reduction import reduction_BT

KINDS = ["sequence_mean", "token_mean", "constant"]


@pytest.mark.parametrize(
    ("kind", "rows"),
    [
        ("sequence_mean", [[1 / 6, 1 / 6, 0], [1 / 9, 1 / 9, 1 / 9], [1 / 3, 0, 0]]),  # 1/(3 · |y|)
        ("token_mean", [[1 / 6, 1 / 6, 0], [1 / 6, 1 / 6, 1 / 6], [1 / 6, 0, 0]]),  # 6 tokens
        ("constant", [[1 / 12, 1 / 12, 0], [1 / 12, 1 / 12, 1 / 12], [1 / 12, 0, 0]]),  # 1/(3 · 4)
    ],
)
def test_golden(kind, rows):
    mask = torch.tensor([[True, True, False], [True, True, True], [True, False, False]])
    torch.testing.assert_close(reduction_BT(mask, kind, max_completion_length=4), torch.tensor(rows))


@pytest.mark.parametrize("kind", KINDS)
def test_empty_rows_count_as_sequences_and_weigh_nothing(kind):
    mask = torch.tensor([[True, True], [False, False]])
    got = reduction_BT(mask, kind, max_completion_length=2)
    assert got[1].tolist() == [0, 0]
    alone = reduction_BT(mask[:1], kind, max_completion_length=2)
    torch.testing.assert_close(got[0], alone[0] if kind == "token_mean" else alone[0] / 2)
    assert reduction_BT(mask[1:], kind, max_completion_length=2).tolist() == [[0, 0]]


@pytest.mark.parametrize("kind", KINDS[:2])
def test_means_weigh_one_in_total(kind):
    mask = torch.rand(7, 5, generator=torch.Generator().manual_seed(0)) < 0.6
    mask[:, 0] = True
    assert reduction_BT(mask, kind, max_completion_length=5).sum().item() == pytest.approx(1)


@pytest.mark.parametrize("kind", KINDS)
def test_padding_columns_change_nothing(kind):
    mask = torch.tensor([[True, True, False], [True, False, False]])
    wide = torch.nn.functional.pad(mask, (2, 3))
    got = reduction_BT(wide, kind, max_completion_length=4)
    assert torch.equal(got[:, 2:5], reduction_BT(mask, kind, max_completion_length=4))
    assert got.sum().item() == got[:, 2:5].sum().item()


def test_a_sum_over_a_fixed_number(conf_choice):
    """1/divisor a token, whatever the mask holds."""
    mask = torch.tensor([[True, True, False], [True, False, False]])
    made = make_choice("reduction", conf_choice("reduction", "token_sum") | {"divisor": 8.0})
    weights = made.weights_BT(mask, "token_mean", max_completion_length=3, dtype=torch.float64)
    assert weights.tolist() == [[0.125, 0.125, 0.0], [0.125, 0.0, 0.0]]
    plain = make_choice("reduction", conf_choice("reduction", "token_sum"))
    assert torch.equal(plain.weights_BT(mask, "token_mean", max_completion_length=3), mask.float())
    with pytest.raises(OptionError, match=r"reduction\.divisor = 0\.0 .* a finite number above 0"):
        make_choice("reduction", conf_choice("reduction", "token_sum") | {"divisor": 0.0})


@pytest.mark.parametrize(
    ("epsilon_on", "expected"), [("tokens", 1 / (3 * 2)), ("sequences", 1 / (2 * 3)), ("both", 1 / (3 * 3))]
)
def test_epsilon_is_added_to_tokens_or_sequences(conf_choice, epsilon_on, expected):
    """Two sequences of 2 tokens, epsilon 1: |y| + 1 and B + 1."""
    changed = {"epsilon": 1.0, "epsilon_on": epsilon_on}
    made = make_choice("reduction", conf_choice("reduction", "sequence_mean") | changed)
    weights = made.weights_BT(torch.ones(2, 2, dtype=torch.bool), "token_mean", max_completion_length=2)
    assert weights.flatten().tolist() == pytest.approx([expected] * 4)
