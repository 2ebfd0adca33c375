"""The loop as a whole: determinism, accumulation, the horizon, and what non-finite weights do."""

import math
import weakref

import pytest
import torch

from stalefront.advantage import group_advantages
from stalefront.batch import Weights
from stalefront.build import build
from stalefront.choice import OptionError
from stalefront.inert import can_clip
from stalefront.loop import Learner
from stalefront.record import NAMES
from stalefront.session import Session

ALWAYS_NULL = {"weight_mean", "weight_min", "weight_ess_frac", "mask_frac"}
OF_ROUTES = {
    *("expert_flip_frac", "expert_flip_token_frac", "route_fallback_frac"),
    *("route_drift_frac", "replay_gap_k3_nats"),
}
OF_MISMATCH = {"misaligned_frac", "mismatch_factor", "mismatch_kl_nats"}
CONTROLLERS = ("vcpo", "gac", "optimizer_reset", "update_cap", "cosine_trigger")


def test_the_same_cell_gives_the_same_records(make_cell, run_in, tmp_path, numbers):
    cell = make_cell(steps=12)
    first, second = (run_in(tmp_path / name, cell) for name in ("a", "b"))
    assert numbers(first.rows) == numbers(second.rows)


def test_another_seed_gives_others(make_cell, completed, numbers):
    one, other = (completed(make_cell(seed=seed, **WARM)) for seed in (0, 1))
    assert numbers(one)[1:] != numbers(other)[1:]


def test_every_column_is_filled(make_cell, completed):
    rows = completed(make_cell())
    assert set(rows[0]) == set(NAMES)
    last = rows[-1]
    of_controllers = {name for name in NAMES if name.startswith(tuple(f"{choice}_" for choice in CONTROLLERS))}
    assert {name for name in NAMES if last[name] is None} == ALWAYS_NULL | of_controllers | OF_ROUTES | OF_MISMATCH
    options = {"controller": list(CONTROLLERS), "controller.gac.high": 2.0, "mismatch.target_kl": 1e-3}
    routed = {"model": "tiny_moe", "replay": "r3", "replay.probe_every": 1}
    options |= {"model.warmup.steps": 200, "model.warmup.batch_size": 64}
    entries = {"mismatch": ["retokenise", "logit_noise"], "loss": "reinforce"}
    corrected = completed(make_cell(correction=["token_tis"], **options, **routed, **entries))
    first = {"mismatch_factor", "mismatch_kl_nats"}
    assert {name for name in NAMES if corrected[-1][name] is None} == first
    assert all(corrected[0][name] is not None for name in first)


def test_validation_at_start_every_so_often_and_at_the_end(make_cell, completed):
    rows = completed(make_cell(steps=10))
    assert [r["step"] for r in rows if r["reward_val"] is not None] == [0, 4, 8, 10]
    assert all(r["reward_val_n"] == 16 for r in rows if r["reward_val"] is not None)


@pytest.mark.parametrize("loss", ["grpo", "dapo", "dr_grpo", "gspo", "cispo"])
def test_accumulated_gradients_are_the_whole_batchs(make_cell, completed, loss):
    # Rounding differs from the first step on, and sampling turns it into another token sooner or later, so only
    # steps on the first batch are compared.
    cell = {"steps": 4, "loss": loss, "loss.beta": 0.04, "optimizer.warmup_steps": 0}
    whole = completed(make_cell(**cell))
    parts = completed(make_cell(**cell, **{"optimizer.grad_accum": 4}))
    for a, b in zip(whole[1:], parts[1:], strict=True):
        for name in ("loss", "grad_norm_raw", "update_norm", "entropy_nats", "kl_ref_k3_nats", "ess_seq_frac"):
            assert a[name] == pytest.approx(b[name], rel=1e-3, abs=1e-6), name
        assert a["tokens"] == b["tokens"]
        assert a["version"] == b["version"] == a["step"]


def test_on_policy_cosines_and_distances_hang_together(make_cell, completed):
    rows = completed(make_cell(delay="none", optimizer="sgd", **{"optimizer.warmup_steps": 0, "optimizer.lr": 1e-3}))[
        1:
    ]
    assert rows[0]["cos_grad"] is None
    for row in rows[1:]:
        # Plain SGD: the update is the applied gradient times the rate.
        assert row["cos_update"] == pytest.approx(row["cos_grad"], abs=1e-3)
        assert row["update_norm"] == pytest.approx(row["lr_applied"] * row["grad_norm_applied"], rel=1e-3)
    assert rows[0]["dist_from_start"] == pytest.approx(rows[0]["update_norm"])
    walked = sum(r["update_norm"] for r in rows)
    assert rows[-1]["dist_from_start"] <= walked


def test_weights_that_are_gone_end_the_run_and_are_recorded(make_cell, run_in, tmp_path):
    cell = make_cell(optimizer="sgd", steps=20, **{"optimizer.lr": 1e38, "optimizer.max_grad_norm": None})
    ran = run_in(tmp_path, cell)
    assert ran.outcome["state"] == "non-finite"
    assert ran.outcome["reason"] == "parameters are not finite"
    last = ran.rows[-1]
    assert last["step"] == ran.outcome["last_step"] < 20
    assert not math.isfinite(last["dist_from_start"])


def test_an_exception_becomes_a_failed_outcome(make_cell, run_in, tmp_path, monkeypatch):
    monkeypatch.setattr("stalefront.loop.Learner.advance", lambda self: 1 / 0)
    ran = run_in(tmp_path, make_cell())
    assert ran.outcome["state"] == "failed"
    assert ran.outcome["reason"] == "ZeroDivisionError: division by zero"
    assert "Traceback" in ran.outcome["error"]


def test_the_outcome_says_what_computed_it(make_cell, run_in, tmp_path):
    outcome = run_in(tmp_path, make_cell()).outcome
    assert outcome["wall_s"] > 0
    assert outcome["cpu_s"] > 0
    assert outcome["peak_rss_bytes"] > 50 * 2**20
    assert set(outcome["versions"]) == {"python", "torch", "transformers", "trl", "stalefront"}
    assert outcome["attempt"] == 1
    assert outcome["resumed_from_step"] == 0


@pytest.mark.parametrize("keep", [True, False])
def test_a_finished_cells_checkpoint_is_kept_only_when_asked_for(keep, make_cell, run_in, tmp_path):
    ran = run_in(tmp_path, make_cell(), checkpoint_every=5, keep_checkpoint=keep)
    assert ran.outcome["state"] == "completed"
    assert ran.paths.checkpoint.exists() == keep


WARM = {"model.warmup.steps": 200, "model.warmup.batch_size": 64, "optimizer.warmup_steps": 0, "steps": 4}
MASKED = {
    **{"correction": ["token_mask"], "correction.token_mask.low": 0.99, "correction.token_mask.high": 1.01},
    **{"reduction": "token_mean", "optimizer.lr": 5e-3},
}


def test_rejected_tokens_count_in_the_denominator_or_not(make_cell, completed):
    valid = completed(make_cell(**WARM, **MASKED))[1:]
    kept = completed(make_cell(**WARM, **MASKED, **{"reduction.denominator": "kept"}))[1:]
    # Nothing is rejected on policy, so that both begin the second step with the same weights.
    assert valid[0]["loss"] == kept[0]["loss"]
    share = valid[1]["tokens_kept_frac"]
    assert 0 < share < 1
    assert kept[1]["tokens_kept_frac"] == share
    assert kept[1]["grad_norm_raw"] == pytest.approx(valid[1]["grad_norm_raw"] / share, rel=1e-4)


def test_baselines_without_rejected_sequences(make_cell, cache_dir):
    cell = make_cell(**WARM, **MASKED, **{"reduction.advantages_over": "kept"})
    learner = Learner(cell, build(cell, cache_dir))
    batch = learner.source.take(0)
    inputs, _ = learner._inputs(batch, learner._advantages(batch.reward_B).advantage_B)
    weights = Weights.ones(inputs)
    assert torch.equal(learner._over_kept(inputs, weights).advantage_B, inputs.advantage_B)
    assert learner._over_kept(inputs, None) is inputs
    keep_B = torch.arange(64) % 3 > 0
    got = learner._over_kept(inputs, weights.keeping(keep_B[:, None])).advantage_B
    expected = group_advantages(batch.reward_B, num_generations=8, scale_rewards="group", keep_B=keep_B)
    assert torch.equal(got, expected.advantage_B)
    # A sequence that lost one token alone is still in the baseline.
    first = torch.zeros_like(inputs.mask_BT)
    first[torch.arange(64), inputs.mask_BT.float().argmax(-1)] = True
    long_B = inputs.mask_BT.sum(-1) > 1
    got = learner._over_kept(inputs, weights.keeping(~first | ~long_B[:, None])).advantage_B
    assert torch.equal(got, inputs.advantage_B)


@pytest.mark.parametrize(
    "overrides",
    [
        {"reduction.denominator": "kept", "correction": ["token_mask"]},
        {"reduction.advantages_over": "kept", "correction": ["token_mask"]},
        {"loss": "m2po"},
    ],
)
@pytest.mark.parametrize("split", ["optimizer.grad_accum", "model.ranks"])
def test_what_needs_a_whole_step_is_not_split(overrides, split, make_cell):
    make_cell(**overrides)
    with pytest.raises(OptionError, match="must not be split") as caught:
        make_cell(**overrides, **{split: 2})
    assert caught.value.field == split


def test_a_control_that_never_acts_is_named(make_cell, run_in, tmp_path):
    options = {**WARM, "steps": 16, "delay": "none", "controller": ["vcpo", "optimizer_reset"]}
    cell = make_cell(**options, correction=["token_mask"], **{"controller.vcpo.base": 1e-6})
    never = run_in(tmp_path / "never", cell, checkpoint_every=5)
    names = ["loss.grpo", "correction.token_mask", "controller.vcpo"]
    assert never.outcome["warnings"] == [f"inert: {names}"]
    # After a continuation, which saw little of it.
    never.paths.outcome.unlink()
    again = run_in(tmp_path / "never", cell, checkpoint_every=5, attempt=2)
    assert again.outcome["resumed_from_step"] == 15
    assert again.outcome["warnings"] == never.outcome["warnings"]
    short = run_in(tmp_path / "short", make_cell(**options | {"steps": 15}))
    assert short.outcome["warnings"] == []


def test_controls_that_act_are_not_named(make_cell, run_in, tmp_path):
    options = {**WARM, **MASKED, "steps": 16, "controller": ["update_cap"], "controller.update_cap.cap": 1e-3}
    assert run_in(tmp_path, make_cell(**options, **{"loss.epsilon": 1e-4})).outcome["warnings"] == []


@pytest.mark.parametrize(
    ("name", "clips"), [("grpo", True), ("gspo", True), ("cispo", True), ("reinforce", False), ("dr_grpo", True)]
)
def test_which_losses_have_a_clip(name, clips, make_loss):
    assert can_clip(make_loss(name)) == clips


def test_a_clip_of_infinite_width_is_none(make_loss):
    assert not can_clip(make_loss("grpo", epsilon=math.inf, epsilon_high=math.inf))


def test_a_continued_run_lets_go_of_what_it_loaded(make_cell, run_in, tmp_path, monkeypatch):
    cell = make_cell(steps=10, **{"model.warmup.steps": 20})
    run_in(tmp_path, cell, checkpoint_every=5).paths.outcome.unlink()
    kept = []
    load, advance = Session.load_checkpoint, Learner.advance

    class State(dict):
        """A mapping that can be watched."""

    def watched(self):
        state = State(load(self) or {})
        kept.append(weakref.ref(state))
        return state

    def checked(self):
        assert kept[0]() is None
        return advance(self)

    monkeypatch.setattr(Session, "load_checkpoint", watched)
    monkeypatch.setattr(Learner, "advance", checked)
    ran = run_in(tmp_path, make_cell(steps=12, **{"model.warmup.steps": 20}), checkpoint_every=100, attempt=2)
    assert ran.outcome["state"] == "completed", ran.outcome["error"]
    assert ran.outcome["resumed_from_step"] == 10
    assert kept[0]() is None
