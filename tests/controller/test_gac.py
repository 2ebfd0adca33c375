"""GAC: the three regimes by hand, skipped steps in the record, and continuing."""

import math

import pytest
import torch

from stalefront.cell import make_choice
from stalefront.choice import OptionError
from stalefront.controller.gac import removal, without_parallel
from stalefront.update import cosine


def gac(conf_choice, **fields):
    return make_choice("controller", conf_choice("controller", "gac") | fields).start(None)


def test_the_three_regimes_by_hand(conf_choice, make_step):
    memory = gac(conf_choice, low=0.6, high=0.9)
    # cos((3, 4), (1, 0)) = .6: nothing of the parallel part yet; at .8 half of it, at .96 all and the step with it.
    assert memory.decide(make_step(gradient=[3.0, 4.0], previous=[2.0, 0.0])).gradient is None
    half = memory.decide(make_step(gradient=[4.0, 3.0], previous=[2.0, 0.0]))
    assert half.gradient.tolist() == pytest.approx([2.0, 3.0])
    assert memory.columns() == {"gac_cos": pytest.approx(0.8), "gac_removed_frac": pytest.approx(0.5)}
    assert memory.decide(make_step(gradient=[24.0, 7.0], previous=[2.0, 0.0])).skip
    assert memory.columns()["gac_removed_frac"] == 1.0
    assert not memory.decide(make_step(gradient=[-1.0, 0.0], previous=[2.0, 0.0])).acts


def test_the_first_step_and_undefined_angles_apply(conf_choice, make_step):
    memory = gac(conf_choice)
    assert not memory.decide(make_step(gradient=[1.0, 0.0])).acts
    assert math.isnan(memory.columns()["gac_cos"])
    assert not memory.decide(make_step(gradient=[0.0, 0.0], previous=[1.0, 0.0])).acts
    assert not memory.decide(make_step(gradient=[math.nan, 0.0], previous=[1.0, 0.0])).acts
    assert removal(0.9, low=0.5, high=0.9).action == "skip"


def test_removing_all_of_it_leaves_a_right_angle():
    torch.manual_seed(0)
    gradient, previous = torch.randn(1000), torch.randn(1000) * 7
    left = without_parallel(gradient, previous, 1.0)
    assert abs(cosine(left, previous)) < 1e-6
    assert torch.equal(without_parallel(gradient, previous, 0.0), gradient)
    # c sinks by the share of it, and what is at a right angle stays.
    dot_before, dot_after = (float(v.double() @ previous.double()) for v in (gradient, gradient + 0))
    assert float(without_parallel(gradient, previous, 0.25).double() @ previous.double()) == pytest.approx(
        0.75 * dot_before, rel=1e-4
    )
    assert dot_after == dot_before


def test_skipped_steps_are_recorded_and_apply_nothing(tiny, continued):
    # All steps on a batch point almost the same way at this rate: only the first one on a batch is applied.
    options = {"controller.gac.low": 0.5, "controller.gac.high": 0.6, "optimizer.lr": 1e-6}
    rows = continued(tiny(controller=["gac"], **options))[1:]
    skipped = [row for row in rows if not row["stepped"]]
    assert len(skipped) >= 6
    version = 0
    for row in rows:
        version += row["stepped"]
        assert row["version"] == version
        assert row["stepped"] == (row["gac_removed_frac"] < 1)
    for row in skipped:
        assert row["gac_cos"] >= 0.6
        assert (row["lr_scale"], row["lr_applied"], row["update_norm"], row["grad_norm_applied"]) == (0, 0, 0, 0)
        assert row["cos_grad"] is row["cos_update"] is None
        assert row["grad_norm_raw"] > 0
        assert row["lr_asked"] == 1e-6


def test_projected_steps_are_shorter_along_the_last_gradient(tiny, continued):
    options = {"controller.gac.low": 0.0, "controller.gac.high": 2.0, "optimizer": "sgd", "optimizer.lr": 1e-3}
    rows = continued(tiny(controller=["gac"], **options))[1:]
    seen = [row for row in rows if 0 < row["gac_removed_frac"] < 1]
    assert seen
    for row in seen:
        # The angle of what was applied, from that of what was accumulated: tan grows by 1 / (1 − share).
        c, share = row["gac_cos"], row["gac_removed_frac"]
        assert share == pytest.approx(c)
        applied = (1 - share) * c / math.hypot((1 - share) * c, math.sqrt(1 - c * c))
        assert row["cos_grad"] == pytest.approx(applied, abs=1e-4)
        assert row["stepped"]


def test_thresholds_out_of_reach_change_nothing(tiny, completed, shared):
    options = {"delay": "none", "steps": 4}
    plain = completed(tiny(**options))
    out_of_reach = {"controller.gac.low": 0.999999, "controller.gac.high": 2.0}
    same = completed(tiny(controller=["gac"], **options, **out_of_reach))
    assert shared(same, "gac") == shared(plain, "gac")


@pytest.mark.parametrize(("low", "high", "field"), [(1.0, 2.0, "low"), (-2.0, 0.0, "low"), (0.5, 0.4, "high")])
def test_refusals(low, high, field, tiny):
    with pytest.raises(OptionError) as caught:
        tiny(controller=["gac"], **{"controller.gac.low": low, "controller.gac.high": high})
    assert caught.value.field == f"controller.gac.{field}"
