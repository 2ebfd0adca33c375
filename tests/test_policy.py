"""Log-probs of the trainer's forward: by hand, of nothing, on a support, and with gradients."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from stalefront.policy import token_logps
from stalefront.support import restricted_logp_BT, tail_mass

TOKENS = torch.tensor([[3, 1, 0, 2], [0, 2, 2, 1]])
POSITION = torch.tensor([[0, 1, 2, 3], [-1, 0, 1, 2]])
MASK = torch.tensor([[False, False, True, True], [False, False, True, False]])


class Table(torch.nn.Module):
    """A model whose logits are a row of a table for every token it sees."""

    def __init__(self, seed=0):
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(4, 4, generator=torch.Generator().manual_seed(seed)))

    def forward(self, input_ids, logits_to_keep, **_):
        return SimpleNamespace(logits=self.table[input_ids][:, -logits_to_keep:])


@pytest.fixture
def model():
    return Table()


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_log_probs_entropy_and_tail_by_hand(model, temperature):
    found = token_logps(model, TOKENS, POSITION, MASK, temperature=temperature, tail_below=0.2)
    for row, place in ((0, 2), (0, 3), (1, 2)):
        weights = [math.exp(x / temperature) for x in model.table[TOKENS[row, place - 1]].tolist()]
        p = [w / sum(weights) for w in weights]
        assert float(found.logp_BT[row, place].detach()) == pytest.approx(math.log(p[TOKENS[row, place]]), abs=1e-6)
        assert float(found.entropy_BT[row, place]) == pytest.approx(-sum(x * math.log(x) for x in p), abs=1e-6)
        assert float(found.tail_BT[row, place]) == pytest.approx(sum(x for x in p if x < 0.2), abs=1e-6)
    for values in found:
        assert values.shape == MASK.shape
        assert not values[~MASK].any()
    assert token_logps(model, TOKENS, POSITION, MASK, temperature=temperature).tail_BT is None


def test_the_gradient_by_hand(model):
    found = token_logps(model, TOKENS, POSITION, MASK, temperature=2.0)
    found.logp_BT[0, 3].backward()
    # ∂ log p(2 | 0) / ∂ logit = (1[token] − p) / temperature
    expected = torch.zeros(4, 4)
    expected[0] = (torch.tensor([0.0, 0.0, 1.0, 0.0]) - torch.softmax(model.table[0].detach() / 2, -1)) / 2
    assert torch.allclose(model.table.grad, expected, atol=1e-6)
    assert not found.entropy_BT.requires_grad


def test_nothing_asked_for_is_nothing(model):
    found = token_logps(model, TOKENS, POSITION, torch.zeros_like(MASK), temperature=1.0, tail_below=0.1)
    assert all(torch.equal(values, torch.zeros(MASK.shape)) for values in found)


def test_a_support_against_the_formula(model):
    support = torch.tensor([[[-1, -1]] * 2 + [[0, 3], [2, -1]], [[-1, -1]] * 4], dtype=torch.int32)
    found = token_logps(model, TOKENS, POSITION, MASK, temperature=0.7, support_BTK=support, tail_below=0.3)
    logits = model.table[TOKENS].detach()[:, :-1] / 0.7
    expected = restricted_logp_BT(logits, support[:, 1:], TOKENS[:, 1:])
    kept = MASK[:, 1:]
    assert torch.allclose(found.logp_BT[:, 1:][kept], expected.logp_BT[kept], atol=1e-6)
    assert torch.allclose(found.entropy_BT[:, 1:][kept], expected.entropy_BT[kept], atol=1e-6)
    # The only token of a support is certain.
    assert [values[0, 3].tolist() for values in found] == [0, 0, 0]
    whole = token_logps(model, TOKENS, POSITION, MASK, temperature=0.7, tail_below=0.3)
    assert torch.equal(found.logp_BT[1], whole.logp_BT[1])
    probability = torch.log_softmax(logits[1, 1:2], -1)
    assert float(whole.tail_BT[1, 2]) == pytest.approx(float(tail_mass(probability, 0.3)), abs=1e-6)
    found.logp_BT.sum().backward()
    # Words outside a support are not learnt from, and a certain one neither.
    assert model.table.grad[1, [1, 2]].tolist() == [0, 0]
    assert model.table.grad[0].tolist() == [0] * 4
    assert model.table.grad.isfinite().all()


def test_nan_stays(model):
    with torch.no_grad():
        model.table[0, 0] = math.nan
    found = token_logps(model, TOKENS, POSITION, MASK, temperature=1.0, tail_below=0.1)
    for values in found[:2]:
        assert values.isnan().tolist() == [[False, False, False, True], [False] * 4]
