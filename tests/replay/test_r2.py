"""R2: θ takes the experts that the trainer chose under the sampling weights."""

from __future__ import annotations

import pytest
import torch

from stalefront.policy import token_logps
from stalefront.routing import RouterTap

FLIPS = {"mismatch": ["expert_flips"], "mismatch.expert_flips.rate": 0.3, "delay.S": 4}


def scored(model, batch, routes):
    inputs = (batch.tokens_BT, batch.position_BT, batch.mask_BT)
    with torch.no_grad(), RouterTap(model).replaying(routes):
        return token_logps(model, *inputs, temperature=1.0).logp_BT


def test_theta_takes_the_routes_of_old(routed_learner):
    learner = routed_learner(replay="r2", **FLIPS)
    for _ in range(3):
        row = learner.advance()[1]
    batch, model = learner.batch, learner.parts.model
    clean = routed_learner().parts.model
    # By its own choice: replaying them changes nothing.
    assert torch.equal(batch.logp_old_BT, scored(clean, batch, batch.own_routes_LBTK))
    assert row["route_drift_frac"] > 0
    seen = learner._backward(batch, learner._advantages(batch.reward_B))
    theta = torch.cat([piece.inputs.logp_theta_BT for piece in seen])
    assert torch.equal(theta, scored(model, batch, batch.own_routes_LBTK))
    assert not torch.equal(theta, scored(model, batch, batch.routes_LBTK))


def test_theta_over_old_changes_with_weights_alone(routed_learner):
    """A step that moves the routers and nothing else, by so much that choices change but hardly any weight does."""
    ratios = {}
    for replay in ("none", "r2"):
        learner = routed_learner(replay=replay, **FLIPS)
        learner.advance()
        model = learner.parts.model
        model.load_state_dict(learner.parts.reference.state_dict())
        with torch.no_grad():
            for layer in model.model.layers:
                layer.mlp.gate.weight.add_(0.02 * torch.sign(layer.mlp.gate.weight))
        seen = learner._backward(learner.batch, learner._advantages(learner.batch.reward_B))
        ratios[replay] = float(torch.cat([piece.inputs.log_ratio_BT for piece in seen]).abs().max())
    assert 0 < 3 * ratios["r2"] < ratios["none"]


@pytest.mark.parametrize(
    "overrides", [{"delay.minibatches": 2, "optimizer.grad_accum": 2}, {"optimizer.grad_accum": 4}]
)
def test_at_lag_0_theta_over_old_is_1_to_the_last_bit(overrides, routed_learner):
    row = routed_learner(replay="r2", **FLIPS, **overrides).advance()[1]
    assert row["theta_old_ratio_max"] == row["theta_old_ratio_mean"] == 1
    assert row["route_drift_frac"] == 0
    assert row["replay_gap_k3_nats"] == pytest.approx(0, abs=1e-12)
    assert row["old_mu_k3_nats"] > 1e-3
