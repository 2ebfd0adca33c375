"""M2PO, the authors' own."""

from stalefront.frameworks import framework


def test_options_are_fields_of_the_loss():
    made = framework("m2po").recipe({"M2_budget": 0.1, "miniclip_high": 0.5, "use_rollout_log_probs": False})
    expected = {"choice": "m2po", "budget": 0.1, "miniclip_low": None, "miniclip_high": 0.5, "anchor": "theta/old"}
    assert made.loss.items() >= expected.items()
    assert made.reduction["choice"] == "token_mean"
