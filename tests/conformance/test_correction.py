"""Laws that every correction of `conf/correction/` keeps, with each of its options, and every ordered pair of them."""

from __future__ import annotations

import dataclasses
import itertools
import math
import typing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from torch.utils._python_dispatch import TorchDispatchMode

from stalefront.batch import BatchError, LossInputs, Weights
from stalefront.cell import make_choice
from stalefront.choice import OptionError
from stalefront.correction import RatioCorrection, chain

CONF = Path(__file__).parents[2] / "conf" / "correction"
STEMS = sorted(path.stem for path in CONF.glob("*.yaml") if path.stem != "none")
# Rules that divide or count what is there already, and do nothing alone.
FOLLOWERS = [stem for stem in STEMS if "anchor" not in OmegaConf.load(CONF / f"{stem}.yaml")]


def make(stem, **fields):
    return make_choice("correction", OmegaConf.to_container(OmegaConf.load(CONF / f"{stem}.yaml")) | fields)


def options(stem):
    """The rule of a file, and one rule for each value that a field lists, the others as in the file."""
    default = make(stem)
    hints = typing.get_type_hints(type(default))
    found = [default]
    for field in dataclasses.fields(default):
        hint, value = hints[field.name], getattr(default, field.name)
        legal = typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else ()
        for other in (legal or (True, False)) if legal or hint is bool else ():
            if other != value:
                found.append(vary(stem, {field.name: other}))
    return found


def vary(stem, fields):
    """With the file's bounds where they are legal: other statistics have other units."""
    for bounds in ({}, {"low": None}):
        try:
            return make(stem, **fields, **bounds)
        except OptionError:
            continue
    return make(stem, **fields, low=-0.3, high=0.3)


RULES = [rule for stem in STEMS for rule in options(stem)]


def label(rule):
    default = make(rule.choice())
    changed = [f for f in dataclasses.fields(rule) if getattr(rule, f.name) != getattr(default, f.name)]
    return "-".join([rule.choice(), *(f"{f.name}={getattr(rule, f.name)}" for f in changed)])


@pytest.fixture(params=RULES, ids=label)
def rule(request):
    return request.param


@pytest.fixture(params=STEMS)
def pairs(request):
    """All ordered pairs that begin with a rule."""
    return [(make(request.param), make(other)) for other in STEMS if other != request.param]


@pytest.fixture(scope="session")
def batch(random_inputs):
    """`batch(spread=2.0)`: `random_inputs` with every optional field filled."""

    def run(**options):
        inputs = random_inputs(**options)
        random = torch.Generator().manual_seed(7)
        shape, dtype = inputs.mask_BT.shape, inputs.logp_theta_BT.dtype
        rows = shape[0]
        return replace(
            inputs,
            reward_B=(inputs.advantage_B > 0).double(),
            group_B=torch.arange(rows) // 2,
            lag_BT=torch.randint(0, 4, shape, generator=random),
            entropy_behav_BT=(torch.rand(shape, generator=random, dtype=torch.float64) * 2).to(dtype),
        )

    return run


@pytest.fixture(scope="session")
def pairs_of():
    """`pairs_of(rule)`: the rule alone and, with the options of its file, after every other one."""

    def run(rule):
        after = STEMS if rule == make(rule.choice()) else []
        return [[rule], *([make(stem), rule] for stem in after if stem != rule.choice())]

    return run


def on_policy(inputs):
    return replace(inputs, logp_old_BT=inputs.logp_theta_BT, logp_behav_BT=inputs.logp_theta_BT)


def test_none_is_the_empty_list(conf_choice, random_inputs):
    assert not conf_choice("correction", "none")
    assert chain([], random_inputs()) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_on_policy_nothing_changes_to_the_last_bit(rule, dtype, batch, make_loss, grade):
    inputs = on_policy(batch(spread=0, dtype=dtype))
    weights = chain([rule], inputs)
    assert weights.weight_BT.dtype == dtype
    assert torch.equal(weights.weight_BT, torch.ones_like(weights.weight_BT))
    assert weights.keep_BT.all()
    assert weights.step_scale == 1
    assert not weights.removed_by_BT.any()
    if dtype != torch.bfloat16:
        loss = make_loss("reinforce", beta=0.1)
        plain, corrected = grade(loss, inputs), grade(loss, inputs, weights=weights)
        assert plain.loss == corrected.loss
        assert torch.equal(plain.grad_BT, corrected.grad_BT)


def test_on_policy_pairs_change_nothing_either(pairs, batch):
    inputs = on_policy(batch(spread=0, dtype=torch.float32))
    for pair in pairs:
        weights = chain(pair, inputs)
        assert torch.equal(weights.weight_BT, torch.ones_like(weights.weight_BT))
        assert weights.keep_BT.all()


def test_it_acts_off_policy(rule, batch):
    inputs = batch(spread=12.0, rows=12)
    # As far from μ to old as from old to θ.
    inputs = replace(inputs, logp_behav_BT=2 * inputs.logp_old_BT - inputs.logp_theta_BT)
    before = [make("token_tis")] if rule.choice() in FOLLOWERS else []
    one, other = chain([*before, rule], inputs), chain(before, inputs) or Weights.ones(inputs)
    changed = (one.weight_BT != other.weight_BT) | (one.keep_BT != other.keep_BT)
    assert changed[inputs.mask_BT].any() or one.step_scale != 1
    assert rule.is_weight or not before
    if not rule.is_weight:
        # A mask may leave a weight or take it, and nothing in between.
        assert ((one.weight_BT == other.weight_BT) | (one.weight_BT == 0)).all()


def test_no_gradient_through_the_weights(rule, batch, make_loss, grade):
    inputs = batch()
    live = replace(inputs, logp_theta_BT=inputs.logp_theta_BT.clone().requires_grad_())
    weights = chain([rule], live)
    assert weights.weight_BT.requires_grad is (not rule.detached)
    # With constant weights the gradient is the weighted one and nothing more.
    loss = make_loss("reinforce")
    corrected = grade(loss, inputs, weights=weights)
    expected = grade(loss, inputs).grad_BT * weights.weight_BT.detach() * weights.keep_BT
    torch.testing.assert_close(corrected.grad_BT, expected, rtol=1e-12, atol=1e-15)


def padded(inputs, junk):
    """The same rows with two columns before and three after, and `junk` wherever nothing was sampled."""
    mask = torch.nn.functional.pad(inputs.mask_BT, (2, 3))
    wide = {}
    for name, value in inputs.tensors().items():
        wide[name] = value
        if name.endswith("_BT"):
            wide[name] = torch.nn.functional.pad(value, (2, 3))
            if value.is_floating_point():
                wide[name] = wide[name].masked_fill(~mask, junk)
    return LossInputs(**wide)


def same(one, other, mask, wide):
    # A wider row may be summed in another order.
    torch.testing.assert_close(other.weight_BT[wide], one.weight_BT[mask], rtol=1e-12, atol=0)
    assert torch.equal(other.keep_BT[wide], one.keep_BT[mask])
    assert torch.isfinite(other.weight_BT).all()


@pytest.mark.parametrize("junk", [0.0, -1e4, math.inf, math.nan])
def test_padding_is_inert(rule, junk, batch):
    inputs = batch(rows=8)
    wide = padded(inputs, junk)
    same(chain([rule], inputs), chain([rule], wide), inputs.mask_BT, wide.mask_BT)


def test_padding_is_inert_for_pairs(pairs, batch):
    inputs = batch(rows=8)
    wide = padded(inputs, math.nan)
    for pair in pairs:
        same(chain(pair, inputs), chain(pair, wide), inputs.mask_BT, wide.mask_BT)


@pytest.mark.parametrize("order", ["rows", "groups"])
def test_order_does_not_matter(rule, order, pairs_of, batch):
    inputs = batch(rows=12, spread=2.0)
    random = torch.Generator().manual_seed(1)
    moved_to = torch.randperm(12, generator=random)
    if order == "groups":
        moved_to = (torch.randperm(6, generator=random)[:, None] * 2 + torch.arange(2)).reshape(-1)
    for rules in pairs_of(rule):
        one, moved = chain(rules, inputs), chain(rules, inputs.rows(moved_to))
        torch.testing.assert_close(moved.weight_BT, one.weight_BT[moved_to], rtol=1e-12, atol=0)
        assert torch.equal(moved.keep_BT, one.keep_BT[moved_to])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shift", [100.0, -100.0, math.inf, -math.inf])
def test_finite_at_extremes(rule, shift, dtype, batch, pairs_of):
    inputs = batch(dtype=dtype)
    theta = inputs.logp_theta_BT
    moved = theta - shift
    old = theta if getattr(rule, "anchor", "") == "old/mu" else moved  # inf − inf is no number
    inputs = replace(inputs, logp_old_BT=old, logp_behav_BT=moved)
    for rules in pairs_of(rule):
        weights = chain(rules, inputs)
        assert math.isfinite(weights.step_scale)
        # What declares itself unbounded may be infinite, and is recorded so; a NaN comes of 0 · inf or inf / inf.
        if not any(r.unbounded for r in rules):
            assert torch.isfinite(weights.weight_BT).all()
            assert (weights.weight_BT >= 0).all()
        elif len(rules) == 1:
            assert not weights.weight_BT.isnan().any()
            assert (weights.weight_BT[weights.keep_BT] > 0).any() or shift < 0


def test_one_extreme_token_among_others(rule, batch):
    # Infinite log-ratios of single tokens, and of both signs in one sequence, where no sum exists.
    inputs = batch(rows=4, width=5)
    behav = inputs.logp_behav_BT.clone()
    full = torch.ones_like(inputs.mask_BT)
    behav[0, 1], behav[1, 2], behav[2, 0], behav[2, 1] = -math.inf, math.inf, -math.inf, math.inf
    inputs = replace(inputs, logp_behav_BT=behav, logp_old_BT=behav, mask_BT=full)
    weights = chain([rule], inputs)
    assert not weights.weight_BT[3].isnan().any() or rule.scope == "batch"
    if not rule.unbounded:
        assert not weights.weight_BT[:2].isinf().any()


def test_a_ratio_that_is_no_number_is_seen(rule, batch):
    if not isinstance(rule, RatioCorrection):
        return
    inputs = batch(rows=6)
    theta = inputs.logp_theta_BT.clone()
    theta[0, 0] = math.nan
    old = inputs.logp_old_BT.clone()
    old[0, 0] = math.nan  # `old/mu` has no θ
    weights = chain([rule], replace(inputs, logp_theta_BT=theta, logp_old_BT=old))
    weight, keep = float(weights.weight_BT[0, 0]), bool(weights.keep_BT[0, 0])
    assert not keep or math.isnan(weight) or weight == 0
    # Other sequences are what they were, unless a rule compares them.
    if rule.scope == "sequence":
        clean = chain([rule], inputs)
        assert torch.equal(weights.weight_BT[1:], clean.weight_BT[1:])
        assert torch.equal(weights.keep_BT[1:], clean.keep_BT[1:])


def test_a_fully_masked_sequence_changes_nothing(rule, batch, pairs_of):
    inputs = batch(rows=6)
    mask = inputs.mask_BT.clone()
    mask[2] = False
    masked = replace(inputs, mask_BT=mask)
    others = torch.tensor([0, 1, 3, 4, 5])
    counts_rows = getattr(rule, "empty", "skip") == "count"
    for rules in pairs_of(rule):
        weights, without = chain(rules, masked), chain(rules, masked.rows(others))
        assert torch.isfinite(weights.weight_BT).all()
        if not counts_rows:
            assert torch.equal(weights.weight_BT[others], without.weight_BT)
        assert torch.equal(weights.keep_BT[others], without.keep_BT)


@pytest.mark.parametrize("shape", [{"rows": 0}, {"width": 0}])
def test_an_empty_batch_is_refused(rule, shape, batch):
    full = batch()
    empty = full.rows(slice(0, 0)) if "rows" in shape else columns(full, 0)
    with pytest.raises(BatchError, match="nothing to weight"):
        chain([rule], empty)


def columns(inputs, count):
    kept = {n: v[:, :count] if n.endswith("_BT") else v for n, v in inputs.tensors().items()}
    return LossInputs(**kept)


class Largest(TorchDispatchMode):
    """Number of entries of the largest tensor that some operation returns."""

    def __init__(self):
        super().__init__()
        self.entries = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, tuple | list) else (out,):
            if isinstance(value, torch.Tensor):
                self.entries = max(self.entries, value.numel())
        return out


def test_memory_is_linear_in_the_tokens(rule, batch):
    inputs = batch(rows=20, width=30)
    with Largest() as largest:
        chain([rule], inputs)
    assert largest.entries <= 2 * inputs.mask_BT.numel()


def test_pure(rule, batch, pairs_of):
    inputs = batch()
    before = {name: value.clone() for name, value in inputs.tensors().items()}
    for rules in pairs_of(rule):
        one, other = chain(rules, inputs), chain(rules, inputs)
        assert torch.equal(one.weight_BT, other.weight_BT)
        assert torch.equal(one.keep_BT, other.keep_BT)
    assert all(torch.equal(value, before[name]) for name, value in inputs.tensors().items())
    # A rule leaves what it was given, too.
    so_far = Weights.ones(inputs)
    rule(inputs, so_far)
    assert torch.equal(so_far.weight_BT, torch.ones_like(so_far.weight_BT))
    assert so_far.keep_BT.all()


def test_a_chain_adds_up_and_says_who_removed_what(pairs, batch):
    inputs = batch(spread=6.0, rows=12)
    for first, second in pairs:
        weights = chain((first, second), inputs)
        after = first(inputs, Weights.ones(inputs))
        step_by_step = second(inputs, after)
        assert torch.equal(weights.weight_BT, step_by_step.weight_BT)
        assert torch.equal(weights.keep_BT, step_by_step.keep_BT)
        assert weights.rules == (first.choice(), second.choice())
        assert torch.equal(weights.removed_by_BT == 0, weights.counts_BT)
        assert torch.equal(weights.removed_by_BT == 1, ~after.counts_BT)
        # Rules that look at the batch alone commute.
        if {first.choice(), second.choice()} & set(FOLLOWERS):
            continue
        turned = chain((second, first), inputs)
        torch.testing.assert_close(turned.weight_BT, weights.weight_BT, rtol=1e-12, atol=0)
        assert torch.equal(turned.keep_BT, weights.keep_BT)


def test_it_declares_itself(rule):
    assert rule.level in ("token", "segment", "sequence", "batch")
    assert rule.looks_at
    assert rule.kept_weight
    assert set(rule.needs) <= {f.name for f in dataclasses.fields(LossInputs)}


@pytest.mark.parametrize("stem", STEMS)
def test_a_second_ratio_is_refused(stem, make_cell):
    if make(stem).is_weight:
        with pytest.raises(OptionError, match=rf"correction(\.{stem}\.anchor|.*never act)"):
            make_cell(loss="grpo", correction=[stem])
    else:
        assert make_cell(loss="grpo", correction=[stem]).correction[0].choice() == stem


@pytest.mark.parametrize("stem", [stem for stem in STEMS if stem not in FOLLOWERS])
@pytest.mark.parametrize(("anchor", "delay"), [("old/mu", "lag"), ("theta/old", "none")])
def test_what_can_never_act_is_refused(stem, anchor, delay, make_cell):
    with pytest.raises(OptionError, match=rf"correction\.{stem}\.anchor"):
        make_cell(loss="reinforce", delay=delay, correction=[stem], **{f"correction.{stem}.anchor": anchor})


@pytest.mark.parametrize("stem", [stem for stem in STEMS if make(stem).scope == "batch"])
@pytest.mark.parametrize("field", ["optimizer.grad_accum", "model.ranks"])
def test_what_compares_rows_needs_the_whole_step(stem, field, make_cell):
    first = ["token_tis"] if stem in FOLLOWERS else []
    with pytest.raises(OptionError, match="must not be split") as caught:
        make_cell(loss="reinforce", correction=[*first, stem], **{field: 2})
    assert caught.value.field == field


# Fields that bound a statistic from above: a larger value keeps more. `low` is the other way round.
UPPER = ("high", "upper", "delta", "tau", "budget")
BOUNDED = [
    (rule, field.name)
    for rule in RULES
    for field in dataclasses.fields(rule)
    if field.name in (*UPPER, "low") and getattr(rule, field.name) is not None
]


def moved(rule, field, share):
    """The bound brought nearer to what both policies agree on, by `share` of the way."""
    value = getattr(rule, field)
    agreed = (
        1.0 if getattr(rule, "statistic", "ratio") in ("ratio", "inverse_ratio") and field in ("low", "high") else 0.0
    )
    return replace(rule, **{field: value + share * (agreed - value)})


@pytest.mark.parametrize(
    ("rule", "field"), BOUNDED, ids=lambda value: value if isinstance(value, str) else label(value)
)
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10**6), spread=st.floats(0.01, 6.0), share=st.floats(0.0, 0.9))
def test_a_tighter_bound_never_keeps_more(batch, rule, field, seed, spread, share):
    inputs = batch(seed=seed, spread=spread, rows=8)
    tight, loose = chain([moved(rule, field, share)], inputs), chain([rule], inputs)
    assert not (tight.counts_BT & ~loose.counts_BT).any()


CAPPED = [rule for rule in RULES if hasattr(rule, "cap")]


@pytest.mark.parametrize("rule", CAPPED, ids=label)
@settings(max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    spread=st.floats(0.01, 6.0),
    caps=st.tuples(st.floats(1.0, 50.0), st.floats(1.0, 50.0)),
    floor=st.floats(0.0, 1.0),
)
def test_weights_grow_with_their_bounds_and_stay_within(batch, rule, seed, spread, caps, floor):
    inputs = batch(seed=seed, spread=spread)
    low, high = sorted(caps)
    small, large, free = (chain([replace(rule, cap=cap)], inputs).weight_BT for cap in (low, high, math.inf))
    assert (small <= large).all()
    assert (large <= free).all()
    assert torch.equal(free.clamp(max=low), small)
    raised = chain([replace(rule, floor=floor, cap=low)], inputs).weight_BT
    assert (raised >= small).all()
    assert ((raised >= floor) & (raised <= low)).all()


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), spread=st.floats(0.01, 6.0))
def test_without_a_cap_tis_is_the_ratio(batch, seed, spread):
    inputs = batch(seed=seed, spread=spread)
    weights = chain([make("token_tis", cap=math.inf)], inputs)
    assert torch.equal(weights.weight_BT, inputs.anchored_BT("theta/mu").exp())


@pytest.mark.parametrize("rule", [r for r in RULES if isinstance(r, RatioCorrection)], ids=label)
@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 10**6), spread=st.floats(0.01, 6.0), limit=st.floats(0.1, 5.0))
def test_a_clamp_is_a_clamp_of_the_log_ratio(batch, rule, seed, spread, limit):
    # All three policies in a line with μ where θ is not, so that every anchor sees the clamped or the clampable ratio.
    if "difference" in (getattr(rule, "statistic", ""),) or rule.choice() == "kpop":
        return  # probabilities are not clamped
    inputs = batch(seed=seed, spread=spread)
    top, bottom = inputs.policies_BT(rule.anchor)
    near = top - (top - bottom).clamp(-limit, limit)
    moved_policy = {"mu": "logp_behav_BT", "old": "logp_old_BT"}[rule.anchor.split("/")[1]]
    one = chain([replace(rule, clamp_nats=limit)], inputs)
    other = chain([rule], replace(inputs, **{moved_policy: near}))
    torch.testing.assert_close(one.weight_BT, other.weight_BT, rtol=1e-9, atol=0)
    assert torch.equal(one.keep_BT, other.keep_BT)


def test_there_are_many_rules_and_options():
    assert len(STEMS) >= 14
    assert len(RULES) >= 60
    assert len(list(itertools.permutations(STEMS, 2))) == sum(len(STEMS) - 1 for _ in STEMS)
