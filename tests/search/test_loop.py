"""The search over runs that are made up: what is asked and told, kills, failures, and what a resumed search does."""

import dataclasses
import json
import os
from types import SimpleNamespace

import numpy as np
import optuna
import pytest
from optuna.trial import TrialState

from stalefront.files import read_json
from stalefront.paths import SweepPaths
from stalefront.search import study as journal
from stalefront.search.arms import Arm, Space
from stalefront.search.bisection import candidates
from stalefront.search.loop import Bench, Launched, Search
from stalefront.search.options import SearchOptions

C = 8e-3
OPTIONS = {
    **{"runs_per_arm": 6, "batch": None, "verdict": "remains_zero"},
    **{"collapsed_prob": 0.85, "tolerance": None, "points_per_decade": 8},
}


class Killed(BaseException):
    """The controller dies."""


class Fake:
    """Cells that collapse if lr > C / S; a keyed one in ten says the opposite.

    `dies_at`: number of the launch in which the controller dies, after its first cell. `failing` and `undecided`
    say which cells have no outcome, and which no verdict.
    """

    def __init__(self, root, *, dies_at=None, noise=0.1, failing=lambda S, lr: False, undecided=lambda S, lr: False):
        self.paths, self.dies_at, self.noise = SweepPaths(root), dies_at, noise
        self.failing, self.undecided = failing, undecided
        self.launches, self.ran, self.cells, self.stop_at = [], [], {}, None

    def search(self, levels=(4, 16), seeds=(0, 1, 2), interval=(1e-5, 1e-2), **options):
        arms = tuple(Arm(f"id{S}", f"delay.S={S}", (f"delay.S={S}",)) for S in levels)
        space = Space(arms, candidates(*interval, 8), seeds)
        bench = Bench(self.cell_id, self.launch, self.judge, say=lambda text: None)
        return Search(self.paths, space, SearchOptions(**{**OPTIONS, **options}), bench)

    def cell_id(self, overrides):
        self.cells["|".join(overrides)] = overrides
        return "|".join(overrides)

    def launch(self, jobs):
        ids = ["|".join(job) for job in jobs]
        new = [cell_id for cell_id in ids if cell_id not in self.ran]
        self.launches.append(new)
        for place, cell_id in enumerate(new):
            if len(self.launches) == self.dies_at and place == 1:
                raise Killed
            if not self.failing(*self.where(cell_id)[:2]):
                self.ran.append(cell_id)
        stopped = len(self.launches) == self.stop_at
        if stopped:
            self.ran.pop()
        states = {cell_id: "completed" if cell_id in self.ran else "failed" for cell_id in ids}
        return Launched({i: "interrupted" if stopped and s == "failed" else s for i, s in states.items()}, stopped)

    def where(self, cell_id):
        values = dict(text.split("=") for text in cell_id.split("|"))
        return int(values["delay.S"]), float(values["optimizer.lr"]), int(values["seed"])

    def judge(self, cell_id):
        S, lr, seed = self.where(cell_id)
        if self.undecided(S, lr):
            return None
        flips = np.random.default_rng([S, seed, int(lr * 1e9)]).random() < self.noise
        return bool((lr > C / S) != flips)


@pytest.fixture(autouse=True)
def _no_disk(monkeypatch):
    """The journal syncs every line to disk; a hundred of them take a second."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


def trials(search):
    return search.study.get_trials()


def asked(search):
    return [(run.arm_id, run.lr, run.seed, run.state, run.collapsed) for run in journal.read_runs(search.study)]


def test_a_search_spends_its_budget_and_finds_the_boundary(tmp_path):
    fake = Fake(tmp_path, noise=0.0)
    search = fake.search(runs_per_arm=8)
    assert search.run()
    assert [len(batch) for batch in fake.launches] == [2] * 8
    assert {t.state for t in trials(search)} == {TrialState.COMPLETE}
    for one, S in zip(search.findings(), (4, 16), strict=True):
        assert one.ended_by == "budget"
        assert one.eta50.low < C / S < one.eta50.high
        assert abs(np.log10(one.eta50.value * S / C)) < 0.13
    first = trials(search)[0]
    assert first.params.keys() == {"arm", "log10_lr", "seed"}
    assert first.user_attrs == {
        **{"cell_id": fake.launches[0][0], "arm": "delay.S=4", "seed": 0},
        **{"verdict": "remains_zero", "state": "decided"},
    }
    seeds = [run.seed for run in journal.read_runs(search.study) if run.arm_id == "id4"]
    assert seeds[:4] == [0, 1, 2, 0]


def test_search_json_says_what_was_found(tmp_path):
    search = Fake(tmp_path).search()
    search.run()
    written = read_json(tmp_path / "search.json")
    assert written["format"] == 1
    assert written["search"]["collapsed_prob"] == 0.85
    assert len(written["search"]["log10_edges"]) == len(written["arms"][0]["posterior"]) + 1
    assert [arm["label"] for arm in written["arms"]] == ["delay.S=4", "delay.S=16"]
    assert sum(written["arms"][0]["posterior"]) == pytest.approx(1)
    assert len(written["arms"][0]["runs"]) == 6
    json.dumps(written, allow_nan=False)


@pytest.mark.parametrize("dies_at", [1, 2, 3])
@pytest.mark.parametrize("batch", [None, 1, 5])
def test_a_killed_search_goes_on_as_if_nothing_had_happened(tmp_path, dies_at, batch):
    whole = Fake(tmp_path / "whole").search(batch=batch)
    assert whole.run()
    fake = Fake(tmp_path / "torn", dies_at=None if batch == 1 else dies_at)
    if batch == 1:
        fake.stop_at = dies_at
        assert not fake.search(batch=batch).run()
    else:
        with pytest.raises(Killed):
            fake.search(batch=batch).run()
    left = fake.search(batch=batch)
    assert "running" in {state for *_, state, _ in asked(left)}
    assert left.run()
    assert asked(left) == asked(whole)
    assert len(fake.ran) == len(set(fake.ran)) == 12
    again = fake.search(batch=batch)
    count = len(fake.launches)
    assert again.run()
    assert len(fake.launches) == count


def test_a_stopped_launch_stops_the_search(tmp_path):
    fake = Fake(tmp_path)
    fake.stop_at = 2
    search = fake.search()
    assert not search.run()
    states = [state for *_, state, _ in asked(search)]
    assert states == ["decided", "decided", "decided", "running"]
    assert len(fake.launches) == 2
    assert fake.search().run()


def test_a_trial_torn_while_it_was_asked_is_given_up(tmp_path):
    fake = Fake(tmp_path)
    search = fake.search()
    search.study._storage.create_new_trial(search.study._study_id)
    with (tmp_path / "study.journal").open("a") as file:
        file.write('{"op_code":5,"wor')
    (tmp_path / "study.journal.lock").symlink_to("study.journal")
    resumed = fake.search()
    assert resumed.run()
    assert trials(resumed)[0].state == TrialState.FAIL
    assert len(asked(resumed)) == 12


def test_failed_cells_cost_a_run_now_and_run_again_with_the_next_command(tmp_path):
    fake = Fake(tmp_path, noise=0.0, failing=lambda S, lr: S == 16 and lr == 3.16e-4)
    search = fake.search()
    assert search.run()
    failed = [one for one in asked(search) if one[3] == "failed"]
    assert {(arm, lr) for arm, lr, *_ in failed} == {("id16", 3.16e-4)}
    assert len(asked(search)) == 12
    fake.failing = lambda S, lr: False
    healed = fake.search()
    assert healed.run()
    assert len(asked(healed)) == 12
    assert {state for *_, state, _ in asked(healed)} == {"decided"}
    assert len(trials(healed)) == 12 + len(failed)


def test_a_batch_without_any_finished_cell_stops_the_search(tmp_path):
    fake = Fake(tmp_path, failing=lambda S, lr: True)
    assert not fake.search().run()
    assert len(fake.launches) == 1


def test_undecided_cells_are_pruned_and_cost_a_run(tmp_path):
    fake = Fake(tmp_path, undecided=lambda S, lr: S == 4)
    search = fake.search()
    assert search.run()
    by_arm = journal.runs_by_arm(search.study)
    assert {run.state for run in by_arm["id4"]} == {"undecided"}
    assert len(by_arm["id4"]) == 6
    assert search.findings()[0].mass_C == pytest.approx(np.full(26, 1 / 26))
    assert [t.state for t in trials(search)].count(TrialState.PRUNED) == 6


def test_a_verdict_that_decides_nothing_stops_the_search(tmp_path):
    fake = Fake(tmp_path, undecided=lambda S, lr: True)
    said = []
    search = fake.search()
    search.bench = dataclasses.replace(search.bench, say=said.append)
    assert not search.run()
    assert len(fake.launches) == 1
    assert "remains_zero could decide none of the 2 cells" in said[-1]


def test_arms_budget_and_interval_may_grow(tmp_path):
    fake = Fake(tmp_path)
    assert fake.search(levels=(4,), runs_per_arm=3).run()
    before = fake.ran.copy()
    grown = fake.search(levels=(4, 16, 64), interval=(1e-6, 1e-2), runs_per_arm=5)
    assert grown.run()
    by_arm = journal.runs_by_arm(grown.study)
    assert {arm_id: len(runs) for arm_id, runs in by_arm.items()} == {"id4": 5, "id16": 5, "id64": 5}
    assert fake.ran[:3] == before
    fewer = fake.search(levels=(16,), runs_per_arm=6)
    assert fewer.run()
    assert {a: len(r) for a, r in journal.runs_by_arm(fewer.study).items()} == {"id4": 5, "id16": 6, "id64": 5}


def test_each_verdict_has_a_study_of_its_own(tmp_path):
    fake = Fake(tmp_path)
    assert fake.search().run()
    ran = len(fake.ran)
    other = fake.search(verdict="first_zero")
    assert asked(other) == []
    assert other.run()
    # The answers are the same here, so every cell is there already.
    assert len(fake.ran) == ran


def test_the_sampler_asks_nothing_when_every_arm_has_ended(tmp_path):
    search = Fake(tmp_path).search()
    search.run()
    with pytest.raises(RuntimeError, match="ended"):
        search.study.ask(journal.distributions(search.study, search.rule))
    with pytest.raises(RuntimeError, match="no parameter"):
        search.study.sampler.sample_independent(search.study, SimpleNamespace(), "x", None)


def test_optuna_can_read_the_journal(tmp_path):
    search = Fake(tmp_path).search()
    search.run()
    backend = optuna.storages.journal.JournalFileBackend(str(tmp_path / "study.journal"))
    study = optuna.load_study(study_name="remains_zero", storage=optuna.storages.JournalStorage(backend))
    assert {trial.value for trial in study.trials} <= {0.0, 1.0}
    assert len(study.trials) == 12
