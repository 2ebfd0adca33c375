"""`framework=NAME`: another framework's options through Hydra, to cells that could have been written by hand."""

import pytest

from stalefront.choice import OptionError
from stalefront.files import read_json
from stalefront.frameworks import framework, names
from stalefront.grid import collect_axes, expand
from stalefront.sweepfiles import NamedSweep

EMPTY = NamedSweep.from_config(None)


@pytest.mark.parametrize("name", names())
def test_a_framework_is_the_cell_of_its_recipe(composer, name):
    by_name, by_hand = (outcome(composer, overrides) for overrides in said(name))
    assert by_name == by_hand


def said(name):
    """A framework by its name, and its recipe written out."""
    return [f"framework={name}"], framework(name).recipe({}).overrides()


def outcome(composer, overrides):
    """The cell; or the refusal, since what pairs of options refuse in a cell they refuse however it is said."""
    try:
        return composer.cell(overrides).cell
    except OptionError as error:
        return str(error)


def test_options_reach_the_cell(composer):
    planned = composer.cell(["framework=verl", "framework.clip_ratio_high=0.28", "framework.loss_agg_mode=token-sum"])
    assert (planned.cell.loss.epsilon_high, planned.cell.reduction.choice()) == (0.28, "token_sum")
    assert planned.framework["clip_ratio_high"] == 0.28
    assert composer.cell([]).framework is None


def test_two_ways_to_say_a_method_are_one_cell(composer):
    overrides = framework("vcpo").recipe({}).overrides()
    cells = composer.cells([("framework=vcpo",), tuple(overrides)])
    assert len({id(planned) for planned in cells.values()}) == 1


def test_an_option_is_an_axis(composer):
    arguments = ["framework=vcpo,m2po", "framework.rollout_is_threshold=2,4", "framework.M2_budget=0.04"]
    said = []
    jobs = expand(collect_axes(composer, EMPTY, arguments), composer, said.append)
    cells = {planned.cell.cell_id for planned in composer.cells(jobs).values()}
    assert len(cells) == 3
    assert "framework.M2_budget is left out where framework=vcpo: there is no such option there." in said


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        (["framework=verl", "loss.epsilon=0.1"], "loss.epsilon = '0.1' is not possible. Legal: no value beside"),
        (["loss=gspo", "framework=verl"], "loss = 'gspo'"),
        (["framework=verl", "correction=none"], "correction = 'none'"),
        (["framework=verl", "controller=[vcpo]"], "no value beside framework=verl"),
        (["framework=verl", "framework.rollout_iss=token"], "Did you mean rollout_is"),
        (["framework=verl", "framework.entropy_coeff=0.1"], "There is no entropy bonus."),
        (["framework=verl", "framework.loss_mode=foo"], "framework.loss_mode = 'foo'"),
        (["framework.rollout_is=token"], "Give framework=<one of areal, "),
    ],
)
def test_refused(composer, overrides, part):
    with pytest.raises(OptionError) as error:
        composer.cell(overrides)
    assert part in str(error.value)


def test_the_record_holds_parts_and_options(sweep):
    assert sweep.run("framework=verl", "framework.clip_ratio_high=0.28", "steps=1") == 0
    (folder,) = sweep.cells().values()
    config = read_json(folder / "config.json")
    assert config["framework"].items() >= {"choice": "verl", "clip_ratio_high": 0.28, "tau_neg": 1.05}.items()
    assert config["cell"]["loss"].items() >= {"choice": "dapo", "epsilon_high": 0.28}.items()
    assert "framework" not in config["cell"]
