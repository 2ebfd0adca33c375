"""Laws that every entry of `conf/mismatch/` keeps, with each of its options: what it may change, and how much of it."""

from __future__ import annotations

import functools
import math
import typing
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from omegaconf import OmegaConf
from torch.distributions import Categorical, kl_divergence

from stalefront.build import build
from stalefront.cell import make_choice
from stalefront.choice import OptionError, _field_types
from stalefront.inference import Place
from stalefront.keys import uniforms_BT
from stalefront.loop import Learner
from stalefront.mismatch import HalfPath, Logging
from stalefront.policy import completion_logits, token_logps
from stalefront.routing import RoutingError
from stalefront.setup import trainer_copy

CONF = Path(__file__).parents[2] / "conf" / "mismatch"
STEMS = sorted(path.stem for path in CONF.glob("*.yaml") if path.stem != "none")
SMALL = {
    **{"model.warmup.steps": 40, "model.warmup.batch_size": 16},
    **{"task.num_prompts": 4, "task.num_generations": 4, "validation.every": 2},
}
# 128 rows at a time: few forwards for many tokens.
MANY = {"task.num_prompts": 64, "task.num_generations": 2}


def config(stem):
    return OmegaConf.to_container(OmegaConf.load(CONF / f"{stem}.yaml"))


def make(stem, **fields):
    return make_choice("mismatch", config(stem) | fields)


def options(stem):
    """The fields of a file, and for each value that a field lists the one that differs in it."""
    yield {}
    for name, hint in _field_types(type(make(stem))).items():
        legal = typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else ()
        for value in legal or ((True, False) if hint is bool else ()):
            if value != config(stem)[name]:
                yield {name: value}


class Case(NamedTuple):
    """An entry, and how its options differ from those of its file."""

    stem: str
    fields: dict

    @property
    def entry(self):
        return make(self.stem, **self.fields)

    def overrides(self, **more):
        named = {f"mismatch.{self.stem}.{name}": value for name, value in (self.fields | more).items()}
        routed = self.entry.needs_experts or self.fields.get("activations") or self.fields.get("dynamic")
        return {"mismatch": [self.stem], **named, **({"model": "tiny_moe"} if routed else {})}


def label(case):
    return "-".join([case.stem, *(f"{name}={value}" for name, value in case.fields.items())])


# A head in float32 is no other one here.
CASES = [Case(stem, o) for stem in STEMS for o in options(stem) if o.get("dtype") != "float32"]
BY_LABEL = {label(case): case for case in CASES}
# Parity has one strength, and a mask is kept of a whole cut alone.
SCALABLE = [case for case in CASES if case.stem != "parity" and not case.fields.get("keep_mask")]
# Before the first update there is nothing stale to measure a KL on.
MEASURABLE = [case for case in SCALABLE if case.stem != "stale_kv"]


@pytest.fixture(scope="session")
def learner(make_cell, cache_dir):
    """`learner(**overrides)`: a small cell, built and not started."""

    def run(**overrides):
        cell = make_cell(**SMALL | overrides)
        return Learner(cell, build(cell, cache_dir))

    return run


@pytest.fixture(scope="module")
def sampler(learner):
    """`sampler(label)`: a cell of which only rollouts are drawn, built once."""
    return functools.cache(lambda name: learner(**BY_LABEL[name].overrides()))


class Drawn(NamedTuple):
    """What was sampled, and the log-probs (B, C, V) it was drawn from."""

    samples: typing.Any
    logp_BCV: torch.Tensor

    @property
    def tokens_BC(self):
        return self.samples.tokens_BT[:, -self.logp_BCV.shape[1] :]

    @property
    def mask_BC(self):
        return self.samples.mask_BT[:, -self.logp_BCV.shape[1] :]

    @property
    def written_BC(self):
        return self.samples.logp_behav_BT[:, -self.logp_BCV.shape[1] :]


def draw(learner, prompts=slice(None), batch=1, before=None):
    """A rollout of some of a batch's prompts, as it is sampled and not yet handed over."""
    cell, parts, inference = learner.cell, learner.parts, learner.source.inference
    padded = parts.sampler.pad(cell.task.encode(cell.task.train_rows(0, batch), parts.tokenizer), parts.device)
    first_row = (prompts.start or 0) * cell.task.num_generations
    seen = []
    samples = parts.sampler.sample(
        inference.load(parts.model, None if before is None else inference.load_before(before)),
        padded.rows(prompts),
        num_generations=cell.task.num_generations,
        **Place(cell.seed, "rollout", batch, first_row)._asdict(),
        inference=inference,
        watch=seen.append,
    )
    return Drawn(samples, torch.stack(seen, 1))


@torch.no_grad()
def stir(model, seed):
    random = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter += 0.02 * torch.randn(parameter.shape, generator=random)


def older(learner):
    """The weights of before, as a stale cache would hold them."""
    model = trainer_copy(learner.parts.model, learner.cell.model)
    stir(model, 0)
    return model


def trainer_BCV(learner, samples, columns):
    """Log-probs of the trainer's own forward."""
    first = samples.tokens_BT.shape[1] - columns
    with torch.no_grad():
        logits = completion_logits(learner.parts.model, samples.tokens_BT, samples.position_BT, first=first)
    return torch.log_softmax(logits / learner.cell.task.temperature, -1)


def records(learner, steps=3):
    """Records of steps between which weights move, as they would if the policy earned anything."""
    found = [learner.start_row()]
    for seed in range(steps):
        found.append(learner.advance()[1])
        stir(learner.parts.model, seed)
    return found


@pytest.fixture(scope="module")
def plain_records(learner):
    """Records without any mismatch, by model."""
    return {model: records(learner(model=model)) for model in ("tiny", "tiny_moe")}


def test_none_is_the_empty_list(conf_choice):
    assert not conf_choice("mismatch", "none")


@pytest.mark.parametrize("case", SCALABLE, ids=label)
def test_strength_0_changes_no_bit(case, learner, plain_records, numbers):
    overrides = case.overrides(strength=0.0)
    plain = plain_records[overrides.get("model", "tiny")]
    found = records(learner(**overrides))
    assert numbers([{k: row.get(k) for k in one} for row, one in zip(found, plain, strict=True)]) == numbers(plain)


@pytest.mark.parametrize("stem", [case.stem for case in MEASURABLE if not case.fields])
def test_no_kl_changes_no_bit(stem, learner, plain_records, numbers):
    overrides = Case(stem, {}).overrides() | {"mismatch.target_kl": 0.0}
    plain = plain_records[overrides.get("model", "tiny")]
    found = records(learner(**overrides))
    assert (found[0]["mismatch_factor"], found[0]["mismatch_kl_nats"]) == (0.0, 0.0)
    assert numbers([{k: row.get(k) for k in one} for row, one in zip(found, plain, strict=True)]) == numbers(plain)


@pytest.mark.parametrize("case", CASES, ids=label)
def test_tokens_come_from_a_distribution_whose_log_probs_are_written_down(case, sampler):
    made = sampler(label(case))
    drawn = draw(made, before=older(made))
    probability = drawn.logp_BCV.double().exp()
    torch.testing.assert_close(probability.sum(-1), torch.ones_like(probability[..., 0]), rtol=0, atol=1e-6)
    rows, columns = drawn.tokens_BC.shape
    uniform_BC = torch.from_numpy(uniforms_BT(0, "rollout", 1, rows, 6))[:, :columns, None]
    total_BCV = probability.cumsum(-1)
    found_BC = (total_BCV <= uniform_BC * total_BCV[..., -1:]).sum(-1)
    assert torch.equal(found_BC[drawn.mask_BC], drawn.tokens_BC[drawn.mask_BC])
    own_BC = drawn.logp_BCV.gather(-1, drawn.tokens_BC[..., None]).squeeze(-1)[drawn.mask_BC]
    written, theirs_BCV = drawn.written_BC[drawn.mask_BC], trainer_BCV(made, drawn.samples, columns)
    theirs = theirs_BCV.gather(-1, drawn.tokens_BC[..., None]).squeeze(-1)[drawn.mask_BC]
    if isinstance(case.entry, Logging):
        torch.testing.assert_close(own_BC, theirs, rtol=0, atol=1e-5)
        assert (written != own_BC).all()
    elif case.fields.get("logged") == "raw":
        torch.testing.assert_close(written, theirs, rtol=0, atol=1e-5)
        assert ((written - own_BC).abs() > 1e-4).any()
    else:
        assert torch.equal(written, own_BC)


# Parity runs the learner's own slices, whole batches and no others.
@pytest.mark.parametrize("case", [case for case in CASES if case.stem != "parity"], ids=label)
def test_rows_do_not_depend_on_what_else_is_sampled(case, sampler):
    made = sampler(label(case))
    before = older(made)
    whole = draw(made, before=before)
    for prompts, rows in ((slice(0, 2), slice(0, 8)), (slice(2, 4), slice(8, 16))):
        part = draw(made, prompts, before=before)
        if isinstance(case.entry, HalfPath):  # another shape, other roundings, and so now and then another token
            torch.testing.assert_close(part.logp_BCV[:, 0], whole.logp_BCV[rows, 0], rtol=0, atol=0.05)
            continue
        columns = part.tokens_BC.shape[1]
        mask_BC = part.mask_BC
        assert torch.equal(mask_BC, whole.mask_BC[rows, :columns])
        assert torch.equal(part.tokens_BC[mask_BC], whole.tokens_BC[rows, :columns][mask_BC])
        torch.testing.assert_close(
            part.written_BC[mask_BC], whole.written_BC[rows, :columns][mask_BC], rtol=0, atol=2e-5
        )
        if whole.samples.routes_LBTK is not None:
            width = part.samples.tokens_BT.shape[1] - 1
            assert torch.equal(part.samples.routes_LBTK[:, :, :width], whole.samples.routes_LBTK[:, rows, :width])


def same_rollout(one, other):
    names = ("tokens_BT", "logp_behav_BT")
    return all(torch.equal(getattr(one.samples, name), getattr(other.samples, name)) for name in names)


@pytest.mark.parametrize("stem", STEMS)
def test_the_seed_and_the_batch_say_it_all(stem, learner, sampler):
    case, made = Case(stem, {}), sampler(stem)
    second, other = (learner(**case.overrides(), seed=seed) for seed in (0, 1))
    before = older(made)
    one, another = draw(made, before=before), draw(made, batch=2, before=before)
    # In another process, and with another batch in between.
    for again in (draw(second, before=older(second)), draw(made, before=before)):
        assert same_rollout(again, one)
        assert torch.equal(again.logp_BCV, one.logp_BCV)
    for different in (draw(other, before=older(other)), another):
        assert not torch.equal(different.samples.tokens_BT, one.samples.tokens_BT)


def kl_of_batch(learner, batch):
    """Mean of the exact KL(μ ‖ π) over places, or of K3 where only the log differs from the trainer's numbers."""
    drawn = draw(learner, batch=batch)
    theirs = trainer_BCV(learner, drawn.samples, drawn.logp_BCV.shape[1])
    if any(isinstance(entry, Logging) for entry in learner.cell.mismatch):
        theirs = theirs.gather(-1, drawn.tokens_BC[..., None]).squeeze(-1)
        log_ratio = (theirs - drawn.written_BC)[drawn.mask_BC].double()
        return float((log_ratio.exp() - 1 - log_ratio).mean())
    sampler, trainer = (Categorical(logits=logp[drawn.mask_BC].double()) for logp in (drawn.logp_BCV, theirs))
    return float(kl_divergence(sampler, trainer).mean())


# Text of a character tokenizer comes back as it was, and which kernels depend on the number of rows is the machine's
# affair. Routers of 8 small experts reach less than the others.
ALIKE = ("batch_kernels", "retokenise")


@pytest.mark.parametrize("stem", [case.stem for case in MEASURABLE if not case.fields and case.stem not in ALIKE])
def test_the_size_asked_for_is_the_size_injected(stem, learner):
    target = 1e-3 if make(stem).needs_experts else 1e-2
    made = learner(**MANY | Case(stem, {}).overrides(), **{"mismatch.target_kl": target})
    found = made.start_row()
    assert found["mismatch_kl_nats"] == pytest.approx(target, rel=0.05)
    assert made.source.inference.factor == found["mismatch_factor"]
    kl = torch.tensor([kl_of_batch(made, batch) for batch in range(11, 17)], dtype=torch.float64)
    # The factor was found on one batch of this size.
    error = float(kl.std()) * math.sqrt(1 + 1 / len(kl))
    # A few flips have a large share in the KL of a batch.
    assert error < target / (2 if make(stem).needs_experts else 5)
    assert abs(float(kl.mean()) - found["mismatch_kl_nats"]) < 4 * error


def test_a_size_out_of_reach_is_refused_with_what_was_reached(learner):
    with pytest.raises(OptionError, match=r"closest is .* nats at 1 times") as error:
        learner(mismatch=["retokenise"], **{"mismatch.target_kl": 1e-2}).start_row()
    assert error.value.field == "mismatch.target_kl"
    # A tenth of the decisions becomes all of them at 10 times the strength, and no more than all.
    with pytest.raises(OptionError, match=r"nats at .* times") as error:
        learner(**MANY | Case("expert_flips", {}).overrides(), **{"mismatch.target_kl": 1.0}).start_row()
    assert float(str(error.value).split(" nats at ")[1].split()[0]) <= 10


@pytest.fixture(scope="module")
def plain_numbers(learner):
    """What a trainer without mismatch computes, by model: tokens, its log-probs with their gradient, a reward."""

    def run(model):
        made = learner(model=model)
        return numbers_of(made, draw(made).samples)

    return functools.cache(run)


def numbers_of(learner, samples):
    inputs = (samples.tokens_BT, samples.position_BT, samples.mask_BT)
    model = learner.parts.model
    found = token_logps(model, *inputs, temperature=1.0)
    gradient = torch.autograd.grad(found.logp_BT.sum(), model.lm_head.weight)[0]
    reward, experts = learner.validation(0)["reward_val"], model.config._experts_implementation
    return samples, (found.logp_BT.detach(), found.entropy_BT, gradient), (reward, experts)


@pytest.mark.parametrize("case", CASES, ids=label)
def test_the_trainer_computes_what_it_did(case, learner, plain_numbers):
    overrides = case.overrides()
    samples, tensors, others = plain_numbers(overrides.get("model", "tiny"))
    made = learner(**overrides)
    before = {name: value.clone() for name, value in made.parts.model.state_dict().items()}
    made.source.take(0)
    _, found, rest = numbers_of(made, samples)
    assert all(torch.equal(one, other) for one, other in zip(found, tensors, strict=True))
    assert rest == others
    assert all(torch.equal(value, before[name]) for name, value in made.parts.model.state_dict().items())


@pytest.mark.parametrize("case", [case for case in CASES if case.stem not in (*ALIKE, "parity")], ids=label)
def test_it_acts(case, sampler, learner):
    made = sampler(label(case))
    one, other = draw(learner(model=case.overrides().get("model", "tiny"))), draw(made, before=older(made))
    logs = isinstance(case.entry, Logging)
    before, after = ((d.written_BC if logs else d.logp_BCV)[:, 0] for d in (one, other))
    assert not torch.allclose(before, after, rtol=0, atol=1e-6)


@pytest.mark.parametrize("stem", STEMS)
@pytest.mark.parametrize("strength", [-1.0, math.nan, math.inf])
def test_a_strength_that_is_none_is_refused(stem, strength):
    with pytest.raises(OptionError, match="finite number of at least 0") as error:
        make(stem, strength=strength)
    assert error.value.field == f"mismatch.{stem}.strength"


@pytest.mark.parametrize("stem", [stem for stem in STEMS if make(stem).largest < math.inf])
def test_a_strength_beyond_the_largest_is_refused(stem):
    largest = make(stem).largest
    assert make(stem, strength=largest).strength == largest
    with pytest.raises(OptionError, match=f"at most {largest:g}") as error:
        make(stem, strength=1.01 * largest)
    assert error.value.field == f"mismatch.{stem}.strength"
    assert make(stem).scaled(1e6).strength == largest


@pytest.mark.parametrize("stem", [stem for stem in STEMS if stem != "parity"])
def test_scaling_multiplies_the_strength_alone(stem):
    entry = make(stem, strength=0.5)
    assert entry.scaled(0.5) == make(stem, strength=0.25)
    assert entry.scaled(0.0).strength == 0.0


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        ({"mismatch": ["bf16", "fp16"]}, "mismatch"),
        ({"mismatch": ["bf16", "batch_kernels"]}, "mismatch"),
        ({"mismatch": ["batch_kernels", "stale_kv"]}, "mismatch"),
        ({"mismatch": ["fp8", "parity"]}, "mismatch"),
        ({"mismatch": ["parity", "logp_noise"]}, "mismatch"),
        ({"mismatch": [], "mismatch.target_kl": 1e-3}, "mismatch.target_kl"),
        ({"mismatch": ["fp8"], "mismatch.fp8.strength": 0.0, "mismatch.target_kl": 1e-3}, "mismatch.target_kl"),
        ({"mismatch": ["fp8"], "mismatch.target_kl": -1e-3}, "mismatch.target_kl"),
        ({"mismatch": ["fp8"], "mismatch.target_kl": math.nan}, "mismatch.target_kl"),
        ({"mismatch": ["parity"], "mismatch.target_kl": 1e-3}, "mismatch.target_kl"),
        ({"mismatch": ["fp8", "stale_kv"], "mismatch.target_kl": 1e-3}, "mismatch.target_kl"),
        ({"mismatch": ["bf16"], "model.dtype": "bfloat16"}, "mismatch"),
        ({"mismatch": ["bf16_weights"], "model.dtype": "bfloat16"}, "mismatch"),
        ({"mismatch": ["fp16"], "model.dtype": "float16"}, "mismatch"),
        ({"mismatch": ["lm_head"], "mismatch.lm_head.dtype": "float32"}, "mismatch.lm_head.dtype"),
    ],
)
def test_what_cannot_be_combined_is_refused(overrides, field, make_cell):
    with pytest.raises(OptionError) as error:
        make_cell(**overrides)
    assert error.value.field == field


def test_an_entry_on_routers_never_passes_for_one_on_a_dense_model(learner):
    with pytest.raises(RoutingError, match="it is dense"):
        learner(mismatch=["router_noise"]).source.take(0)


def test_entries_act_in_their_order(learner):
    # A cut after the temperature keeps more words than one before it.
    flat = {"mismatch.temperature.temperature": 4.0, "mismatch.top_p.p": 0.5}
    kept = []
    for order in (["temperature", "top_p"], ["top_p", "temperature"]):
        made = learner(mismatch=order, **flat)
        drawn = draw(made)
        logits = trainer_BCV(made, drawn.samples, drawn.logp_BCV.shape[1])[:, 0]
        expected = cut(logits / 4, 0.5) if order[0] == "temperature" else cut(logits, 0.5) / 4
        torch.testing.assert_close(drawn.logp_BCV[:, 0], torch.log_softmax(expected, -1), rtol=0, atol=1e-5)
        kept.append(int(drawn.logp_BCV[:, 0].isfinite().sum()))
    assert kept[0] > kept[1]


def cut(logits_BV, p):
    """Nucleus sampling, row by row."""
    out = torch.full_like(logits_BV, -math.inf)
    for row, logits in zip(out, logits_BV, strict=True):
        mass = 0.0
        for word in logits.argsort(descending=True).tolist():
            if mass < p:
                row[word] = logits[word]
            mass += float(logits.softmax(-1)[word])
    return out


def test_a_kept_mask_is_kept_whatever_comes_after_it(learner):
    # The words that both cuts leave, also where a temperature after them keeps no mask.
    fields = {"mismatch.top_p.keep_mask": True, "mismatch.top_k.keep_mask": True}
    fields |= {"mismatch.top_k.k": 6, "mismatch.top_p.p": 0.7}
    cuts, more = (
        learner(mismatch=names, **fields).source.take(0)
        for names in (["top_p", "top_k"], ["top_p", "top_k", "temperature"])
    )
    torch.testing.assert_close(cuts.logp_old_BT, cuts.logp_behav_BT, rtol=0, atol=1e-5)
    first = int(cuts.mask_BT.any(0).float().argmax())
    one, other = (batch.support_BTK[:, first] for batch in (cuts, more))
    assert [[i for i in row if i >= 0] for row in one.tolist()] == [
        [i for i in row if i >= 0] for row in other.tolist()
    ]
    allowed = (cuts.support_BTK >= 0).sum(-1)[cuts.mask_BT]
    assert allowed.min() < 6
    assert allowed.max() == 6
