"""The sampler's side of a cell: what is drawn from, what is written down, which modules run, and the two controls."""

from __future__ import annotations

import pytest
import torch

from stalefront.build import build
from stalefront.cell import make_choice
from stalefront.inference import Inference, Place
from stalefront.loop import Learner
from stalefront.mismatch import HalfPath, Logging, Processing
from stalefront.noise import row_keys

LOGITS = torch.tensor([[1.0, 0.0, -1.0, 0.5], [0.0, 3.0, 0.0, -2.0]])
PLAIN = {"model.warmup": None, "task.num_prompts": 4, "task.num_generations": 4}
# Moves weights without any reward.
DECAY = {"optimizer.warmup_steps": 0, "optimizer.weight_decay": 0.5, "optimizer.lr": 0.02}


@pytest.fixture
def entries(conf_choice):
    """`entries(top_p={"p": 0.8}, …)`: injectors of `conf/mismatch/`, in this order."""
    return lambda **named: [make_choice("mismatch", conf_choice("mismatch", n) | f) for n, f in named.items()]


@pytest.fixture
def learner(make_config, cache_dir):
    """`learner(…)`: of a cell without warm-up, whose weights are wide enough for routes and logits to differ."""
    from stalefront.cell import Cell

    def make(**overrides):
        config = make_config(**PLAIN | overrides)
        config["model"]["config"] |= {"initializer_range": 0.3}
        cell = Cell.from_config(config)
        return Learner(cell, build(cell, cache_dir))

    return make


def keys(injectors, rows=2):
    return {entry.choice(): row_keys(0, entry.choice(), 1, rows) for entry in injectors}


def test_without_entries_a_softmax_at_the_temperature():
    drawn = Inference(2.0).process(LOGITS, {}, 0)
    assert torch.equal(drawn.logp_BV, torch.log_softmax(LOGITS / 2, -1))
    assert drawn.logged_BV is drawn.logp_BV
    assert drawn.keep_BV is None
    assert torch.equal(Inference(2.0).written(torch.tensor([-1.0]), {}, 0), torch.tensor([-1.0]))


def test_a_temperature_by_hand(entries):
    injectors = entries(temperature={"temperature": 0.5})
    drawn = Inference(1.0, injectors).process(torch.tensor([[0.0, 1.0]]), keys(injectors, 1), 0)
    # e² / (1 + e²)
    assert drawn.logp_BV.exp().tolist() == [pytest.approx([0.119203, 0.880797], abs=1e-6)]
    assert drawn.logged_BV is drawn.logp_BV


@pytest.mark.parametrize(
    ("first", "second"), [("processed", "processed"), ("processed", "raw"), ("raw", "processed"), ("raw", "raw")]
)
def test_what_is_written_down_leaves_raw_entries_out(first, second, entries):
    named = {"temperature": {"temperature": 0.5, "logged": first}, "top_k": {"k": 2, "logged": second}}
    injectors = entries(**named)
    drawn = Inference(1.0, injectors).process(LOGITS, keys(injectors), 0)
    kept = torch.tensor([[True, False, False, True], [True, True, False, False]])
    expected = torch.log_softmax((LOGITS / 0.5).masked_fill(~kept, -torch.inf), -1)
    assert torch.allclose(drawn.logp_BV, expected)
    logged = LOGITS / 0.5 if first == "processed" else LOGITS
    logged = logged.masked_fill(~kept, -torch.inf) if second == "processed" else logged
    assert torch.allclose(drawn.logged_BV, torch.log_softmax(logged, -1))


def test_the_trainer_is_told_the_cuts_that_ask_for_it(entries):
    for named, expected in (
        ({"top_k": {"k": 2}}, None),
        ({"top_k": {"k": 2, "keep_mask": True}}, [[1, 0, 0, 1], [1, 1, 0, 0]]),
        ({"top_k": {"k": 2, "keep_mask": True}, "top_p": {"p": 0.5, "keep_mask": True}}, [[1, 0, 0, 0], [0, 1, 0, 0]]),
        ({"top_k": {"k": 2, "keep_mask": True}, "top_p": {"p": 0.5}}, [[1, 0, 0, 1], [1, 1, 0, 0]]),
        ({"top_k": {"k": 2}, "top_p": {"p": 0.5, "keep_mask": True}}, [[1, 0, 0, 0], [0, 1, 0, 0]]),
    ):
        injectors = entries(**named)
        keep = Inference(1.0, injectors).process(LOGITS, keys(injectors), 0).keep_BV
        assert (None if keep is None else keep.int().tolist()) == expected


def test_noise_depends_on_the_column_and_on_the_entry(entries):
    injectors = entries(logit_noise={}, logp_noise={})
    inference, key_B = Inference(1.0, injectors), keys(injectors)
    one, two = (inference.process(LOGITS, key_B, column).logp_BV for column in (0, 1))
    assert torch.equal(one, inference.process(LOGITS, key_B, 0).logp_BV)
    assert not torch.allclose(one, two)
    logp = torch.zeros(2)
    written = inference.written(logp, key_B, 0)
    assert not torch.equal(written, inference.written(logp, key_B, 1))
    assert written[0] != written[1]


def test_scaling_leaves_out_what_has_no_strength(entries):
    injectors = entries(logit_noise={"strength": 0.5}, top_p={"strength": 0.0}, logp_noise={}, fp16={})
    inference = Inference(1.0, injectors)
    assert [entry.choice() for entry in inference.active] == ["logit_noise", "logp_noise", "fp16"]
    inference.scale(3.0)
    assert [entry.strength for entry in inference.active] == [1.5, 3.0, 3.0]
    assert [entry.choice() for entry in inference.of(Processing)] == ["logit_noise"]
    assert [entry.choice() for entry in inference.of(Logging)] == ["logp_noise"]
    assert [entry.choice() for entry in inference.of(HalfPath)] == ["fp16"]
    inference.scale(0.0)
    assert inference.active == []
    assert torch.equal(inference.process(LOGITS, {}, 0).logp_BV, torch.log_softmax(LOGITS, -1))
    inference.scale(1.0)
    assert inference.factor == 1.0
    assert inference.active[0].strength == 0.5


def sampled(learner, purpose="rollout", inference=None, first=0, rows=None):
    cell, parts = learner.cell, learner.parts
    texts = cell.task.encode(cell.task.train_rows(0, 1), parts.tokenizer)
    prompts = parts.sampler.pad(texts, parts.device).rows(slice(first, rows))
    place = Place(0, purpose, 1, first * cell.task.num_generations)
    inference = inference or learner.source.inference
    with torch.no_grad():
        engines = inference.load(parts.model)
    options = {"num_generations": cell.task.num_generations, "inference": inference}
    return parts.sampler.sample(engines, prompts, **options, **place._asdict())


NOISY = {"mismatch": ["router_noise", "logit_noise", "logp_noise"], "mismatch.router_noise.sigma": 0.5}


def test_a_row_does_not_depend_on_what_is_sampled_beside_it(learner):
    it = learner(model="tiny_moe", **NOISY)
    whole, half = sampled(it), sampled(it, first=2)
    assert whole.texts[8:] == half.texts
    width = half.logp_behav_BT.shape[1]
    assert torch.allclose(whole.logp_behav_BT[8:, :width], half.logp_behav_BT, atol=1e-5)
    same = (whole.routes_LBTK[:, 8:, :width] == half.routes_LBTK).all(-1)
    assert same.double().mean() > 0.99
    other = sampled(it, purpose="elsewhere")
    assert other.texts != whole.texts


def test_the_default_is_the_trainers_own_module(learner):
    it = learner()
    inference = it.source.inference
    assert (inference.module, inference.half, inference.before) == (None, None, None)
    assert inference.load(it.parts.model).plain is it.parts.model
    plain, again = sampled(it), sampled(it, inference=Inference(1.0))
    assert torch.equal(plain.tokens_BT, again.tokens_BT)
    assert torch.equal(plain.logp_behav_BT, again.logp_behav_BT)
    assert plain.routes_LBTK is None


@pytest.mark.parametrize(
    ("overrides", "own", "half", "before"),
    [
        ({"mismatch": ["int8"]}, True, False, False),
        ({"mismatch": ["lm_head"]}, True, False, False),
        ({"mismatch": ["bf16"]}, False, True, False),
        ({"mismatch": ["stale_kv", "int8"]}, True, False, True),
        ({"mismatch": ["logit_noise", "retokenise", "batch_kernels"]}, False, False, False),
        ({"model.dtype": "bfloat16", "model.fp32_head": "trainer"}, True, False, False),
        ({"model.dtype": "bfloat16", "model.fp32_head": "both"}, False, False, False),
    ],
    ids=str,
)
def test_modules_of_the_samplers_own(overrides, own, half, before, learner):
    inference = learner(**overrides).source.inference
    found = (inference.module, inference.half, inference.before)
    assert tuple(module is not None for module in found) == (own, half, before)
    # With nothing left to do they stay unused, or are the plain weights.
    inference.scale(0.0)
    assert all(module is None or module.injectors == [] for module in found)
    assert inference.load(inference.module.module if own else learner().parts.model).half is None


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"delay.minibatches": 2, "optimizer.grad_accum": 2},
        {"delay": "lag", "delay.lag_updates": 2, "delay.via": "weights"},
        {"model.dtype": "bfloat16"},
        {"model.dtype": "bfloat16", "model.fp32_head": "both"},
        {"task.temperature": 0.7},
    ],
    ids=str,
)
def test_on_the_path_of_parity_old_over_mu_is_1_to_the_last_bit(overrides, learner):
    it = learner(mismatch=["parity"], **overrides, **DECAY)
    rows = [it.advance()[1] for _ in range(5)]
    assert rows[-1]["dist_from_start"] > 0.1
    for row in rows:
        assert row["old_mu_ratio_mean"] == row["old_mu_ratio_max"] == 1
        assert row["old_mu_logratio_abs_mean"] == 0
        assert row["kv_stale_frac"] == 0
    cached = learner(**overrides)
    assert cached.advance()[1]["old_mu_logratio_abs_mean"] > 0


def test_parity_of_a_mixture_of_experts_holds_to_rounding(learner):
    it = learner(model="tiny_moe", mismatch=["parity"])
    rows = [it.advance()[1] for _ in range(2)]
    assert all(row["old_mu_logratio_abs_mean"] < 1e-6 for row in rows)
    # Drift is counted against the trainer's own routes; the sampler has none to hand over.
    assert [row["route_drift_frac"] for row in rows] == [0, 0]
    assert [row["expert_flip_frac"] for row in rows] == [None, None]


def test_a_stale_cache_comes_after_the_first_push(learner):
    it = learner(mismatch=["stale_kv"], **{"delay.S": 2}, **DECAY)
    rows = [it.advance()[1] for _ in range(6)]
    assert [row["kv_stale_frac"] for row in rows] == [0, 0, 1, 1, 1, 1]
    assert rows[0]["old_mu_k3_nats"] < 1e-11
    assert min(row["old_mu_k3_nats"] for row in rows[2:]) > 1e-7
    # The store keeps what the cache of the next batch may be filled with, and no more.
    assert sorted(it.source.store.states) == [2, 4]
    batch = it.batch
    assert torch.equal(batch.kv_stale_BT, batch.mask_BT)
