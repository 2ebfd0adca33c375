"""The positive control: log old/μ is exactly 0, whatever the delay and however a batch is cut."""

from __future__ import annotations

import math

import pytest
import torch

from stalefront.choice import OptionError
from stalefront.decoding import Prompts, Teacher

CUTS = [
    {},
    {"delay": "lag", "delay.lag_updates": 2, "delay.via": "weights"},
    {"delay": "lag", "delay.lag_updates": 2, "delay.via": "data"},
    {"delay": "reuse", "delay.S": 2, "delay.minibatches": 2},
    {"optimizer.grad_accum": 4},
    {"task.temperature": 0.7},
    {"model": "tiny_moe"},
    {"model.dtype": "bfloat16"},
]


def ran(make_learner, stir, *mismatch, **overrides):
    """Records and batches of four steps, between which weights move."""
    made = make_learner(*mismatch, **overrides)
    rows, batches = [], []
    for step in range(4):
        rows.append(made.advance()[1])
        batches.append(made.batch)
        stir(made.parts.model, step)
    return rows, batches


@pytest.mark.parametrize("overrides", CUTS, ids=str)
def test_old_is_what_the_sampler_wrote_down_bit_for_bit(overrides, make_learner, stir):
    rows, batches = ran(make_learner, stir, "parity", **overrides)
    for batch in batches:
        assert torch.equal(batch.logp_old_BT, batch.logp_behav_BT)
        assert (batch.logp_behav_BT[batch.mask_BT] < 0).all()
    for row in rows:
        assert row["old_mu_ratio_max"] == 1.0
        assert row["mismatch_k3_nats"] == row["mismatch_logratio_abs_mean"] == 0.0
    assert rows[-1]["theta_old_ratio_max"] != 1.0


def test_rows_that_end_early_are_scored_at_the_full_width_too(make_learner):
    made = make_learner("parity", **{"task.max_completion_length": 40})
    batch = made.source.take(0)
    first = int(batch.mask_BT.any(0).float().argmax())
    assert int(batch.mask_BT.sum(-1).max()) < 40
    assert batch.tokens_BT.shape[1] == first + 40
    assert torch.equal(batch.logp_old_BT, batch.logp_behav_BT)


def test_a_cached_decode_is_not_that(make_learner, stir):
    _, batches = ran(make_learner, stir)
    assert not all(torch.equal(batch.logp_old_BT, batch.logp_behav_BT) for batch in batches)


def test_tokens_are_those_of_a_cached_decode(make_learner, draw):
    one, other = draw(make_learner("parity")), draw(make_learner())
    assert torch.equal(one.samples.tokens_BT, other.samples.tokens_BT)
    torch.testing.assert_close(one.logp_BCV, other.logp_BCV, rtol=0, atol=1e-5)


def test_rows_meet_the_forward_in_their_slices_by_hand():
    seen = []

    def logits(tokens_BT, position_BT):
        seen.append((tokens_BT.tolist(), position_BT.tolist()))
        return tokens_BT[:, 2:, None].float().expand(-1, -1, 3)

    prompts = Prompts(torch.tensor([[0, 5], [6, 7]]), torch.tensor([[-1, 0], [0, 1]]))
    slices = [torch.tensor([0, 3]), torch.tensor([1, 2])]
    teacher = Teacher(logits, prompts, 2, slices=slices, length=2, pad=9)
    assert teacher.logits.tolist() == [[9.0] * 3] * 4
    assert seen == [
        ([[0, 5, 9, 9], [6, 7, 9, 9]], [[-1, 0, 1, 2], [0, 1, 2, 3]]),
        ([[0, 5, 9, 9], [6, 7, 9, 9]], [[-1, 0, 1, 2], [0, 1, 2, 3]]),
    ]
    teacher.advance(torch.tensor([1, 2, 3, 4]))
    assert teacher.tokens_BT[:, 2:].tolist() == [[1, 9], [2, 9], [3, 9], [4, 9]]
    # The second column now, and every row where it was.
    teacher.advance(torch.tensor([5, 6, 7, 8]))
    assert teacher.tokens_BT[:, 3].tolist() == [5, 6, 7, 8]
    assert teacher.routes_LBTK() is None


def test_options(refused, make_cell):
    for strength in (0.0, 0.5, 2.0, math.nan):
        refused("parity", "strength", strength=strength)
    for overrides, field in (
        ({"mismatch": ["parity", "fp8"]}, "mismatch"),
        ({"mismatch": ["parity"], "mismatch.target_kl": 0.0}, "mismatch.target_kl"),
        ({"mismatch": ["parity"], "model.ranks": 2}, "model.ranks"),
        ({"mismatch": ["parity"], "model.dtype": "bfloat16", "model.fp32_head": "trainer"}, "model.fp32_head"),
        ({"mismatch": ["parity"], "model": "tiny_moe", "replay": "r3"}, "replay"),
    ):
        with pytest.raises(OptionError) as error:
            make_cell(**overrides)
        assert error.value.field == field
