"""VCPO's step scale: hand values, the public code's numbers, what is measured, and continuing."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from stalefront.batch import LossInputs
from stalefront.cell import make_choice
from stalefront.choice import OptionError
from stalefront.vcpo import ess, log_weights_B, lr_scale, opob_baseline

GOLDEN = Path(__file__).parents[1] / "golden" / "peers" / "vcpo__ess_lr_scale_opob__thr8.json"


def inputs(log_ratio, mask=None):
    theta = torch.tensor(log_ratio, dtype=torch.float64) - 3
    mask = torch.ones_like(theta, dtype=torch.bool) if mask is None else torch.tensor(mask)
    old = torch.full_like(theta, -3)
    return LossInputs(theta, old, old, None, torch.ones(len(theta)), mask)


def vcpo(conf_choice, **fields):
    return make_choice("controller", conf_choice("controller", "vcpo") | fields)


def test_by_hand(conf_choice, make_step):
    # Weights e^{ln 2 + ln 1.5} = 3, 1 and 2 (the masked token does not count): ESS = 36 / 14, of B = 3.
    found = inputs(
        [[math.log(2), math.log(1.5)], [0.0, 0.0], [math.log(2), 50.0]],
        [[True, True], [True, True], [True, False]],
    )
    memory = vcpo(conf_choice).start(None)
    decision = memory.decide(make_step(inputs=found))
    assert decision.scale == pytest.approx(math.sqrt(36 / 14 / 3))
    assert memory.columns() == {
        "vcpo_ess_frac": pytest.approx(36 / 42),
        "vcpo_base": 1.0,
        "vcpo_scale": pytest.approx(math.sqrt(36 / 42)),
    }
    assert vcpo(conf_choice, power=1.0).start(None).decide(make_step(inputs=found)).scale == pytest.approx(36 / 42)
    assert vcpo(conf_choice, base=0.5).start(None).decide(make_step(inputs=found)).scale == 1.0
    # Clipped at 1.5 the weights are 1.5, 1, 1.5: ESS = 16 / 5.5.
    clipped = vcpo(conf_choice, clip=1.5, power=1.0).start(None).decide(make_step(inputs=found))
    assert clipped.scale == pytest.approx(16 / 5.5 / 3)


def test_the_numbers_of_the_public_code():
    golden = json.loads(GOLDEN.read_text())
    old, mu, mask = (torch.tensor(golden["inputs"][k], dtype=torch.float64) for k in ("logp_old", "logp_mu", "mask"))
    # Its harness takes the trainer's forward for the present policy.
    log_weight = log_weights_B(old - mu, mask.bool())
    expected = golden["outputs"]
    assert log_weight.exp().tolist() == pytest.approx(expected["seq_is"], rel=1e-12)
    info, scales = expected["ess_info"], expected["lr_scale"]
    for clip, ours, name in ((None, "ess", "0"), (8.0, "ess_clipped", "1")):
        size = ess(log_weight, clip=clip)
        assert size == pytest.approx(info[ours], rel=1e-12)
        assert lr_scale(size / 6, base=1.0, power=0.5) == pytest.approx(scales[f"sqrt_clipped{name}"], rel=1e-12)
        assert lr_scale(size / 6, base=1.0, power=1.0) == pytest.approx(scales[f"linear_clipped{name}"], rel=1e-12)


def test_the_baseline_of_the_public_code():
    golden = json.loads(GOLDEN.read_text())
    reward, size = (torch.tensor(golden["settings"][k])[:3].double() for k in ("rewards", "grad_norm_unscaled"))
    weight = torch.tensor(golden["outputs"]["seq_is"])[:3]
    length = torch.tensor(golden["inputs"]["mask"])[:3].sum(-1)
    expected = golden["outputs"]["opob_baseline"]
    found = {
        "group_is1_clip0_len0": opob_baseline(reward, size, weight),
        "group_is1_clip1_len0": opob_baseline(reward, size, weight.clamp(max=8)),
        "group_is0_clip0_len0": opob_baseline(reward, size),
        "group_is1_clip0_len1": opob_baseline(reward, size, weight, length),
    }
    # Its norms and rewards are float32.
    assert found == pytest.approx({name: expected[name] for name in found}, rel=1e-6)
    # By hand: (4 · 1 · 1 + 1 · 9 · 0) / 13.
    hand = [torch.tensor(v) for v in ([1.0, 0.0], [1.0, 3.0], [2.0, 1.0])]
    assert opob_baseline(*hand) == pytest.approx(4 / 13)


def test_equal_weights_and_lost_ones():
    assert ess(torch.zeros(7, dtype=torch.float64)) == pytest.approx(7)
    assert ess(torch.full((3,), 800.0, dtype=torch.float64)) == pytest.approx(3)  # e^800 overflows
    assert ess(torch.full((3,), -800.0, dtype=torch.float64)) == 0.0  # 0 / (0 + 1e-8)
    assert math.isnan(ess(torch.tensor([0.0, math.nan])))
    assert math.isnan(lr_scale(math.nan, base=1.0, power=0.5))


def test_the_scale_acts_on_the_rate_and_is_recorded(tiny, continued):
    rows = continued(tiny(controller=["vcpo"], **{"optimizer.lr": 5e-3}))[1:]
    for row in rows:
        assert row["lr_scale"] == row["vcpo_scale"] == pytest.approx(min(1, row["vcpo_ess_frac"] ** 0.5))
        assert row["lr_applied"] == row["lr_asked"] * row["lr_scale"]
        # The column of the loop is the same share but for the 1e-8.
        assert row["vcpo_ess_frac"] == pytest.approx(row["ess_seq_frac"], rel=1e-3)
    assert min(row["vcpo_scale"] for row in rows) < 0.99


def test_a_measured_base_is_that_of_the_first_step_on_each_batch(tiny, continued):
    rows = continued(tiny(controller=["vcpo"], **{"controller.vcpo.base": "measured", "optimizer.lr": 5e-3}))[1:]
    for first in (0, 4):
        batch = rows[first : first + 4]
        assert {row["vcpo_base"] for row in batch} == {batch[0]["vcpo_ess_frac"]}
        assert batch[0]["lr_scale"] == 1.0
    assert rows[3]["lr_scale"] < 1


def test_a_low_base_changes_nothing(tiny, completed, shared):
    plain = completed(tiny())
    same = completed(tiny(controller=["vcpo"], **{"controller.vcpo.base": 1e-6}))
    assert shared(same, "vcpo") == shared(plain, "vcpo")


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        ({"controller.vcpo.base": "counted"}, "controller.vcpo.base"),
        ({"controller.vcpo.base": 0.0}, "controller.vcpo.base"),
        ({"controller.vcpo.base": "measured", "delay": "lag"}, "controller.vcpo.base"),
        ({"controller.vcpo.power": 0.0}, "controller.vcpo.power"),
        ({"controller.vcpo.clip": -1.0}, "controller.vcpo.clip"),
    ],
)
def test_refusals(overrides, field, tiny):
    with pytest.raises(OptionError) as caught:
        tiny(controller=["vcpo"], **overrides)
    assert caught.value.field == field


def test_masked_junk_has_no_weight(conf_choice, make_step):
    clean = inputs([[0.0, math.nan], [0.0, 0.0]], [[True, False], [True, True]])
    assert vcpo(conf_choice).start(None).decide(make_step(inputs=clean)).scale == pytest.approx(1.0)
    seen = replace(clean, mask_BT=torch.ones(2, 2, dtype=torch.bool), logp_theta_BT=torch.full((2, 2), math.nan))
    assert math.isnan(vcpo(conf_choice).start(None).decide(make_step(inputs=seen)).scale)
