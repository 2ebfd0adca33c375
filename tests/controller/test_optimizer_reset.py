"""Forgetting the moments at pushes: when, what is forgotten, and continuing."""

import pytest
import torch

from stalefront.cell import make_choice
from stalefront.choice import OptionError
from stalefront.controller import Decision
from stalefront.optimizer import Optimizer
from stalefront.update import Updater

ADAM = {
    **{"kind": "adamw", "lr": 0.1, "warmup_steps": 0, "betas": [0.9, 0.95], "eps": 1e-8},
    **{"weight_decay": 0.0, "max_grad_norm": None, "grad_accum": 1},
}


def test_every_push_or_every_second(conf_choice, make_step):
    for every, expected in ((1, [False, True, False, True, True]), (2, [False, False, False, True, False])):
        choice = make_choice("controller", conf_choice("controller", "optimizer_reset") | {"every": every})
        memory = choice.start(None)
        pushes = [False, True, False, True, True]
        assert [memory.decide(make_step(new=new)).reset_optimizer for new in pushes] == expected


def test_the_step_after_it_is_a_first_step():
    """Adam's first step has length lr in every entry, whatever the gradient."""
    model = torch.nn.Linear(2, 1, bias=False)
    updater = Updater(model, Optimizer.from_mapping(ADAM))
    steps = []
    for step, reset in enumerate([False, False, True], start=1):
        before = model.weight.detach().clone()
        model.weight.grad = torch.tensor([[1.0, -100.0]]) / step**3
        updater.apply(step, decision=Decision(reset_optimizer=reset))
        steps.append((model.weight.detach() - before).tolist()[0])
    assert steps[0] == pytest.approx([-0.1, 0.1], rel=1e-5)
    assert abs(steps[1][0]) < 0.08
    assert steps[2] == pytest.approx([-0.1, 0.1], rel=1e-5)


def test_in_a_run_it_comes_with_new_batches(tiny, continued):
    rows = continued(tiny(controller=["optimizer_reset"], **{"delay.S": 2}))[1:]
    assert [row["optimizer_reset_now"] for row in rows] == [False, False, True, False, True, False, True, False]


def test_under_a_lag_it_comes_with_later_versions(tiny, completed):
    # π₀ samples the first three batches, each later one is from the next version.
    rows = completed(tiny(controller=["optimizer_reset"], delay="lag", steps=6, **{"delay.lag_updates": 2}))[1:]
    assert [row["optimizer_reset_now"] for row in rows] == [False, False, False, True, True, True]


def test_without_a_push_nothing_changes(tiny, completed, shared):
    plain = completed(tiny(**{"delay.S": 8}))
    same = completed(tiny(controller=["optimizer_reset"], **{"delay.S": 8}))
    assert shared(same, "optimizer_reset") == shared(plain, "optimizer_reset")


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        ({"controller.optimizer_reset.every": 0}, "controller.optimizer_reset.every"),
        ({"optimizer": "sgd"}, "optimizer.kind"),
    ],
)
def test_refusals(overrides, field, tiny):
    with pytest.raises(OptionError) as caught:
        tiny(controller=["optimizer_reset"], **overrides)
    assert caught.value.field == field
