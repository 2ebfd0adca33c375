"""What other frameworks' own code gave, file by file, and that a difference is seen."""

import json
from pathlib import Path

import pytest

from stalefront.parity import GoldenFile, Unreadable, check

FILES = sorted((Path(__file__).parents[1] / "golden" / "peers").glob("*.json"))
# Files that are not evaluated: upstream defects that are not imitated.
DECLINED = {"roll__pg_ppo__ppo_filter_token_mean": "leaves out its mask"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_golden_file_is_met(path):
    outcome = check(GoldenFile.read(path))
    if path.stem in DECLINED:
        assert outcome.state == "declined"
        assert DECLINED[path.stem] in outcome.detail
    else:
        assert (outcome.state, outcome.detail) == ("equal", "")


def state(path):
    return check(GoldenFile.read(path)).state


# One number of each file, and how much of it.
SEEN = [
    ("verl__vanilla__token_mean_tis_token2", ("loss",), 1 + 1e-8),
    ("verl__vanilla__token_mean_tis_token2", ("grad_logp_theta", 0, 0), 1.001),
    ("verl__vanilla__token_mean_tis_token2", ("rollout_is_weights", 0, 0), 1.001),
    ("verl_fork_vcpo__rollout_correction__token_is2_token_rs", ("rollout_is_weights", 0, 0), 1.001),
    ("stable_rl__compute_policy_loss_with_mask__ppo_c10", ("loss",), 1 + 1e-8),
    ("m2po__compute_m2po_policy_loss__budget004_mu", ("loss",), 1 + 1e-8),
    ("vcpo__ess_lr_scale_opob__thr8", ("ess_info", "ess"), 1 + 1e-8),
    ("vcpo__ess_lr_scale_opob__thr8", ("opob_baseline", "group_is0_clip0_len0"), 1 + 1e-8),
    ("roll__pg_topr__topr", ("loss",), 1 + 1e-8),
    ("roll__compute_train_infer_correction__token_is_ub12", ("is_weight", 0, 0), 1.001),
]


@pytest.mark.parametrize(("name", "place", "factor"), SEEN, ids=lambda value: str(value))
def test_a_changed_number_is_missed(changed, name, place, factor):
    def change(stored):
        *parents, last = place
        node = stored["outputs"]
        for part in parents:
            node = node[part]
        node[last] *= factor

    assert state(changed(name, change)) == "miss"


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("verl__rollout_correction__rs_seq_mean_k1_099_101", "modified_response_mask"),
        ("verl_fork_vcpo__rollout_correction__veto_1e-4", "modified_response_mask"),
        ("stable_rl__compute_policy_loss_with_mask__dppo_binary_tv_c10", "valid_mask"),
        ("roll__compute_train_infer_correction__token_filter_08_12", "filter_mask"),
    ],
)
def test_one_token_of_a_mask_is_missed(changed, name, key):
    def change(stored):
        stored["outputs"][key][0][0] = 1 - stored["outputs"][key][0][0]

    path = changed(name, change)
    assert "1 of 53 entries differ" in check(GoldenFile.read(path)).detail


@pytest.mark.parametrize(
    ("name", "setting", "value"),
    [
        ("verl__vanilla__token_mean", "clip_ratio_high", 0.3),
        ("verl__vanilla__token_mean", "loss_agg_mode", "token-sum"),
        ("verl__rollout_correction__is_token_tis2", "rollout_is_threshold", 3.0),
        ("verl__sapo__default", "tau_neg", 1.1),
        ("verl_fork_vcpo__rollout_correction__token_is2_token_rs", "rollout_rs_threshold_lower", 0.01),
        ("stable_rl__compute_policy_loss_with_mask__dppo_binary_tv_c10", "clip_ratio_low", 0.01),
        ("m2po__compute_m2po_policy_loss__budget004_mu", "M2_budget", 0.4),
        ("vcpo__ess_lr_scale_opob__thr8", "base_ess_ratio", 0.9),
        ("roll__pg_cispo__cispo_01", "cispo_epsilon_high", 0.3),
        ("roll__pg_topr__topr", "scores", [0.0] * 6),
    ],
)
def test_another_setting_gives_other_numbers(changed, name, setting, value):
    assert state(changed(name, lambda stored: stored["settings"].update({setting: value}))) == "miss"


def test_nothing_is_taken_from_expected_numbers(golden, changed):
    """Without its gradient a file is evaluated all the same; without anything to compare it says nothing."""
    name = "verl__vanilla__token_mean"
    assert state(changed(name, lambda stored: stored["outputs"].pop("grad_logp_theta"))) == "equal"
    with pytest.raises(Unreadable, match="nothing that is compared"):
        state(changed(name, lambda stored: stored["outputs"].clear()))
    with pytest.raises(Unreadable, match="do not fit together"):
        state(changed(name, lambda stored: stored["inputs"]["mask"].pop()))
    assert json.loads(golden(name).read_text())["outputs"]["loss"] < 0


def test_padding_does_not_enter(changed):
    def change(stored):
        mask = stored["inputs"]["mask"]
        for name in ("logp_theta", "logp_old", "logp_mu"):
            for row, kept in zip(stored["inputs"][name], mask, strict=True):
                row[:] = [value if keep else -9.0 for value, keep in zip(row, kept, strict=True)]

    for name in ("verl__vanilla__token_mean_tis_token2", "roll__pg_ppo__ppo_is_ub12_filter"):
        assert state(changed(name, change)) == "equal"
