"""Rows decoded a few prompts at a time: pieces and mixtures by hand, and each piece decoded alone."""

from __future__ import annotations

import pytest
import torch

from stalefront.decoding import Blended, Chunked
from stalefront.mismatch import Path


class Counting:
    """A decode whose logits are the tokens it was fed, plus `offset`."""

    def __init__(self, offset, rows):
        self.logits = torch.full((rows, 2), float(offset))
        self.offset, self.fed = offset, []

    def advance(self, token_B):
        self.fed.append(token_B.tolist())
        self.logits = (token_B + self.offset)[:, None].expand(-1, 2).float()

    def routes_LBTK(self):
        return torch.full((1, len(self.logits), len(self.fed), 1), self.offset, dtype=torch.int16)


def test_pieces_by_hand():
    parts = [Counting(10, 2), Counting(20, 1)]
    chunked = Chunked(parts, [2, 1])
    assert chunked.logits[:, 0].tolist() == [10, 10, 20]
    chunked.advance(torch.tensor([1, 2, 3]))
    assert [part.fed for part in parts] == [[[1, 2]], [[3]]]
    assert chunked.logits[:, 0].tolist() == [11, 12, 23]
    assert chunked.routes_LBTK()[0, :, 0, 0].tolist() == [10, 10, 20]


@pytest.mark.parametrize(("strength", "expected"), [(0.5, [15, 15]), (3.0, [40, 40])])
def test_a_mixture_by_hand(strength, expected):
    plain, other = Counting(10, 2), Counting(20, 2)
    mixed = Blended(plain, other, strength)
    assert mixed.logits[:, 0].tolist() == expected
    mixed.advance(torch.tensor([1, 2]))
    assert plain.fed == other.fed == [[1, 2]]
    assert mixed.logits[:, 0].tolist() == [expected[0] + 1, expected[0] + 2]
    assert (mixed.routes_LBTK() == 20).all()


@pytest.mark.parametrize("prompts", [1, 3])
def test_every_piece_is_the_one_decoded_alone(prompts, make_learner, draw):
    made, plain = make_learner("batch_kernels", **{"mismatch.batch_kernels.prompts": prompts}), make_learner()
    whole = draw(made)
    for start in range(0, 4, prompts):
        span = slice(start, min(start + prompts, 4))
        part, rows = draw(plain, prompts=span), slice(4 * span.start, 4 * span.stop)
        columns = part.logp_BCV.shape[1]
        assert torch.equal(part.tokens_BC, whole.tokens_BC[rows, :columns])
        assert torch.equal(part.logp_BCV, whole.logp_BCV[rows, :columns])


def test_routes_come_in_the_order_of_rows(make_learner, draw):
    made = make_learner("batch_kernels", model="tiny_moe")
    one, other = draw(made).samples, draw(make_learner(model="tiny_moe")).samples
    assert one.routes_LBTK.shape == other.routes_LBTK.shape
    # The same sums in another order: at most a near tie goes the other way.
    assert (one.routes_LBTK != other.routes_LBTK).double().mean() < 0.01


def test_random_numbers_go_by_the_row_and_not_by_the_piece(make_learner, draw):
    loud = {"model": "tiny_moe", "mismatch.router_noise.sigma": 1.0}
    one, other = (draw(make_learner(*names, **loud)) for names in (["batch_kernels", "router_noise"], ["router_noise"]))
    assert torch.equal(one.tokens_BC, other.tokens_BC)
    torch.testing.assert_close(one.logp_BCV, other.logp_BCV, rtol=0, atol=1e-5)


def test_options(entry, refused):
    assert isinstance(entry("batch_kernels"), Path)
    refused("batch_kernels", "prompts", prompts=0)
