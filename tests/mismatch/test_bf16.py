"""A sampler in bfloat16: a model loaded in that type and decoded by hand, and mixtures with the trainer's path."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM

from stalefront.choice import OptionError


@pytest.fixture(scope="module")
def narrow(make_learner, tmp_path_factory):
    """The same weights, loaded in bfloat16 from a checkpoint."""
    folder = tmp_path_factory.mktemp("checkpoint")
    make_learner().parts.model.save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()


def test_the_type_by_hand(entry):
    assert entry("bf16").dtype == torch.bfloat16
    # Eight bits of mantissa: 1 + 2^-8 lies between two of its numbers and goes to the even one.
    assert float(torch.tensor(1 + 2**-8).to(entry("bf16").dtype)) == 1.0


def test_it_is_the_model_loaded_in_bfloat16(make_learner, draw, decoded, narrow):
    drawn = draw(make_learner("bf16"))
    assert drawn.logp_BCV.dtype == torch.float32
    assert torch.equal(drawn.logp_BCV, decoded(narrow, drawn))


@pytest.mark.parametrize("strength", [0.5, 4.0])
def test_strength_is_a_share_of_the_difference_in_logits(strength, make_learner, draw, decode, narrow):
    made = make_learner("bf16", **{"mismatch.bf16.strength": strength})
    drawn = draw(made)
    inputs = (drawn.samples.tokens_BT[:, : drawn.first], drawn.tokens_BC, 4)
    plain, other = decode(made.parts.model, *inputs), decode(narrow, *inputs)
    expected = torch.log_softmax((1 - strength) * plain + strength * other, -1)
    torch.testing.assert_close(drawn.logp_BCV, expected, rtol=0, atol=1e-5)


def test_the_trainer_keeps_its_type_and_the_sampler_follows_its_weights(make_learner):
    made = make_learner("bf16")
    for _ in range(2):
        engines = made.source.inference.load(made.parts.model)
        assert engines.plain is made.parts.model
        assert {p.dtype for p in engines.half.parameters()} == {torch.bfloat16}
        for mine, live in zip(engines.half.parameters(), made.parts.model.parameters(), strict=True):
            assert live.dtype == torch.float32
            assert torch.equal(mine, live.bfloat16())
        made.advance()


def test_a_float32_head_on_a_bfloat16_body(make_learner):
    made = make_learner("bf16", **{"model.fp32_head": "both"})
    half = made.source.inference.load(made.parts.model).half
    hidden = torch.randn(3, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    logits = half.get_output_embeddings()(hidden)
    assert logits.dtype == torch.float32
    assert torch.equal(logits, linear(hidden.float(), made.parts.model.lm_head.weight.bfloat16().float()))


def test_a_bfloat16_model_has_nothing_left_to_cast(make_cell):
    with pytest.raises(OptionError, match=r"bf16 at model\.dtype=bfloat16"):
        make_cell(mismatch=["bf16"], **{"model.dtype": "bfloat16"})
