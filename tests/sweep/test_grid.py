"""Axes to cells: what the product holds, what is left out of it, and what is refused."""

import pytest

from stalefront.choice import OptionError
from stalefront.grid import collect_axes, expand, to_grammar
from stalefront.sweepfiles import NamedSweep

NAMED = NamedSweep("named", "", {"delay.S": [1, 4], "optimizer.lr": [1e-4, 1e-3]}, {"steps": 16}, "")
NONE = NamedSweep.from_config(None)


def jobs(composer, sweep, *arguments):
    said = []
    return expand(collect_axes(composer, sweep, arguments), composer, said.append), said


@pytest.mark.parametrize(
    ("sweep", "arguments", "expected"),
    [
        (NONE, (), ["{}"]),
        (NONE, ("seed=0,1",), ["seed=0", "seed=1"]),
        (NONE, ("seed=range(0,5,2)",), ["seed=0", "seed=2", "seed=4"]),
        (NONE, ("seed=choice(3,5)",), ["seed=3", "seed=5"]),
        (NONE, ("seed=1,1",), ["seed=1"]),
        (NONE, ("optimizer.betas=[0.9,0.99],[0.8,0.9]",), ["optimizer.betas=[0.9,0.99]", "optimizer.betas=[0.8,0.9]"]),
        (NONE, ("correction=none,token_tis",), ["correction=none", "correction=token_tis"]),
        (NONE, ("correction=[token_tis]",), ["correction=[token_tis]"]),
        (NONE, ("loss=glob(*grpo)",), ["loss=dr_grpo", "loss=grpo"]),
        (NONE, ("seed=1", "seed=2"), ["seed=2"]),
        (
            NAMED,
            (),
            [f"delay.S={S} optimizer.lr={lr} steps=16" for S in (1, 4) for lr in (0.0001, 0.001)],
        ),
        (NAMED, ("optimizer.lr=1",), ["delay.S=1 optimizer.lr=1 steps=16", "delay.S=4 optimizer.lr=1 steps=16"]),
        (NAMED, ("steps=8", "delay.S=2", "optimizer.lr=1"), ["delay.S=2 optimizer.lr=1 steps=8"]),
        (NAMED, ("optimizer.lr=1", "++delay.S=7"), ["++delay.S=7 optimizer.lr=1 steps=16"]),
    ],
)
def test_expansion(composer, sweep, arguments, expected):
    assert [" ".join(job) or "{}" for job in jobs(composer, sweep, *arguments)[0]] == expected


def test_an_axis_that_the_chosen_variant_lacks_is_left_out_and_said_once(composer):
    found, said = jobs(composer, NAMED, "delay=none")
    assert found == [
        ("delay=none", "optimizer.lr=0.0001", "steps=16"),
        ("delay=none", "optimizer.lr=0.001", "steps=16"),
    ]
    assert said == ["delay.S is left out where delay=none: there is no such option there."]


@pytest.mark.parametrize("away", ["~model.warmup", "model.warmup=null"])
def test_what_the_command_takes_away_is_left_out_of_a_sweep_files_settings(composer, away):
    sweep = NamedSweep("x", "", {"seed": [0]}, {"model.warmup.steps": 9}, "")
    found, said = jobs(composer, sweep, away)
    assert [set(job) for job in found] == [{"seed=0", away}]
    assert said == [f"model.warmup.steps is left out of every cell: {away} takes model.warmup away."]


def test_an_axis_of_the_command_line_is_left_out_of_the_variants_that_lack_it(composer):
    found, said = jobs(composer, NONE, "loss=grpo,cispo", "loss.epsilon=.1,.2", "seed=0,1")
    assert [job for job in found if "loss=cispo" in job] == [("loss=cispo", "seed=0"), ("loss=cispo", "seed=1")]
    assert len(found) == 6
    assert said == ["loss.epsilon is left out where loss=cispo: there is no such option there."]


@pytest.mark.parametrize(
    ("sweep", "arguments", "parts"),
    [
        (NONE, ("optimizer.lrr=1,2",), ["optimizer.lrr = [1, 2]", "Did you mean optimizer.lr"]),
        (NONE, ("steps_=1",), ["steps_ = 1", "Did you mean steps"]),
        (NONE, ("delay=none", "delay.S=1,4"), ["delay.S = [1, 4]", "It exists with delay=reuse"]),
        (NONE, ("~model.warmup", "model.warmup.steps=9"), ["model.warmup.steps = '9'", "Leave out ~model.warmup or"]),
        (NONE, ("model.warmup=null", "model.warmup.steps=9"), ["Leave out model.warmup=null or model.warmup.steps"]),
        (NONE, ("lr=1",), ["lr = 1", "python sweep.py --cfg job"]),
        (NamedSweep("x", "", {"delay.T": [1]}, {}, ""), (), ["delay.T = 1"]),
        (NONE, ("run.checkpoint_every=1,2",), ["run.checkpoint_every", "one value"]),
        (NONE, ("optimizer.lr=interval(0,1)",), ["optimizer.lr", "values that can be listed"]),
        (NONE, ("loss=null,grpo",), ["loss = None", "grpo"]),
        (NamedSweep("x", "", {"seed": [1]}, {"seed": 2}, ""), (), ["sweep.fixed of x"]),
    ],
)
def test_refused(composer, sweep, arguments, parts):
    with pytest.raises(OptionError) as error:
        jobs(composer, sweep, *arguments)
    for part in parts:
        assert part in str(error.value)


@pytest.mark.parametrize(
    "value", [1, 1.25e-4, -0.5, float("inf"), True, None, "grpo", "null", "1", "a,b", "it's", "x\\'y", [1, [2, "a b"]]]
)
def test_values_of_a_file_come_back_from_the_grammar(composer, value):
    assert composer.parse(f"key={to_grammar(value)}").value() == value


@pytest.mark.parametrize("name", ["default", "smoke", "regimes", "losses"])
def test_every_sweep_file_composes(composer, named_sweep, name):
    sweep = named_sweep(name)
    assert sweep.name == name
    assert sweep.question
    cells = composer.cells(expand(collect_axes(composer, sweep, []), composer, print))
    ids = {planned.cell.cell_id for planned in cells.values()}
    assert len(ids) == int(sweep.cost.split()[0])


def test_the_default_sweep_is_the_one_of_the_test_bed(named_sweep):
    sweep = named_sweep("default")
    assert sweep.axes == {
        "delay.S": [1, 4, 16, 64],
        "optimizer.lr": [1.25e-4, 2.5e-4, 5e-4, 1e-3, 2e-3],
        "seed": [0, 1],
    }
    assert sweep.fixed == {"steps": 256}
