"""Arms: whole methods as values of one axis, which leave a cell's identity to its parts."""

from pathlib import Path

import pytest

from stalefront.grid import collect_axes, expand

ROOT = Path(__file__).parents[2]
ARMS = sorted(p.stem for p in (ROOT / "conf/arm").glob("*.yaml"))
# Losses that differ from another one in what they divide by alone, and a weight that is geometric_tis where a
# completion is one turn.
NOT_IN_THE_SWEEP = {"loss": {"bnpo", "dapo", "dr_grpo", "gpg"}, "correction": {"none", "segment_tis"}}
# One learning rate and seed stand for all.
THIN = ("optimizer.lr=0.001", "seed=0")


def test_none_is_the_default_and_changes_nothing(composer):
    assert composer.cell(["arm=none"]).cell.cell_id == composer.cell([]).cell.cell_id


@pytest.mark.parametrize(
    ("arm", "parts"),
    [
        ("sapo", ["loss=sapo"]),
        ("reinforce_token_tis_normalized", ["loss=reinforce", "correction=[token_tis,normalize]"]),
        ("reinforce_kpop_ratio", ["loss=reinforce", "correction=kpop", "correction.kpop.weight=ratio"]),
        ("grpo_kpop", ["loss=grpo", "correction=kpop", "correction.kpop.weight=one"]),
        ("grpo_sequence_mask", ["correction=sequence_mask"]),
    ],
)
def test_an_arm_is_its_parts(composer, arm, parts):
    assert composer.cell([f"arm={arm}"]).cell.cell_id == composer.cell(parts).cell.cell_id


def test_typed_options_reach_into_an_arm(composer):
    cell = composer.cell(["arm=reinforce_token_tis", "correction.token_tis.cap=5"]).cell
    assert cell.correction[0].cap == 5


@pytest.fixture(scope="module")
def planned(composer, named_sweep):
    """Cells of the sweep under reuse, at one learning rate and seed."""
    axes = collect_axes(composer, named_sweep("corrections"), (*THIN, "delay=reuse"))
    return composer.cells(expand(axes, composer, print))


def test_every_arm_of_the_sweep_makes_valid_cells_of_its_own(planned, named_sweep):
    axes = named_sweep("corrections").axes
    assert len({p.cell.cell_id for p in planned.values()}) == len(planned) == len(axes["arm"]) * len(axes["delay.S"])
    assert set(axes["arm"]) == set(ARMS) - {"none"}


def test_the_name_of_an_arm_begins_with_its_loss_and_first_correction(planned):
    for overrides, found in planned.items():
        arm = overrides[0].removeprefix("arm=")
        names = [found.cell.loss.choice(), *(c.choice() for c in found.cell.correction[:1])]
        assert arm.startswith("_".join(names))


def test_under_lag_too(composer, named_sweep):
    sweep = named_sweep("corrections")
    axes = collect_axes(composer, sweep, (*THIN, "arm=reinforce_icepop,grpo_opsm", "delay=lag"))
    cells = composer.cells(expand(axes, composer, print))
    assert sorted(p.cell.S for p in cells.values()) == [4, 4, 16, 16, 64, 64]
    a = sweep.axes
    points = len(a["arm"]) * (len(a["delay.S"]) + len(a["delay.lag_updates"]))
    assert int(sweep.cost.split()[0]) == points * len(a["optimizer.lr"]) * len(a["seed"])


def test_cells_differ_in_method_and_axes_alone(planned):
    cells = [p.cell for p in planned.values()]
    assert len({repr((c.model, c.task, c.optimizer, c.steps, c.seed, c.validation)) for c in cells}) == 1
    assert {c.S for c in cells} == {1, 4, 16, 64}


@pytest.mark.parametrize("group", ["loss", "correction"])
def test_the_sweep_holds_every_loss_and_correction(planned, group):
    used = set()
    for p in planned.values():
        used |= {p.cell.loss.choice()} if group == "loss" else {c.choice() for c in p.cell.correction}
    on_disk = {f.stem for f in (ROOT / "conf" / group).glob("*.yaml")}
    assert used == on_disk - NOT_IN_THE_SWEEP[group]
