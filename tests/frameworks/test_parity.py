"""`stalefront parity`: its lines, totals and exit codes."""

import json
import math

import pytest
import torch

from stalefront.cli import main
from stalefront.parity import GoldenFile, Unreadable, number, relative_error


def test_files_are_reported_and_totalled(golden, capsys):
    names = ("verl__cispo__eps02", "roll__pg_topr__topr", "roll__pg_ppo__ppo_filter_token_mean")
    assert main(["parity", *(str(golden(name)) for name in names)]) == 0
    out = capsys.readouterr().out
    assert "equal     verl__cispo__eps02.json\n" in out
    assert "declined  roll__pg_ppo__ppo_filter_token_mean.json: ROLL's token-mean leaves out its mask" in out
    assert out.splitlines()[-3:] == [
        "roll             1 equal, 0 miss, 1 declined",
        "verl             1 equal, 0 miss, 0 declined",
        "all              2 equal, 0 miss, 1 declined",
    ]


def test_a_miss_is_an_exit_code(changed, capsys):
    path = changed("verl__cispo__eps02", lambda stored: stored["outputs"].update(loss=1.0))
    assert main(["parity", str(path)]) == 1
    assert "miss      verl__cispo__eps02.json: loss: relative error 1.2e+00\n" in capsys.readouterr().out


def test_tables_are_declined_and_not_counted(tmp_path, capsys):
    stored = {"peer": "roll", "function": "group_queue", "settings": {}, "inputs": {}, "outputs": {"rows": []}}
    path = tmp_path / "roll__group_queue__table.json"
    path.write_text(json.dumps(stored))
    assert main(["parity", str(path)]) == 0
    out = capsys.readouterr().out
    assert "declined  roll__group_queue__table.json: staleness rules come later" in out
    assert "0 equal, 0 miss, 0 declined (1 not counted: staleness rules)" in out


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda stored: stored.pop("inputs"), "it lacks inputs"),
        (lambda stored: stored.update(peer="vverl"), "no mapping for its peer"),
        (lambda stored: stored["inputs"].pop("logp_mu"), "not those of a loss: KeyError('logp_mu')"),
        (lambda stored: stored["inputs"].update(logp_mu=[["a"]]), "not those of a loss"),
    ],
)
def test_unreadable_files(changed, capsys, golden, change, part):
    path = changed("verl__cispo__eps02", change)
    assert main(["parity", str(path), str(golden("verl__cispo__eps_10_40"))]) == 2
    captured = capsys.readouterr()
    assert part in captured.err
    assert "equal     verl__cispo__eps_10_40.json" in captured.out


def test_no_file_and_no_json(tmp_path):
    with pytest.raises(Unreadable, match="No such file"):
        GoldenFile.read(tmp_path / "absent.json")
    (tmp_path / "text.json").write_text("no json")
    with pytest.raises(Unreadable):
        GoldenFile.read(tmp_path / "text.json")


def test_an_unknown_setting_is_declined_with_its_name(changed, capsys):
    path = changed("verl__cispo__eps02", lambda stored: stored["settings"].update(clip_ratio_lo=0.1))
    assert main(["parity", str(path)]) == 0
    assert "framework.clip_ratio_lo = 0.1 is not possible" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([1.0, 2.5], [1.0, 2.0], 0.25),
        ([math.nan, 1.0], [math.nan, 1.0], 0.0),
        ([math.inf, 1.0], [math.inf, 1.0], 0.0),
        ([1.0, 1.0], [math.inf, 1.0], math.inf),
        ([math.nan, 1.0], [1.0, 1.0], math.inf),
        ([1e-30], [0.0], math.inf),
        ([0.0], [0.0], 0.0),
    ],
)
def test_relative_error(ours, theirs, expected):
    found = relative_error(torch.tensor(ours, dtype=torch.float64), torch.tensor(theirs, dtype=torch.float64))
    assert found == expected


def test_numbers_as_text():
    assert number(["inf", "-inf", 1]).tolist() == [math.inf, -math.inf, 1.0]
    assert number("nan").isnan()
