"""A capped update: it is the step of a smaller rate, for every optimizer, and the record says so."""

import math

import pytest
import torch

from stalefront.choice import OptionError
from stalefront.controller import Decision
from stalefront.optimizer import Optimizer
from stalefront.update import Updater, flat

PLAIN = {
    **{"kind": "sgd", "lr": 0.5, "warmup_steps": 0, "betas": None, "eps": None},
    **{"weight_decay": 0.1, "max_grad_norm": None, "grad_accum": 1},
}
KINDS = {
    "sgd": PLAIN,
    "adamw": PLAIN | {"kind": "adamw", "betas": [0.9, 0.95], "eps": 1e-8},
    "nsgd": PLAIN | {"kind": "nsgd", "weight_decay": 0.0},
}


def made(kind):
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 5)
    return model, Updater(model, Optimizer.from_mapping(KINDS[kind]))


def gradient(model, step):
    random = torch.Generator().manual_seed(step)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=random)


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_step_of_a_smaller_rate(kind):
    model, updater = made(kind)
    gradient(model, 1)
    free = updater.apply(1)
    other, capped = made(kind)
    gradient(other, 1)
    got = capped.apply(1, decision=Decision(cap=free.update_norm / 4))
    assert got.cap_factor == pytest.approx(0.25)
    assert got.update_norm == pytest.approx(free.update_norm / 4, rel=1e-6)
    assert got.lr_applied == pytest.approx(0.125)
    assert got.lr_scale == got.cap_factor
    third, slow = made(kind)
    gradient(third, 1)
    slow.apply(1, 0.25)
    assert torch.allclose(flat(list(third.parameters())), flat(list(other.parameters())), rtol=0, atol=1e-7)
    # The moments took in the whole gradient: the next steps agree as well.
    for params, up in ((other, capped), (third, slow)):
        gradient(params, 2)
        up.apply(2)
    assert torch.allclose(flat(list(third.parameters())), flat(list(other.parameters())), rtol=0, atol=1e-6)


def test_a_short_step_is_left_alone_to_the_last_bit():
    one, free = made("adamw")
    two, capped = made("adamw")
    for step in (1, 2):
        gradient(one, step)
        gradient(two, step)
        assert free.apply(step) == capped.apply(step, decision=Decision(cap=100.0))
    assert torch.equal(flat(list(one.parameters())), flat(list(two.parameters())))


def test_a_step_that_is_not_finite_stays_so():
    model, updater = made("sgd")
    gradient(model, 1)
    model.bias.grad[0] = math.inf
    got = updater.apply(1, decision=Decision(cap=0.1))
    assert not got.finite
    assert got.cap_factor == 1.0


def test_in_a_run_no_update_is_longer(tiny, continued):
    rows = continued(tiny(controller=["update_cap"], **{"controller.update_cap.cap": 0.02}))[1:]
    for row in rows:
        assert row["update_norm"] <= 0.02 * (1 + 1e-5)
        assert row["lr_scale"] == row["update_cap_factor"]
        assert row["lr_applied"] == pytest.approx(row["lr_asked"] * row["lr_scale"])
    assert min(row["update_cap_factor"] for row in rows) < 1


def test_a_high_cap_changes_nothing(tiny, completed, shared):
    plain = completed(tiny())
    same = completed(tiny(controller=["update_cap"], **{"controller.update_cap.cap": 1e9}))
    assert shared(same, "update_cap") == shared(plain, "update_cap")


def test_refusal(tiny):
    with pytest.raises(OptionError, match="a number above 0"):
        tiny(controller=["update_cap"], **{"controller.update_cap.cap": 0.0})
