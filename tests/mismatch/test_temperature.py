"""Another temperature: values by hand, what is written down, and what still sees it."""

from __future__ import annotations

import math

import pytest
import torch

from stalefront.mismatch import Noise

NO_NOISE = Noise(torch.zeros(1, dtype=torch.int64), 0)


def test_values_by_hand(entry):
    logits = torch.tensor([[0.0, math.log(2.0)]])
    # At half the temperature odds of 2 are odds of 4, and half of that way is the geometric middle.
    for strength, odds in ((1.0, 4.0), (0.5, 2 ** math.sqrt(2)), (2.0, 16.0)):
        found = entry("temperature", temperature=0.5, strength=strength)(logits, NO_NOISE)
        assert found.tolist()[0] == pytest.approx([0.0, math.log(odds)])


def test_there_and_back_is_nothing(entry):
    logits = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    there = entry("temperature", temperature=0.8)(logits, NO_NOISE)
    torch.testing.assert_close(entry("temperature", temperature=1 / 0.8)(there, NO_NOISE), logits)


@pytest.mark.parametrize("logged", ["processed", "raw"])
def test_it_multiplies_the_tasks_temperature(logged, make_learner, draw, decode):
    fields = {"mismatch.temperature.temperature": 0.5, "mismatch.temperature.logged": logged}
    made = make_learner("temperature", **fields, **{"task.temperature": 0.8})
    drawn = draw(made)
    logits = decode(made.parts.model, drawn.samples.tokens_BT[:, : drawn.first], drawn.tokens_BC, 4)
    torch.testing.assert_close(drawn.logp_BCV, torch.log_softmax(logits / 0.4, -1), rtol=0, atol=1e-5)
    written = torch.log_softmax(logits / (0.4 if logged == "processed" else 0.8), -1)
    own = written.gather(-1, drawn.tokens_BC[..., None]).squeeze(-1)
    torch.testing.assert_close(drawn.written_BC[drawn.mask_BC], own[drawn.mask_BC], rtol=0, atol=1e-5)


def test_raw_log_probs_hide_it_from_ratios_and_not_from_surprisal(make_learner):
    rows = {}
    for logged in ("processed", "raw"):
        fields = {"mismatch.temperature.temperature": 0.6, "mismatch.temperature.logged": logged}
        _, rows[logged] = make_learner("temperature", **fields, **{"task.num_prompts": 16}).advance()
    assert rows["processed"]["mismatch_k3_nats"] > 1e-2
    assert abs(rows["raw"]["mismatch_k3_nats"]) < 1e-9
    for row in rows.values():
        assert row["surprisal_gap_nats"] < -3 * row["surprisal_gap_se_nats"]


def test_options(refused):
    for value in (0.0, -1.0, 1.0, math.nan, math.inf):
        refused("temperature", "temperature", temperature=value)
    refused("temperature", "logged", logged="both")
