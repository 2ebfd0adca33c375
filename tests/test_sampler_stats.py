"""How a rollout batch was sampled: hand values, expectations over real draws, and routes that are not known."""

import math

import pytest
import torch

from stalefront.batch import RolloutBatch
from stalefront.record import FAMILIES, NAMES
from stalefront.sampler_stats import fed_BT, sampler_columns
from stalefront.stats import TAIL


def rollout(logp_old, mask=None, *, prompt=0, **known):
    """A batch of rows of `prompt` prompt tokens and completions with these log-probs."""
    old_BT = torch.tensor(logp_old, dtype=torch.float32)
    mask_BT = torch.ones_like(old_BT, dtype=torch.bool) if mask is None else torch.tensor(mask)
    rows, width = old_BT.shape[0], old_BT.shape[1] + prompt
    pad = (prompt, 0)
    old_BT, mask_BT = torch.nn.functional.pad(old_BT, pad), torch.nn.functional.pad(mask_BT, pad)
    zero_B = torch.zeros(rows, dtype=torch.int64)
    fields = {
        "tokens_BT": torch.zeros(rows, width, dtype=torch.int64),
        "position_BT": torch.arange(width).expand(rows, width),
        "mask_BT": mask_BT,
        "kv_stale_BT": torch.zeros_like(mask_BT),
        "logp_behav_BT": old_BT,
        "logp_old_BT": old_BT,
        "logp_ref_BT": old_BT,
        "version_BT": torch.where(mask_BT, 0, -1),
        "reward_B": torch.zeros(rows, dtype=torch.float64),
        "group_B": zero_B,
        "truncated_B": zero_B.bool(),
        "scheduled_version_B": zero_B,
        "started_version_B": zero_B,
        "finished_version_B": zero_B,
        "routes_LBTK": None,
        "index": 1,
    }
    return RolloutBatch(**fields | known)


def test_surprisal_gap_by_hand():
    batch = rollout([[-1.0, -3.0, -9.0]], [[True, True, False]], entropy_behav_BT=torch.tensor([[1.5, 1.5, 7.0]]))
    got = sampler_columns(batch)
    # x = −.5 and 1.5.
    assert got["surprisal_gap_nats"] == pytest.approx(0.5)
    assert got["surprisal_gap_se_nats"] == pytest.approx(1 / math.sqrt(2))


def drawn(temperature, *, n=40_000, top=None):
    """Tokens of n random distributions, drawn at a temperature or from the `top` likeliest alone, logged raw.

    Returns the batch and the gap to expect: mean over the distributions of Σ_a μ(a) (−log old(a)) − entropy.
    """
    random = torch.Generator().manual_seed(5)
    logp = torch.log_softmax(2 * torch.randn(n, 50, generator=random), -1)
    mu = torch.log_softmax(logp / temperature, -1).exp()
    if top is not None:
        mu = mu.where(logp >= logp.topk(top, -1).values[:, -1:], 0.0)
    mu = mu / mu.sum(-1, keepdim=True)
    token = torch.multinomial(mu, 1, generator=random)
    p = logp.exp()
    batch = rollout(
        logp.gather(-1, token).T.tolist(),
        entropy_behav_BT=torch.special.entr(p).sum(-1)[None],
        tail_mass_BT=p.where(p < TAIL, 0.0).sum(-1)[None],
    )
    return batch, float(((p - mu) * logp).sum(-1).mean())


def test_tokens_of_old_are_as_surprising_as_its_entropy_says():
    batch, expected = drawn(1.0)
    got = sampler_columns(batch)
    assert expected == pytest.approx(0.0, abs=1e-6)
    assert abs(got["surprisal_gap_nats"]) < 4 * got["surprisal_gap_se_nats"]
    se = math.sqrt(got["tail_expected_frac"] / 40_000)
    assert got["tail_observed_frac"] == pytest.approx(got["tail_expected_frac"], abs=4 * se)


@pytest.mark.parametrize(("temperature", "sign"), [(0.9, -1), (1.1, 1)])
def test_a_temperature_that_was_logged_raw_shows_in_the_surprisal(temperature, sign):
    batch, expected = drawn(temperature)
    got = sampler_columns(batch)
    assert sign * got["surprisal_gap_nats"] > 10 * got["surprisal_gap_se_nats"]
    assert got["surprisal_gap_nats"] == pytest.approx(expected, abs=4 * got["surprisal_gap_se_nats"])


def test_a_cut_tail_that_was_logged_raw_is_missing():
    batch, expected = drawn(1.0, top=8)
    got = sampler_columns(batch)
    assert got["surprisal_gap_nats"] == pytest.approx(expected, abs=4 * got["surprisal_gap_se_nats"])
    assert got["tail_observed_frac"] < 0.1 * got["tail_expected_frac"]


def test_shares_by_hand():
    low = math.log(TAIL / 2)
    batch = rollout(
        [[-0.1, low, -0.1], [low, -0.1, low]],
        [[True, True, True], [True, False, False]],
        kv_stale_BT=torch.tensor([[False, True, True], [False, True, True]]),
        tail_mass_BT=torch.tensor([[0.1, 0.2, 0.3], [0.4, 9.0, 9.0]]),
        misaligned_B=torch.tensor([1, 3]),
    )
    got = sampler_columns(batch)
    assert got["tail_expected_frac"] == pytest.approx(0.25)
    assert got["tail_observed_frac"] == pytest.approx(0.5)
    assert got["kv_stale_frac"] == pytest.approx(0.5)
    assert got["misaligned_frac"] == pytest.approx(4 / 8)


def test_what_is_not_known_is_absent_and_a_mean_over_nothing_is_nan():
    got = sampler_columns(rollout([[-1.0]]))
    absent = {name for name, value in got.items() if value is None}
    assert absent == {
        "surprisal_gap_nats", "surprisal_gap_se_nats", "tail_expected_frac", "misaligned_frac",
        "expert_flip_frac", "expert_flip_token_frac", "route_fallback_frac",
    }  # fmt: skip
    zero = torch.zeros(1, 1)
    routes = torch.zeros(2, 1, 1, 2, dtype=torch.int16)
    nothing = sampler_columns(
        rollout([[-1.0]], [[False]], entropy_behav_BT=zero, tail_mass_BT=zero, misaligned_B=torch.tensor([0]),
                routes_LBTK=routes, own_routes_LBTK=routes)
    )  # fmt: skip
    assert nothing.pop("batch_tokens") == 0
    assert all(math.isnan(value) for value in nothing.values())
    assert set(absent) <= set(nothing)


def test_non_finite_log_probs_stay_visible():
    got = sampler_columns(rollout([[math.nan, -1.0]], entropy_behav_BT=torch.ones(1, 2)))
    assert math.isnan(got["surprisal_gap_nats"])
    assert math.isnan(got["surprisal_gap_se_nats"])
    assert math.isnan(got["tail_observed_frac"])


def routed(**changed):
    """Two layers, one row: a prompt token and three completion tokens, the last of which was fed to nobody."""
    handed = torch.tensor([[[[0, 1], [0, 1], [2, 3], [-1, -1]]], [[[0, 1], [0, 1], [-1, -1], [-1, -1]]]])
    own = torch.tensor([[[[5, 6], [1, 0], [2, 4], [0, 1]]], [[[5, 6], [0, 2], [0, 3], [0, 1]]]])
    fields = {"routes_LBTK": handed.to(torch.int16), "own_routes_LBTK": own.to(torch.int16)} | changed
    return rollout([[-1.0, -1.0, -1.0]], prompt=1, **fields)


def test_expert_flips_by_hand():
    got = sampler_columns(routed())
    # Known on both sides: layer 0 of two tokens (the order does not matter, one set differs), layer 1 of one (differs).
    assert got["expert_flip_frac"] == pytest.approx(2 / 3)
    assert got["expert_flip_layer_0_frac"] == pytest.approx(1 / 2)
    assert got["expert_flip_layer_1_frac"] == 1.0
    assert got["expert_flip_token_frac"] == 1.0
    # Fed: the prompt token and two of the completion, in two layers; one of the six is unknown.
    assert got["route_fallback_frac"] == pytest.approx(1 / 6)
    assert fed_BT(routed()).tolist() == [[True, True, True, False]]


def test_a_sampler_that_agrees_with_the_trainer_has_no_flips():
    batch = routed()
    got = sampler_columns(routed(own_routes_LBTK=batch.routes_LBTK.flip(-1)))
    assert got["expert_flip_frac"] == 0.0
    assert got["expert_flip_token_frac"] == 0.0
    only = sampler_columns(routed(own_routes_LBTK=None))
    assert only["expert_flip_frac"] is None
    assert only["route_fallback_frac"] == pytest.approx(1 / 6)


def test_flips_agree_with_sets_of_experts():
    random = torch.Generator().manual_seed(0)
    shape = (3, 4, 6, 2)
    pairs = torch.rand(2, *shape[:-1], 8, generator=random).topk(2, -1).indices.to(torch.int16)
    pairs[0][torch.rand(shape[:-1], generator=random) < 0.2] = -1
    batch = rollout((-torch.ones(4, 6)).tolist(), routes_LBTK=pairs[0], own_routes_LBTK=pairs[1])
    one, other = (pair.reshape(-1, 2).tolist() for pair in pairs)
    known = [(set(a), set(b)) for a, b in zip(one, other, strict=True) if -1 not in a]
    expected = sum(a != b for a, b in known) / len(known)
    assert sampler_columns(batch)["expert_flip_frac"] == pytest.approx(expected)


def test_its_columns_are_declared():
    families = [family.name for family in FAMILIES]
    declared = {*NAMES, *(name.replace("*", "0") for name in families), *(name.replace("*", "1") for name in families)}
    assert set(sampler_columns(routed())) <= declared
