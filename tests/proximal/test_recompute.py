"""Proximal policy `recompute`: the log-probs that came with the batch stay."""

from stalefront.proximal.recompute import Recompute


def test_nothing_is_replaced(random_inputs):
    inputs = random_inputs()
    assert Recompute()(inputs) is inputs


def test_it_is_the_neutral_choice(make_config, make_cell):
    from stalefront.cell import Cell

    config = make_config()
    without = {key: value for key, value in config.items() if key != "proximal"}
    assert Cell.from_config(without).cell_id == make_cell().cell_id
