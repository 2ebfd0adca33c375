"""Pairs of options: what is refused, by which field, and with which way out; what stands beside it is taken."""

from __future__ import annotations

import pytest

from stalefront.choice import OptionError
from stalefront.pairs import check_mismatch, check_pairs, legs, truly

MOE = {"model": "tiny_moe"}
TIS = {"correction": ["token_tis"]}
OLD_MU = {"correction": ["token_mask"], "correction.token_mask.anchor": "old/mu"}


def refused(make_cell, overrides):
    with pytest.raises(OptionError) as caught:
        make_cell(**overrides)
    return caught.value


@pytest.mark.parametrize(
    ("overrides", "field", "part"),
    [
        ({**MOE, "replay": "r3", "mismatch": ["parity"]}, "replay", "choose the same experts"),
        ({"mismatch": ["parity", "logit_noise"]}, "mismatch", "[parity] alone"),
        ({"mismatch": ["parity"], "model.ranks": 2}, "model.ranks", "1 with mismatch=[parity]"),
        ({"mismatch": ["bf16", "batch_kernels"]}, "mismatch", "a list without batch_kernels beside bf16"),
        ({"mismatch": ["bf16", "stale_kv"]}, "mismatch", "a list without stale_kv beside bf16"),
        ({"mismatch": ["bf16"], "model.dtype": "bfloat16"}, "mismatch", "without bf16 at model.dtype=bfloat16"),
        ({"mismatch": ["bf16_weights"], "model.dtype": "bfloat16"}, "mismatch", "It does nothing"),
        ({"mismatch": ["fp16"], "model.dtype": "float16"}, "mismatch", "without fp16 at model.dtype=float16"),
        (
            {"mismatch": ["lm_head"], "mismatch.lm_head.dtype": "bfloat16", "model.dtype": "bfloat16"},
            "mismatch.lm_head.dtype",
            "computes in it already",
        ),
        ({"model.fp32_head": "trainer"}, "model.fp32_head", "in float32 already"),
        ({"model.fp32_head": "both"}, "model.fp32_head", "both acts on mismatch=[bf16]"),
        ({"model.fp32_head": "trainer", "mismatch": ["bf16"]}, "model.fp32_head", "in float32 already"),
        (
            {"model.fp32_head": "trainer", "model.dtype": "bfloat16", "mismatch": ["parity"]},
            "model.fp32_head",
            "none or both",
        ),
        (
            {**MOE, "mismatch": ["router_ties"], "model.deterministic_topk": True},
            "model.deterministic_topk",
            "false with mismatch=[router_ties]",
        ),
        ({**OLD_MU, "mismatch": ["parity"]}, "correction.token_mask.anchor", "old/mu is 1"),
        (OLD_MU, "correction.token_mask.anchor", "add an entry to mismatch"),
        (
            {**OLD_MU, "mismatch": ["top_p"], "mismatch.top_p.logged": "raw"},
            "correction.token_mask.anchor",
            "mismatch that is logged",
        ),
        (
            {**OLD_MU, "mismatch": ["logit_noise"], "mismatch.logit_noise.strength": 0.0},
            "correction.token_mask.anchor",
            "mismatch that is logged",
        ),
        ({"mismatch": ["top_k"], "mismatch.top_k.k": 16}, "mismatch.top_k.k", "below 16"),
        (
            {"mismatch": ["batch_kernels"], "mismatch.batch_kernels.prompts": 8},
            "mismatch.batch_kernels.prompts",
            "below",
        ),
        (
            {"mismatch": ["top_p", "retokenise"], "mismatch.top_p.keep_mask": True},
            "mismatch.top_p.keep_mask",
            "false beside retokenise",
        ),
        ({"mismatch": ["logit_noise"], "mismatch.target_kl": "foo"}, "mismatch.target_kl", "nats a token"),
    ],
    ids=str,
)
def test_what_could_never_act_is_refused(overrides, field, part, make_cell):
    error = refused(make_cell, overrides)
    assert error.field == field
    assert part in str(error)


@pytest.mark.parametrize(
    "overrides",
    [
        {**MOE, "replay": "r3", "mismatch": ["expert_flips", "logit_noise"]},
        {**MOE, "replay": "r2"},
        {"mismatch": ["bf16"], "model.fp32_head": "both"},
        {"mismatch": ["bf16", "top_p", "logp_noise", "int8", "retokenise"]},
        {"model.dtype": "bfloat16", "model.fp32_head": "trainer"},
        {"model.dtype": "bfloat16", "model.fp32_head": "both", "mismatch": ["parity"]},
        {"model.dtype": "bfloat16", "mismatch": ["fp16"]},
        {"mismatch": ["lm_head"], "mismatch.lm_head.dtype": "bfloat16"},
        {**MOE, "mismatch": ["router_ties"]},
        {"mismatch": ["stale_kv"], "delay": "none"},
        {**OLD_MU, "model.dtype": "float16"},
        {**OLD_MU, "mismatch": ["fp8"]},
        {**OLD_MU, "proximal": "ema"},
    ],
    ids=str,
)
def test_what_acts_is_taken(overrides, make_cell):
    cell = make_cell(**overrides)
    # Once more by hand, since a cell that stands has been checked.
    check_pairs(cell)
    check_mismatch(cell)


@pytest.mark.parametrize(
    ("loss", "anchors", "refused_at"),
    [
        # θ/μ = θ/old · old/μ: a loss with one of the two takes a weight with the other, and no more.
        ("grpo", ["old/mu"], None),
        ("grpo", ["theta/mu"], "theta/mu"),
        ("grpo", ["theta/old"], "theta/old"),
        ("reinforce", ["theta/mu"], None),
        ("reinforce", ["old/mu", "theta/old"], None),
        ("reinforce", ["theta/old", "theta/mu"], "theta/mu"),
        ("reinforce", ["theta/mu", "old/mu"], "old/mu"),
    ],
)
def test_a_leg_of_the_ratio_is_weighted_once(loss, anchors, refused_at, make_cell):
    names = ["token_tis", "sequence_tis"][: len(anchors)]
    overrides = {"loss": loss, "correction": names, "mismatch": ["logit_noise"]}
    overrides |= {f"correction.{name}.anchor": anchor for name, anchor in zip(names, anchors, strict=True)}
    if refused_at is None:
        assert [rule.anchor for rule in make_cell(**overrides).correction] == anchors
    else:
        error = refused(make_cell, overrides)
        assert (error.field, error.value) == (f"correction.{names[anchors.index(refused_at)]}.anchor", refused_at)


def test_legs_by_hand(make_cell):
    assert legs("theta/mu") == legs("theta/old") | legs("old/mu")
    assert not legs("theta/old") & legs("old/mu")
    plain, engine = make_cell(), make_cell(proximal="engine")
    for ratio in ("theta/mu", "old/mu", "theta/old"):
        assert truly(plain, ratio) == ratio
    assert [truly(engine, ratio) for ratio in ("theta/mu", "theta/old")] == ["theta/mu", "theta/mu"]


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        ({"mismatch": ["logit_noise"]}, "mismatch"),
        ({**MOE, "replay": "r3"}, "replay"),
        ({"model.dtype": "bfloat16", "model.fp32_head": "both"}, "model.fp32_head"),
        ({**MOE, "model.deterministic_topk": True}, "model.deterministic_topk"),
        ({"proximal": "engine"}, "proximal"),
    ],
)
def test_the_trainer_of_trl_has_none_of_it(overrides, field, make_cell):
    make_cell(**overrides)
    error = refused(make_cell, {**overrides, "engine": "trl"})
    assert error.field == field
    assert "with engine=trl" in str(error)
