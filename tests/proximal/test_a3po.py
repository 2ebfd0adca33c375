"""A-3PO: interpolation by lag against hand values, its limits, an independent formula and AReaL's own numbers."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from stalefront.batch import LossInputs
from stalefront.cell import make_choice
from stalefront.choice import OptionError
from stalefront.proximal.a3po import A3PO, interpolation_BT

GOLDEN = Path(__file__).parents[1] / "golden" / "peers" / "areal__a3po_prox_logp__loglinear_v8.json"


def inputs_at(lag, mu, theta):
    mask = torch.ones(1, len(lag), dtype=torch.bool)
    logp = {"logp_old_BT": torch.full((1, len(lag)), -9.0, dtype=torch.float64)}
    logp |= {"logp_behav_BT": torch.tensor([mu], dtype=torch.float64)}
    logp |= {"logp_theta_BT": torch.tensor([theta], dtype=torch.float64, requires_grad=True)}
    return LossInputs(**logp, logp_ref_BT=None, advantage_B=torch.ones(1), mask_BT=mask, lag_BT=torch.tensor([lag]))


def test_share_by_hand():
    lag = torch.tensor([[-3, -1, 0, 1, 2, 4]])
    torch.testing.assert_close(interpolation_BT(lag), torch.tensor([[0, 0, 0, 0, 0.5, 0.75]]))


def test_log_probs_by_hand():
    """Lag 2: halfway. log-linear between −1 and −3 is −2; linear is log of the mean of the probabilities."""
    inputs = inputs_at([2], [-1.0], [-3.0])
    assert A3PO("loglinear", 0.0)(inputs).logp_old_BT.item() == -2
    expected = math.log((math.exp(-1) + math.exp(-3)) / 2)
    assert A3PO("linear", 0.0)(inputs).logp_old_BT.item() == pytest.approx(expected, rel=1e-14)
    offset = A3PO("linear", 1e-3)(inputs).logp_old_BT.item()
    assert offset == pytest.approx(math.log(math.exp(expected) + 1e-3), rel=1e-14)


@pytest.mark.parametrize("method", ["loglinear", "linear"])
@pytest.mark.parametrize("lag", [-1, 0, 1])
def test_fresh_and_unknown_tokens_keep_the_sampler(method, lag):
    inputs = inputs_at([lag], [-1.25], [-0.5])
    assert A3PO(method, 0.0)(inputs).logp_old_BT.item() == pytest.approx(-1.25, rel=1e-15)


@pytest.mark.parametrize("method", ["loglinear", "linear"])
def test_no_gradient_goes_through(method):
    inputs = inputs_at([1, 2, 5], [-1.0, -2.0, -0.5], [-3.0, -0.2, -1.0])
    assert not A3PO(method, 0.0)(inputs).logp_old_BT.requires_grad


@pytest.mark.parametrize("method", ["loglinear", "linear"])
def test_old_lies_between_sampler_and_policy(method, random_inputs):
    inputs = random_inputs(spread=3.0)
    inputs = replace(inputs, lag_BT=torch.randint(1, 9, inputs.mask_BT.shape))
    old = A3PO(method, 0.0)(inputs).logp_old_BT
    ends = torch.stack([inputs.logp_behav_BT, inputs.logp_theta_BT])
    assert (old >= ends.amin(0) - 1e-12).all()
    assert (old <= ends.amax(0) + 1e-12).all()


def test_against_versions(random_inputs):
    """The interpolation in terms of versions, with numpy: (v_θ − 1 − v_μ)/(v_θ − v_μ)."""
    inputs = random_inputs(spread=2.0)
    version = np.random.default_rng(0).integers(-1, 8, inputs.mask_BT.shape)
    known = version >= 0
    lag = torch.tensor(np.where(known, 8 - version, -1))
    share = np.where(known & (version < 8), (7 - version) / np.maximum(8 - version, 1), 0)
    mu, theta = inputs.logp_behav_BT.numpy(), inputs.logp_theta_BT.numpy()
    got = A3PO("loglinear", 0.0)(replace(inputs, lag_BT=lag)).logp_old_BT.numpy()
    mask = inputs.mask_BT.numpy()
    np.testing.assert_allclose(got[mask], ((1 - share) * mu + share * theta)[mask], rtol=1e-6)


@pytest.mark.parametrize("theta", [-math.inf, math.inf])
def test_an_infinite_policy_leaves_fresh_tokens_alone(theta):
    inputs = inputs_at([1, 3], [-1.0, -1.0], [theta, theta])
    old = A3PO("loglinear", 0.0)(inputs).logp_old_BT
    assert old[0, 0] == -1
    assert not torch.isfinite(old[0, 1])


def test_against_areal():
    stored = json.loads(GOLDEN.read_text())
    columns = {key: torch.tensor(value) for key, value in stored["inputs"].items()}
    logp = {f"logp_{n}_BT": columns[f"logp_{k}"].double() for n, k in (("theta", "theta"), ("behav", "mu"))}
    version = columns["versions"]
    inputs = LossInputs(
        **logp,
        logp_old_BT=columns["logp_old"].double(),
        logp_ref_BT=None,
        advantage_B=columns["advantages"].double(),
        mask_BT=columns["mask"].bool(),
        lag_BT=torch.where(version >= 0, stored["settings"]["current_version"] - version, -1),
    )
    for method in ("loglinear", "linear"):
        got = A3PO(method, 1e-10)(inputs).logp_old_BT[inputs.mask_BT]
        expected = torch.tensor(stored["outputs"][f"prox_logp_{method}"], dtype=torch.float64)[inputs.mask_BT]
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=0)


def test_its_configuration(conf_choice):
    assert make_choice("proximal", conf_choice("proximal", "a3po")) == A3PO("loglinear", 0.0)


def test_what_it_refuses():
    with pytest.raises(OptionError, match=r"proximal\.method = 'cubic' is not possible\. Legal: one of loglinear"):
        A3PO("cubic", 0.0)
    with pytest.raises(OptionError, match=r"proximal\.offset = 1\.0 is not possible\. Legal: a number of at least 0"):
        A3PO("loglinear", 1.0)
