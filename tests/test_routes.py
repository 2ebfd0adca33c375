"""Formulas on routes: ties, flips, hashes and bytes, by hand and against plain Python."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stalefront.routing import flips_LBT, route_bytes_per_token, stable_topk, token_hash_B


def random_routes(seed: int) -> Tensor:
    order = torch.rand(2, 3, 4, 8, generator=torch.Generator().manual_seed(seed)).argsort(-1)
    return order[..., :2].to(torch.int16)


def test_ties_go_to_the_lowest_index_by_hand():
    scores = torch.tensor([[0.1, 0.4, 0.4, 0.1], [0.0, -0.0, 0.0, 0.0], [1.0, float("nan"), 2.0, float("-inf")]])
    assert stable_topk(scores, 3).tolist() == [[1, 2, 0], [0, 1, 2], [1, 2, 0]]


@given(st.lists(st.lists(st.integers(0, 3), min_size=5, max_size=5), min_size=1, max_size=8), st.integers(1, 5))
@settings(max_examples=50, deadline=None)
def test_ties_against_a_sorted_list(rows, k):
    found = stable_topk(torch.tensor(rows, dtype=torch.float32), k).tolist()
    assert found == [sorted(range(5), key=lambda i: (-row[i], i))[:k] for row in rows]


def test_without_ties_it_is_topk():
    scores = torch.rand(64, 16, generator=torch.Generator().manual_seed(0))
    assert torch.equal(stable_topk(scores, 4), scores.topk(4, dim=-1).indices)


def test_flips_by_hand():
    one = torch.tensor([[[[0, 1], [2, 3], [4, 5], [-1, -1]]]], dtype=torch.int16)
    other = torch.tensor([[[[1, 0], [2, 4], [-1, -1], [0, 1]]]], dtype=torch.int16)
    assert flips_LBT(one, other).tolist() == [[[False, True, False, False]]]


def test_flips_against_sets():
    one, other = random_routes(0), random_routes(1)
    one[0, 1, 2] = -1
    flips = flips_LBT(one, other)
    for place in torch.cartesian_prod(*(torch.arange(n) for n in flips.shape)).tolist():
        mine, theirs = (set(routes[tuple(place)].tolist()) for routes in (one, other))
        assert bool(flips[tuple(place)]) == (mine != theirs and -1 not in mine | theirs)
    assert not flips_LBT(one, one.flip(-1)).any()


def mixed(token: int, place: int) -> int:
    """splitmix64 on natural numbers."""
    bits = 2**64 - 1
    z = ((token + 1) * 0x9E3779B97F4A7C15 + place * 0xD1B54A32D192ED03) & bits
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & bits
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & bits
    return z ^ (z >> 31)


def test_token_hash_against_natural_numbers():
    tokens = torch.randint(200_000, (5, 7), generator=torch.Generator().manual_seed(0))
    mask = torch.rand(5, 7, generator=torch.Generator().manual_seed(1)) < 0.6
    found = token_hash_B(tokens, mask).tolist()
    for row, value in enumerate(found):
        total = sum(mixed(int(tokens[row, t]), t + 1) for t in range(7) if mask[row, t])
        assert value % 2**64 == total % 2**64
    assert len(set(found)) == 5


def test_token_hash_sees_tokens_and_their_places():
    tokens = torch.tensor([[5, 6, 7, 0]])
    valid = torch.tensor([[True, True, True, False]])
    own = token_hash_B(tokens, valid)
    assert own.dtype == torch.int64
    assert torch.equal(own, token_hash_B(tokens[:, :3]))
    assert torch.equal(own, token_hash_B(torch.tensor([[5, 6, 7, 9]]), valid))
    for other in ([[6, 5, 7]], [[5, 6, 8]], [[0, 5, 6, 7]], [[5, 6, 7, 0]], [[5, 6]]):
        assert not torch.equal(own, token_hash_B(torch.tensor(other)))
    assert token_hash_B(tokens, torch.zeros_like(valid)).tolist() == [0]


def test_no_two_short_rows_share_a_hash():
    every = torch.cartesian_prod(*(torch.arange(20),) * 3)
    assert len(token_hash_B(every).unique()) == 20**3


def test_bytes_of_a_route():
    assert route_bytes_per_token(48, 8) == 768
    assert route_bytes_per_token(2, 2) == random_routes(0)[:, 0, 0].nbytes
