"""A sampler in float16: a model loaded in that type and decoded by hand, and what overflows."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from stalefront.choice import OptionError


def test_the_type_by_hand(entry):
    assert entry("fp16").dtype == torch.float16
    # Eleven bits of mantissa, and nothing above 65504.
    values = torch.tensor([1 + 2**-10, 1 + 2**-11, 65504.0, 65536.0]).to(entry("fp16").dtype).tolist()
    assert values == [1 + 2**-10, 1.0, 65504.0, math.inf]


def test_it_is_the_model_loaded_in_float16(make_learner, draw, decoded, tmp_path):
    made = make_learner("fp16")
    made.parts.model.save_pretrained(tmp_path)
    narrow = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float16).eval()
    drawn = draw(made)
    assert torch.equal(drawn.logp_BCV, decoded(narrow, drawn))
    # Nearer to the trainer than bfloat16, by the bits of its mantissa.
    plain = decoded(made.parts.model, drawn)
    coarse = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    errors = [(decoded(other, drawn) - plain).abs().mean() for other in (narrow, coarse)]
    assert 0 < errors[0] < errors[1] / 4


def test_what_overflows_is_recorded_as_it_comes(make_learner):
    made = make_learner("fp16")
    with torch.no_grad():
        made.parts.model.lm_head.weight[3] = 1e6
    batch = made.source.take(0)
    assert batch.logp_behav_BT[batch.mask_BT].isnan().any()
    assert batch.logp_old_BT[batch.mask_BT].isfinite().all()


def test_a_float16_model_has_nothing_left_to_cast(make_cell):
    with pytest.raises(OptionError, match=r"fp16 at model\.dtype=float16"):
        make_cell(mismatch=["fp16"], **{"model.dtype": "float16"})
