"""The cosine trigger: when it fires, what it then does, its two controls, and continuing."""

import math
from itertools import pairwise

import pytest

from stalefront.cell import make_choice
from stalefront.choice import OptionError
from stalefront.controller.cosine_trigger import random_steps, smoothed

KEY = "controller.cosine_trigger."


@pytest.fixture
def trigger(conf_choice, make_cell):
    """`trigger(window=2)`: its state at the beginning of a cell."""

    def make(**fields):
        choice = make_choice("controller", conf_choice("controller", "cosine_trigger") | fields)
        return choice.start(make_cell())

    return make


def fired(memory, cosines, make_step, make_update):
    """Steps before which it fires, when step t has cosine `cosines[t − 1]`; and the scales asked for."""
    steps, scales = [], []
    for step, cosine in enumerate(cosines, start=1):
        scales.append(memory.decide(make_step(step)).scale)
        steps += [step] * memory.fired
        memory.observe(make_update(cosine))
    return steps, scales


@pytest.mark.parametrize(
    ("fields", "cosines", "expected"),
    [
        # A half-life this short follows the cosine itself: three in a row above .5 are complete after step 4.
        ({"window": 3}, [None, 0.9, 0.9, 0.9, 0.9, 0.9], [5]),
        ({"window": 3}, [None, 0.9, 0.1, 0.9, 0.9, 0.9, 0.9], [7]),
        ({"window": 3}, [None, 0.9, 0.9, math.nan, 0.9, 0.9], [6]),
        ({"window": 1, "max_triggers": 3}, [0.9] * 6, [2, 3, 4]),
        ({"window": 2, "max_triggers": 9}, [0.9] * 7, [3, 5, 7]),
        ({"window": 1, "max_triggers": 9, "cool_down": 2}, [0.9] * 8, [2, 5, 8]),
        ({"window": 2, "side": "below", "threshold": 0.0}, [0.9, -0.1, -0.1, 0.0], [4]),
        ({"window": 1, "threshold": 0.9}, [0.9] * 4, []),
        ({"window": 1, "when": "scheduled", "at_steps": [2, 5], "max_triggers": 2}, [None] * 6, [2, 5]),
    ],
)
def test_when_it_fires(fields, cosines, expected, trigger, make_step, make_update):
    memory = trigger(half_life=1e-3, **fields)
    steps, scales = fired(memory, cosines, make_step, make_update)
    assert steps == expected
    assert scales == [0.5 ** sum(t <= step for t in expected) for step in range(1, len(cosines) + 1)]
    assert memory.columns()["cosine_trigger_count"] == len(expected)


def test_the_average_by_hand(trigger, make_step, make_update):
    # Half-life 1: a ← a + (c − a)/2, from the first cosine on.
    assert smoothed(math.nan, 0.4, half_life=1.0) == 0.4
    assert smoothed(0.4, 0.8, half_life=1.0) == pytest.approx(0.6)
    # After h updates an old value counts half.
    average = 1.0
    for _ in range(8):
        average = smoothed(average, 0.0, half_life=8.0)
    assert average == pytest.approx(0.5)
    memory = trigger(half_life=1.0)
    fired(memory, [None, 0.4, 0.8], make_step, make_update)
    assert memory.columns()["cosine_trigger_mean"] == pytest.approx(0.6)


def test_random_steps_are_keyed_apart_and_everywhere():
    found = [random_steps(seed, count=3, horizon=20, cool_down=4) for seed in range(300)]
    assert found[0] == random_steps(0, count=3, horizon=20, cool_down=4)
    assert len(set(found)) > 100
    assert all(b - a > 4 for steps in found for a, b in pairwise(steps))
    assert {step for steps in found for step in steps} == set(range(1, 21))
    # As tight as it gets: one way.
    assert random_steps(0, count=3, horizon=11, cool_down=4) == (1, 6, 11)


def test_multiplied_rates_in_a_run(tiny, continued):
    options = {KEY + "when": "scheduled", KEY + "at_steps": [3, 7], KEY + "max_triggers": 2, KEY + "factor": 0.25}
    rows = continued(tiny(controller=["cosine_trigger"], **options))[1:]
    assert [row["lr_scale"] for row in rows] == [1, 1, *[0.25] * 4, *[0.0625] * 2]
    assert [row["cosine_trigger_fired"] for row in rows].count(True) == 2
    assert [row["lr_applied"] / row["lr_asked"] for row in rows] == [row["lr_scale"] for row in rows]


def test_a_trigger_by_the_cosine_in_a_run(tiny, continued):
    options = {KEY + "window": 2, KEY + "threshold": -2.0, KEY + "half_life": 2.0}
    rows = continued(tiny(controller=["cosine_trigger"], **options))[1:]
    # Cosines exist after steps 2 and 3, and all are above −2.
    assert [row["step"] for row in rows if row["cosine_trigger_fired"]] == [4]
    average = math.nan
    for row in rows[1:]:
        average = smoothed(average, row["cos_grad"], half_life=2.0)
        assert row["cosine_trigger_mean"] == pytest.approx(average)


def test_divided_S_in_a_run(tiny, continued):
    options = {"delay.S": 4, KEY + "action": "divide_S", KEY + "factor": 2, KEY + "when": "scheduled"}
    rows = continued(tiny(controller=["cosine_trigger"], **options, **{KEY + "at_steps": [2]}))[1:]
    assert [row["batch"] for row in rows] == [1, 1, 1, 1, 2, 2, 3, 3]
    assert [row["step_in_batch"] for row in rows] == [1, 2, 3, 4, 1, 2, 1, 2]
    assert [row["lag_max_updates"] for row in rows] == [0, 1, 2, 3, 0, 1, 0, 1]
    assert all(row["lr_scale"] == 1 for row in rows)


def test_S_is_divided_down_to_whole_passes(make_cell):
    delay = make_cell(**{"delay.S": 12, "delay.minibatches": 4}).delay
    assert [delay.steps_divided_by(d) for d in (1, 2, 3, 64)] == [12, 4, 4, 4]


def test_a_reset_in_a_run_starts_adam_anew(tiny, continued):
    options = {KEY + "action": "reset_optimizer", KEY + "factor": None, KEY + "when": "random"}
    rows = continued(tiny(controller=["cosine_trigger"], **options, **{KEY + "max_triggers": 2}))[1:]
    assert [row["cosine_trigger_fired"] for row in rows].count(True) == 2
    assert all(row["lr_scale"] == 1 for row in rows)


def test_never_firing_changes_nothing(tiny, completed, shared):
    plain = completed(tiny())
    same = completed(tiny(controller=["cosine_trigger"], **{KEY + "threshold": math.inf}))
    assert shared(same, "cosine_trigger") == shared(plain, "cosine_trigger")


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        ({"factor": None}, "factor"),
        ({"factor": 1.0}, "factor"),
        ({"action": "divide_S", "factor": 0.5}, "factor"),
        ({"action": "reset_optimizer"}, "factor"),
        ({"at_steps": [3]}, "at_steps"),
        ({"when": "scheduled"}, "at_steps"),
        ({"when": "scheduled", "at_steps": [3, 4], "max_triggers": 2, "cool_down": 1}, "at_steps"),
        ({"when": "scheduled", "at_steps": [9]}, "at_steps"),
        ({"when": "random", "max_triggers": 3, "cool_down": 3}, "max_triggers"),
        ({"window": 0}, "window"),
        ({"half_life": 0.0}, "half_life"),
    ],
)
def test_refusals(overrides, field, tiny):
    with pytest.raises(OptionError) as caught:
        tiny(controller=["cosine_trigger"], **{KEY + name: value for name, value in overrides.items()})
    assert caught.value.field == KEY + field


def test_S_can_be_divided_under_reuse_alone(tiny):
    with pytest.raises(OptionError, match="another one with delay=lag"):
        tiny(controller=["cosine_trigger"], delay="lag", **{KEY + "action": "divide_S", KEY + "factor": 2.0})
    options = {KEY + "action": "reset_optimizer", KEY + "factor": None}
    with pytest.raises(OptionError, match="no moments"):
        tiny(controller=["cosine_trigger"], optimizer="nsgd", **options)
