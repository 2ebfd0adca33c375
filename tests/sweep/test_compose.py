"""Overrides to cells: the fast way gives what Hydra's own composition gives."""

import pytest
from omegaconf import OmegaConf

from stalefront.cell import Cell
from stalefront.choice import OptionError


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("delay.S=16", "optimizer.lr=1e-3"),
        ("delay=lag", "delay.lag_updates=5", "delay.via=weights"),
        ("loss=reinforce", "correction=token_tis", "correction.token_tis.cap=3"),
        ("loss=reinforce", "correction=[token_tis]"),
        ("model.config.hidden_size=16", "+model.config.rms_norm_eps=1e-5", "optimizer.betas=[0.8,0.9]"),
        ("model.warmup=null", "loss.epsilon=inf"),
        ("~model.warmup", "+model.warmup={steps:3,batch_size:4,lr:0.1,noise:0}"),
        ("seed=3", "optimizer.warmup_steps=${seed}", "steps=${validation.every}"),
    ],
)
def test_a_cell_is_the_one_that_hydra_composes(composer, overrides):
    whole = composer._loader.load_sweep_config(composer._master, ["~sweep", *overrides])
    expected = OmegaConf.to_container(OmegaConf.masked_copy(whole, [k for k in whole if k != "hydra"]), resolve=True)
    assert composer.cell(overrides).cell == Cell.from_config(expected)


def test_the_empty_correction_is_an_empty_list(composer):
    assert composer.cell(["correction=none"]).cell.correction == composer.cell([]).cell.correction == ()
    assert len(composer.cell(["loss=reinforce", "correction=token_tis"]).cell.correction) == 1


def test_values_do_not_leak_from_cell_to_cell(composer):
    first = composer.cell(["optimizer.lr=1"]).cell
    composer.cell(["optimizer.lr=2", "model.config.hidden_size=8"])
    assert composer.cell([]).cell.optimizer.lr == 5e-4
    assert composer.cell(["optimizer.lr=1"]).cell == first


def test_two_ways_to_say_a_cell_give_one_cell(composer):
    cells = composer.cells([("optimizer.lr=1e-3",), ("optimizer.lr=0.001",), ("optimizer.lr=1e-3", "seed=0")])
    assert len(cells) == 3
    assert len({id(planned) for planned in cells.values()}) == 1


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        (["model=pretrained"], "model.checkpoint = '<absent>'"),
        (["+foo=1"], "foo = 1"),
        (["+run.foo=1"], "run.foo = 1"),
        (["run.keep_checkpoint=1"], "run.keep_checkpoint = 1"),
        (["run.checkpoint_every=0"], "run.checkpoint_every = 0"),
        (["+optimizer.foo=1"], "optimizer.foo = 1"),
        (["delay.S=0"], "delay.S = 0"),
        (["optimizer=3"], "optimizer = 3"),
        (["loss=reinforce", "correction=[token_tis,token_tis]"], "correction = ['token_tis', 'token_tis']"),
    ],
)
def test_refused(composer, overrides, part):
    with pytest.raises(OptionError) as error:
        composer.cell(overrides)
    assert part in str(error.value)


def test_a_grid_of_ten_thousand_composes_each_variant_once(composer, monkeypatch):
    composed = []
    load = composer._loader.load_sweep_config
    monkeypatch.setattr(composer, "_variants", {})
    monkeypatch.setattr(composer._loader, "load_sweep_config", lambda *a, **k: composed.append(a) or load(*a, **k))
    jobs = [(f"loss={loss}", f"seed={seed}") for loss in ("grpo", "cispo") for seed in range(50)]
    assert len(composer.cells(jobs)) == 100
    assert len(composed) == 2


def test_a_list_of_jobs_is_checked_before_any_of_it_runs(composer):
    with pytest.raises(OptionError, match="at least 13"):
        composer.cells([(), ("model.config.max_position_embeddings=8",)])
