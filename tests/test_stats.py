"""Step statistics: hand values, identities, and non-finite log-probs that stay visible."""

import math

import pytest
import torch

from stalefront.batch import LossInputs, Weights
from stalefront.cell import make_choice
from stalefront.correction import chain
from stalefront.stats import (
    MISMATCH,
    decomposition_columns,
    ess_frac,
    kept_columns,
    kl_reference_columns,
    log_ratio_stats,
    ratio_columns,
    weight_columns,
)


def inputs(theta, old, behav, mask=None, recomputed=None):
    theta, old, behav = (torch.tensor(x, dtype=torch.float64) for x in (theta, old, behav))
    mask = torch.ones_like(theta, dtype=torch.bool) if mask is None else torch.tensor(mask)
    recomputed = None if recomputed is None else torch.tensor(recomputed, dtype=torch.float64)
    return LossInputs(theta, old, behav, None, torch.ones(len(theta)), mask, logp_recomputed_BT=recomputed)


def test_log_ratio_statistics_by_hand():
    got = log_ratio_stats(torch.tensor([math.log(2.0), math.log(0.5)], dtype=torch.float64))
    assert got["ratio_mean"] == pytest.approx(1.25)
    assert got["ratio_max"] == pytest.approx(2.0)
    assert got["logratio_mean"] == pytest.approx(0.0)
    assert got["logratio_abs_mean"] == pytest.approx(math.log(2))
    assert got["logratio_q50"] == pytest.approx(0.0)
    # k3: (2 − 1 − ln 2 + .5 − 1 + ln 2) / 2
    assert got["k3_nats"] == pytest.approx(0.25)


def test_divergences_by_hand():
    # r = 2 and 1/2: k1 = 0, k2 = ln²2 / 2, χ² = (1 + .25) / 2.
    got = log_ratio_stats(torch.tensor([math.log(2.0), math.log(0.5)], dtype=torch.float64))
    assert got["k1_nats"] == pytest.approx(0.0)
    assert got["k2_nats"] == pytest.approx(math.log(2) ** 2 / 2)
    assert got["chi2"] == pytest.approx(0.625)
    assert got["logratio_sd_nats"] == pytest.approx(math.log(2))
    nothing = log_ratio_stats(torch.zeros(2, dtype=torch.float64))
    assert math.copysign(1, nothing["k1_nats"]) == 1


def test_moments_of_a_ratio_hang_together():
    torch.manual_seed(3)
    got = log_ratio_stats(0.3 * torch.randn(50, dtype=torch.float64))
    assert got["k3_nats"] - got["k1_nats"] == pytest.approx(got["ratio_mean"] - 1)
    assert 2 * got["k2_nats"] == pytest.approx(got["logratio_sd_nats"] ** 2 + got["k1_nats"] ** 2)


def test_divergences_are_those_of_torch_in_the_direction_of_the_sampler():
    # Over all tokens, each as often as μ has it, the means are the exact KL(μ‖π), twice, and χ²(π‖μ).
    mu, pi = torch.tensor([0.5, 0.25, 0.25]).double(), torch.tensor([0.2, 0.3, 0.5]).double()
    tokens = torch.tensor([0, 0, 1, 2])
    got = log_ratio_stats((pi / mu).log()[tokens])
    kl = torch.distributions.kl_divergence(torch.distributions.Categorical(mu), torch.distributions.Categorical(pi))
    assert got["k1_nats"] == pytest.approx(float(kl))
    assert got["k3_nats"] == pytest.approx(float(kl))
    assert got["ratio_mean"] == pytest.approx(1.0)
    assert got["chi2"] == pytest.approx(float((pi**2 / mu).sum()) - 1)


def test_decomposition_by_hand():
    # a = 1, −1, 1, −1 and b = 2, 2, −2, −2, uncorrelated: Var(l) = 1 + 4.
    mu, recomputed = [[-5.0, -5.0, -5.0, -5.0]], [[-4.0, -6.0, -4.0, -6.0]]
    theta = [[-2.0, -4.0, -6.0, -8.0]]
    got = decomposition_columns(inputs(theta, recomputed, mu))
    assert got["logratio_var_nats2"] == pytest.approx(5.0)
    assert got["mismatch_var_share"] == pytest.approx(0.2)
    assert got["lag_var_share"] == pytest.approx(0.8)
    assert got["decomposition_error_nats"] == 0.0
    assert got["mismatch_logratio_abs_mean"] == pytest.approx(1.0)


def test_shares_of_the_variance_sum_to_one_and_the_parts_to_the_whole(random_inputs):
    for dtype, bound in ((torch.float64, 1e-14), (torch.float32, 4e-6)):
        made = random_inputs(spread=2.0, rows=12, dtype=dtype)
        got = decomposition_columns(made)
        assert got["mismatch_var_share"] + got["lag_var_share"] == pytest.approx(1.0, abs=1e-6)
        assert got["decomposition_error_nats"] <= bound
        assert got["logratio_var_nats2"] == pytest.approx(ratio_columns(made)["theta_mu_logratio_sd_nats"] ** 2)


def test_shares_are_the_covariances_with_the_whole(random_inputs):
    made = random_inputs(spread=2.0, rows=12)
    mask = made.mask_BT
    a, b = (made.anchored_BT(anchor)[mask] for anchor in ("old/mu", "theta/old"))
    for part, name in ((a, "mismatch"), (b, "lag")):
        covariance = torch.cov(torch.stack([part, a + b]), correction=0)
        share = decomposition_columns(made)[f"{name}_var_share"]
        assert share == pytest.approx(float(covariance[0, 1] / covariance[1, 1]))


def test_mismatch_is_that_of_the_recomputed_policy_where_old_is_another():
    mu, recomputed, theta = [[-5.0, -5.0]], [[-4.0, -6.0]], [[-3.0, -6.0]]
    alone = inputs(theta, recomputed, mu)
    other = inputs(theta, [[-1.0, -9.0]], mu, recomputed=recomputed)
    assert decomposition_columns(other) == decomposition_columns(alone)
    assert ratio_columns(other)["old_mu_k3_nats"] != ratio_columns(alone)["old_mu_k3_nats"]
    for name in MISMATCH:
        assert decomposition_columns(alone)[f"mismatch_{name}"] == ratio_columns(alone)[f"old_mu_{name}"]


def test_where_nothing_varies_nothing_has_a_share():
    got = decomposition_columns(inputs([[-1.0, -1.0]], [[-1.0, -1.0]], [[-2.0, -2.0]]))
    assert got["logratio_var_nats2"] == 0.0
    assert math.isnan(got["mismatch_var_share"])
    assert math.isnan(got["lag_var_share"])
    empty = decomposition_columns(inputs([[-1.0]], [[-1.0]], [[-2.0]], [[False]]))
    assert all(math.isnan(value) for value in empty.values())
    broken = decomposition_columns(inputs([[math.nan, -1.0]], [[-1.0, -1.0]], [[-2.0, -2.5]]))
    assert math.isnan(broken["lag_var_share"])
    assert math.isnan(broken["decomposition_error_nats"])
    assert broken["mismatch_logratio_abs_mean"] == pytest.approx(1.25)


def test_ess_of_the_mismatch_alone():
    # Products per row: e², 1, as in the test of sequences below, with θ anywhere.
    got = ratio_columns(inputs([[-7.0, -3.0], [-1.0, -2.0]], [[0.0, 0.0], [0.0, 0.0]], [[-1.0, -1.0], [0.0, 0.0]]))
    e1, e2 = math.exp(1), math.exp(2)
    assert got["old_mu_ess_seq_frac"] == pytest.approx((e2 + 1) ** 2 / (2 * (e2**2 + 1)))
    assert got["old_mu_ess_token_frac"] == pytest.approx((2 * e1 + 2) ** 2 / (4 * (2 * e1**2 + 2)))


def test_log_theta_mu_is_staleness_plus_mismatch():
    torch.manual_seed(0)
    theta, old, behav = (-torch.rand(3, 5) for _ in range(3))
    got = ratio_columns(inputs(theta.tolist(), old.tolist(), behav.tolist()))
    total = got["theta_old_logratio_mean"] + got["old_mu_logratio_mean"]
    assert got["theta_mu_logratio_mean"] == pytest.approx(total)


def test_ess_by_hand_and_without_overflow():
    weights = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    assert ess_frac(weights.log()) == pytest.approx(36 / (3 * 14))
    assert ess_frac(weights.log() + 500) == pytest.approx(36 / (3 * 14))
    assert ess_frac(torch.zeros(7)) == pytest.approx(1.0)
    assert ess_frac(torch.tensor([0.0, -math.inf])) == pytest.approx(0.5)
    assert math.isnan(ess_frac(torch.tensor([0.0, math.nan])))


def test_sequence_ess_uses_products():
    # Products per row: e², 1; ESS = (e² + 1)² / (2 (e⁴ + 1)).
    got = ratio_columns(inputs([[0.0, 0.0], [0.0, 0.0]], [[0.0, 0.0], [0.0, 0.0]], [[-1.0, -1.0], [0.0, 0.0]]))
    e2 = math.exp(2)
    assert got["ess_seq_frac"] == pytest.approx((e2 + 1) ** 2 / (2 * (e2**2 + 1)))
    e1 = math.exp(1)
    assert got["ess_token_frac"] == pytest.approx((2 * e1 + 2) ** 2 / (4 * (2 * e1**2 + 2)))


def test_masked_junk_is_not_seen_and_nan_is():
    clean = inputs([[-1.0, 5.0]], [[-2.0, math.nan]], [[-2.0, -math.inf]], [[True, False]])
    got = ratio_columns(clean)
    assert got["theta_old_logratio_mean"] == pytest.approx(1.0)
    assert got["theta_mu_ratio_max"] == pytest.approx(math.e)
    seen = ratio_columns(inputs([[math.nan, -1.0]], [[-2.0, -1.0]], [[-2.0, -1.0]]))
    assert math.isnan(seen["theta_old_logratio_mean"])
    assert math.isnan(seen["theta_old_ratio_max"])
    assert math.isnan(seen["theta_old_logratio_q50"])
    assert seen["old_mu_logratio_mean"] == 0.0


def test_an_empty_mean_is_nan_not_zero():
    got = ratio_columns(inputs([[0.0]], [[0.0]], [[0.0]], [[False]]))
    assert math.isnan(got["theta_mu_ratio_mean"])


def test_reference_kl_by_hand():
    theta, ref = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -1.0]])
    got = kl_reference_columns(theta, ref, torch.ones(1, 2, dtype=torch.bool))
    assert got["kl_ref_k1_nats"] == pytest.approx((0.5 - 1.0) / 2)
    k3 = (math.exp(-0.5) + 0.5 - 1 + math.exp(1.0) - 1.0 - 1) / 2
    assert got["kl_ref_k3_nats"] == pytest.approx(k3)


def weighted(weight, keep, removed=None):
    removed = None if removed is None else torch.tensor(removed, dtype=torch.int8)
    rules = () if removed is None else ("outlier_veto", "icepop")
    return Weights(torch.tensor(weight, dtype=torch.float64), torch.tensor(keep), 1.0, removed, rules)


def test_what_is_kept_and_who_removed_the_rest():
    mask = torch.tensor([[True, True, True], [True, True, False]])
    weights = weighted([[1.0, 2.0, 1.0], [1.0, 0.0, 9.0]], [[False, True, True], [False, True, True]],
                       [[1, 0, 0], [1, 2, 0]])  # fmt: skip
    got = kept_columns(weights, mask)
    assert got == {
        "tokens_kept_frac": pytest.approx(2 / 5),
        "rows_kept_frac": 0.5,
        "removed_outlier_veto_frac": pytest.approx(2 / 5),
        "removed_icepop_frac": pytest.approx(1 / 5),
    }
    assert kept_columns(None, mask) == {"tokens_kept_frac": 1.0, "rows_kept_frac": 1.0}


def test_weight_columns_by_hand():
    mask = torch.tensor([[True, True, True, False]])
    got = weight_columns(weighted([[1.0, 2.0, 5.0, 9.0]], [[True, True, False, True]]), mask)
    # Over all three tokens, the rejected one with weight 0: (1 + 2)² / (3 (1 + 4)).
    assert got["weight_ess_frac"] == pytest.approx(9 / 15)
    assert got["weight_mean"] == pytest.approx(8 / 3)
    assert got["mask_frac"] == pytest.approx(1 / 3)
    nothing = weight_columns(weighted([[1.0, 2.0, 5.0, 9.0]], [[False, False, False, True]]), mask)
    assert math.isnan(nothing["weight_ess_frac"])


def test_shares_of_a_chain_sum_to_one(random_inputs, conf_choice):
    inputs = random_inputs(spread=6.0, rows=12)
    stems = ("outlier_veto", "token_mask", "icepop")
    weights = chain([make_choice("correction", conf_choice("correction", stem)) for stem in stems], inputs)
    got = kept_columns(weights, inputs.mask_BT)
    assert list(got) == ["tokens_kept_frac", "rows_kept_frac", *(f"removed_{stem}_frac" for stem in stems)]
    assert sum(value for name, value in got.items() if name != "rows_kept_frac") == pytest.approx(1.0, rel=1e-12)
    assert got["tokens_kept_frac"] == pytest.approx(1 - weight_columns(weights, inputs.mask_BT)["mask_frac"])
