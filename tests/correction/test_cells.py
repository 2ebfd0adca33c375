"""Corrections at work in a cell: what a chain records, and the entropy that is recorded where a rule needs it."""

from __future__ import annotations

import pytest

LAGGED = {"delay": "lag", "loss": "reinforce", "steps": 6, "model.warmup.steps": 100}
FAST = {"optimizer.lr": 4e-3, "optimizer.warmup_steps": 2}
TIGHT = {"correction.token_mask.low": 0.98, "correction.token_mask.high": 1.02}


def test_a_chain_says_which_rule_removed_what(make_cell, completed):
    chain = ["outlier_veto", "token_mask", "token_tis", "normalize"]
    rows = completed(make_cell(correction=chain, **LAGGED, **FAST, **TIGHT))[1:]
    removed = [f"removed_{stem}_frac" for stem in chain]
    assert {tuple(name for name in row if name.startswith("removed_")) for row in rows} == {tuple(removed)}
    for row in rows:
        assert row["tokens_kept_frac"] + sum(row[name] for name in removed) == pytest.approx(1.0, abs=1e-12)
        assert row["tokens_kept_frac"] == pytest.approx(1 - row["mask_frac"], abs=1e-12)
        assert row["weight_mean"] == pytest.approx(1.0, abs=1e-5)
        assert 0 < row["weight_ess_frac"] <= 1
    assert rows[0]["tokens_kept_frac"] == 1
    assert any(row["removed_token_mask_frac"] > 0 for row in rows)
    assert all(row["removed_normalize_frac"] == row["removed_token_tis_frac"] == 0 for row in rows)


def test_estr_sees_the_entropy_of_the_sampling_weights(make_cell, completed):
    options = {"correction": ["estr"], "correction.estr.tau": 1e-3}
    rows = completed(make_cell(**options, **LAGGED, **FAST))[1:]
    # Step 1 is on-policy up to rounding; a narrow band removes much of what is stale.
    assert rows[0]["mask_frac"] == 0
    assert any(row["removed_estr_frac"] > 0.1 for row in rows)
    assert all(row["removed_estr_frac"] < 1 for row in rows)


@pytest.mark.parametrize(
    "stem", ["sequence_tis", "segment_tis", "icepop", "sequence_mask", "kpop", "opsm", "m2po_mask"]
)
def test_a_lagged_cell_runs_under_it(stem, make_cell, completed):
    rows = completed(make_cell(correction=[stem], **LAGGED | {"steps": 5}, **FAST))[1:]
    assert [row["lag_max_updates"] for row in rows] == [0, 1, 2, 3, 3]
    assert all(row["stepped"] for row in rows)
    assert any(row["weight_mean"] != 1 or row["mask_frac"] > 0 for row in rows)
