"""The native engine runs every delay, loss and correction there is."""

from pathlib import Path

import pytest

CONF = Path(__file__).parents[2] / "conf"
LOSSES = sorted(path.stem for path in (CONF / "loss").glob("*.yaml"))
DELAYS = sorted(path.stem for path in (CONF / "delay").glob("*.yaml"))


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("delay", DELAYS)
def test_every_loss_under_every_delay(loss, delay, make_cell, completed):
    rows = completed(make_cell(steps=5, loss=loss, delay=delay, **{"loss.beta": 0.04}))
    assert rows[-1]["version"] == rows[-1]["step"] == 5
    assert all(row["update_norm"] > 0 for row in rows[1:])


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "nsgd"])
def test_every_optimizer_learns_something(optimizer, make_cell, completed):
    rows = completed(make_cell(steps=5, optimizer=optimizer, **{"optimizer.warmup_steps": 0}))
    assert rows[-1]["dist_from_start"] > 0
