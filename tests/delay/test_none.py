"""On-policy: the trainer's log-probs equal the sampling weights' to the last bit, at every step."""


def test_ratio_to_old_is_exactly_one(make_cell, completed):
    rows = completed(make_cell(delay="none", steps=6))
    for row in rows[1:]:
        assert row["theta_old_ratio_max"] == row["theta_old_ratio_mean"] == 1.0
        assert row["lag_max_updates"] == 0
        assert row["at_refresh"]
        assert abs(row["old_mu_logratio_abs_mean"]) < 1e-5


def test_equals_reuse_of_one(make_cell, completed, numbers):
    assert numbers(completed(make_cell(delay="none"))) == numbers(completed(make_cell(**{"delay.S": 1})))
