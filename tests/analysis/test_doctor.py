"""The doctor: every finding on simulated samplers that have it, nothing on those that do not, what it cannot tell."""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest

from stalefront.analysis.doctor import CHECKS, examine
from stalefront.analysis.doctor.base import critical_z
from stalefront.analysis.doctor.reader import read_columns
from stalefront.analysis.doctor.records import COLUMNS, read_records
from stalefront.analysis.doctor.surprisal import surprisal
from stalefront.analysis.doctor.sweep import examine_directory
from stalefront.analysis.report import build_report
from stalefront.analysis.settings import DoctorSettings
from stalefront.record import StepWriter, read_rows

VOCABULARY, BATCH = 40, 1_500


def log_softmax(logits):
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def cut(logp, top):
    """The `top` likeliest tokens, renormalised."""
    smallest = np.sort(logp, -1)[:, -top, None]
    return log_softmax(np.where(logp >= smallest, logp, -np.inf))


# What is drawn from, and the log-prob that is written down, given old (n, V).
SAMPLERS = {
    "quiet": lambda old, random: (old, old + 1e-7 * random.standard_normal(old.shape)),
    "fp8": lambda old, random: (mu := log_softmax(old + 0.03 * random.standard_normal(old.shape)), mu),
    "int4": lambda old, random: (mu := log_softmax(old + 0.15 * random.standard_normal(old.shape)), mu),
    "coarse": lambda old, random: (mu := log_softmax(old + 0.3 * random.standard_normal(old.shape)), mu),
    "noisy log": lambda old, random: (old, old + 0.1 * random.standard_normal(old.shape)),
    "top-k": lambda old, random: (mu := cut(old, 12), mu),
    "top-k, raw": lambda old, random: (cut(old, 6), old),
    "cold": lambda old, random: (mu := log_softmax(old / 0.9), mu),
    "warm": lambda old, random: (mu := log_softmax(old / 1.1), mu),
    "cold, raw": lambda old, random: (log_softmax(old / 0.9), old),
    "warm, raw": lambda old, random: (log_softmax(old / 1.1), old),
}


def batch_columns(kind, random, n=BATCH):
    """Columns of one rollout batch of n tokens, from their definitions."""
    old = log_softmax(2 * random.standard_normal((n, VOCABULARY)))
    drawn, logged = SAMPLERS[kind](old, random)
    edges = np.exp(drawn).cumsum(-1)
    place = np.arange(n), (random.random((n, 1)) * edges[:, -1:] < edges).argmax(-1)
    p = np.exp(old)
    excess = -old[place] + (p * old).sum(-1)
    l = old[place] - logged[place]  # noqa: E741
    return {
        "tokens": n,
        "theta_mu_logratio_mean": float(l.mean()),
        "mismatch_ratio_mean": float(np.exp(l).mean()),
        "mismatch_k1_nats": float(-l.mean()),
        "mismatch_k3_nats": float((np.exp(l) - 1 - l).mean()),
        "mismatch_logratio_abs_mean": float(np.abs(l).mean()),
        "mismatch_logratio_sd_nats": float(l.std()),
        "mismatch_chi2": float(((np.exp(l) - 1) ** 2).mean()),
        "logratio_var_nats2": float(l.var()),
        "mismatch_var_share": 1.0,
        "lag_var_share": 0.0,
        "surprisal_gap_nats": float(excess.mean()),
        "surprisal_gap_se_nats": float(excess.std() / math.sqrt(n)),
        "tail_expected_frac": float(np.where(p < 0.01, p, 0.0).sum(-1).mean()),
        "tail_observed_frac": float((old[place] < math.log(0.01)).mean()),
        "kv_stale_frac": 0.0,
    }


def rows_of(kind, *, batches=20, seed=0, **changed):
    """Step records of an on-policy cell; a value in `changed` is a constant, or a function of the step."""
    random = np.random.default_rng(seed)
    reward = {"reward_val": 0.5, "reward_val_n": 128, "reward_val_passes": 64}
    rows = [{"step": 0, "batch": 0, "version": 0, **reward}]
    for step in range(1, batches + 1):
        row = {"step": step, "batch": step, "at_refresh": True, "version": step, "stepped": True, **reward}
        row |= {f"lag_{name}_updates": 0.0 for name in ("mean", "max", "gen_mean", "wait_mean")}
        row |= {"misaligned_frac": None, "expert_flip_frac": None, "route_fallback_frac": None}
        row |= batch_columns(kind, random)
        rows.append(row | {k: v(step) if callable(v) else v for k, v in changed.items()})
    return rows


GROUPS = ("mismatch", "replay", "correction", "proximal")


@pytest.fixture
def diagnose(tmp_path, cell_config):
    """`diagnose(rows, **dotted)`: diagnosis of one cell with these rows and settings."""

    def run(rows, *, warnings=(), **changes):
        path = tmp_path / "steps.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        lists = {name: changes.pop(name) for name in GROUPS if name in changes}
        cell = cell_config(S=1, lr=1e-3, seed=0, **changes) | lists
        return examine([read_records(path, "cell", cell, {"warnings": list(warnings)})], 1)

    return run


def named(diagnosis):
    return {finding.id: finding for finding in diagnosis.findings}


def test_a_quiet_run_has_nothing(diagnose):
    got = diagnose(rows_of("quiet"))
    assert got.findings == ()
    assert got.gaps == ()


FOUND = {
    "fp8": {"sampler-mismatch": "notice"},
    "coarse": {"sampler-mismatch": "problem"},
    "noisy log": {"sampler-mismatch": "problem"},
    "top-k": {"truncated-support": "problem"},
    "top-k, raw": {"logged-raw": "problem"},
    "cold": {"temperature": "problem", "sampler-mismatch": "problem"},
    "warm": {"temperature": "problem", "sampler-mismatch": "problem"},
    "cold, raw": {"temperature": "problem"},
    "warm, raw": {"temperature": "problem"},
}


@pytest.mark.parametrize("kind", FOUND)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_sampler_has_its_finding_and_no_other(diagnose, kind, seed):
    got = diagnose(rows_of(kind, seed=seed))
    assert {name: finding.severity for name, finding in named(got).items()} == FOUND[kind]


@pytest.mark.parametrize(("kind", "signature"), [("coarse", "sampler"), ("noisy log", "logging noise")])
def test_the_mismatch_is_named_by_its_signature(diagnose, kind, signature):
    got = named(diagnose(rows_of(kind)))["sampler-mismatch"]
    assert f"signature: {signature} " in got.evidence


@pytest.mark.parametrize(("kind", "factor"), [("cold", 0.9), ("warm", 1.1), ("cold, raw", 0.9), ("warm, raw", 1.1)])
def test_the_temperature_is_estimated(diagnose, kind, factor):
    evidence = named(diagnose(rows_of(kind)))["temperature"].evidence
    assert float(evidence.split("about ")[1].split(" times")[0]) == pytest.approx(factor, abs=0.03)
    assert ("logged raw" in evidence) == ("raw" in kind)


def test_evidence_holds_numbers_of_the_records(diagnose):
    rows = rows_of("top-k, raw")
    got = named(diagnose(rows))["logged-raw"]
    assert got.numbers["tokens"] == 20 * BATCH
    expected = np.mean([row["surprisal_gap_nats"] for row in rows[1:]])
    assert got.numbers["surprisal_gap_nats"] == pytest.approx(expected)
    assert (got.cells, got.checked, got.worst) == (1, 1, "cell")


def test_false_alarms_of_the_surprisal_are_as_rare_as_asked_for():
    # Sums of many tokens are normal, so whole cells are drawn by their means; 3000 tests at 1 %: 30 ± 5.4.
    random = np.random.default_rng(0)
    z = critical_z(0.01)
    gaps = random.standard_normal(3_000)
    assert abs(int((np.abs(gaps) > z).sum()) - 30) < 4 * 5.4
    assert critical_z(0.05) == pytest.approx(1.959964, abs=1e-5)


def test_a_quiet_sweep_of_many_cells_has_nothing(tmp_path, cell_config):
    cell, path = cell_config(S=1, lr=1e-3, seed=0), tmp_path / "steps.jsonl"

    cells = []
    for seed in range(100):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows_of("quiet", batches=2, seed=seed)))
        cells.append(read_records(path, str(seed), cell, {}))
    assert examine(cells, len(cells)).findings == ()
    # With a chance of 30 % in every cell there are some.
    loose = examine(cells, 1, DoctorSettings(alpha=0.3)).findings
    assert {finding.id for finding in loose} <= {"logged-raw", "temperature"}
    assert sum(finding.cells for finding in loose) > 10


def test_log_probs_that_are_missing_while_a_correction_is_on(diagnose):
    gone = rows_of("quiet", theta_mu_logratio_mean=None)
    got = named(diagnose(gone, correction=[{"choice": "icepop"}]))["log-probs"]
    assert "null in 20 of 20 learner steps, with correction icepop" in got.evidence
    assert "log-probs" not in named(diagnose(gone))


ZERO = dict.fromkeys(
    [name for name in COLUMNS if name.startswith("mismatch_") and name != "mismatch_var_share"], 0.0
) | {"mismatch_ratio_mean": 1.0}


def test_log_probs_that_were_recomputed(diagnose):
    rows = rows_of("quiet", **ZERO)
    got = named(diagnose(rows, mismatch=[{"choice": "fp8", "strength": 1.0}]))
    assert "exactly 0 in all 20 learner steps, with mismatch fp8" in got["log-probs"].evidence
    for innocent in ([], [{"choice": "fp8", "strength": 0.0}], [{"choice": "top_p", "logged": "raw"}]):
        assert "log-probs" not in named(diagnose(rows, mismatch=innocent))


def test_stale_states_and_a_mismatch_that_begins_with_the_first_update(diagnose):
    got = named(diagnose(rows_of("quiet", kv_stale_frac=lambda step: 0.5 * (step > 10))))["kv-not-cleared"]
    assert "0.25 of the tokens, in 10 of 20 rollout batches" in got.evidence
    random = np.random.default_rng(3)
    begins = rows_of("quiet")
    for row in begins[2:]:
        row.update(batch_columns("coarse", random))
    assert "in the first rollout batch and" in named(diagnose(begins))["kv-not-cleared"].evidence
    assert "kv-not-cleared" not in named(diagnose(rows_of("coarse")))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"version": lambda step: step - 5 * (step > 12)}, "the trainer's version falls at step 13, from 12 to 8"),
        ({"lag_max_updates": lambda step: 6 * (step == 9)}, "the version that samples falls at step 9, from 7 to 2"),
        ({"lag_mean_updates": lambda step: -1.0 * (step == 3)}, "the lag is negative in 1 steps, down to −1"),
    ],
)
def test_versions_that_go_backwards(diagnose, changed, words):
    assert words in named(diagnose(rows_of("quiet", **changed)))["version-backwards"].evidence


def test_batches_of_several_versions_may_reach_back(diagnose):
    rows = rows_of("quiet", lag_max_updates=lambda step: 6.0 * (step == 9), lag_gen_mean_updates=1.0)
    assert diagnose(rows).findings == ()


def test_text_that_was_encoded_again(diagnose):
    got = diagnose(
        rows_of("quiet", misaligned_frac=lambda step: 0.02 * (step % 2)), mismatch=[{"choice": "retokenise"}]
    )
    evidence = named(got)["retokenised"].evidence
    assert evidence.startswith("0.01 of the sampled tokens in 10 of 20 rollout batches, at most 0.02 in one")
    assert evidence.endswith("; configured mismatch: retokenise")


FLIPS = {
    "expert_flip_frac": 0.02, "expert_flip_token_frac": 0.05, "route_fallback_frac": 0.01,
    "expert_flip_layer_0_frac": 0.01, "expert_flip_layer_1_frac": 0.03,
}  # fmt: skip


def test_experts_that_flip_without_replay_and_routes_that_are_missing_with_it(diagnose):
    alone = named(diagnose(rows_of("quiet", **FLIPS)))
    assert set(alone) == {"expert-flips"}
    assert alone["expert-flips"].severity == "problem"
    assert "most in layer 1: 0.03" in alone["expert-flips"].evidence
    few = named(diagnose(rows_of("quiet", **FLIPS | {"expert_flip_frac": 1e-3})))
    assert few["expert-flips"].severity == "notice"
    assert set(named(diagnose(rows_of("quiet", **FLIPS), replay={"choice": "r3"}))) == {"replay-fallback"}
    # Routes of the trainer leave the sampler's flips as they are.
    assert set(named(diagnose(rows_of("quiet", **FLIPS), replay="r2"))) == {"expert-flips"}
    assert set(named(diagnose(rows_of("quiet", **FLIPS), replay="none"))) == {"expert-flips"}


def test_a_correction_that_never_acted(diagnose):
    got = named(diagnose(rows_of("quiet"), warnings=["inert: ['loss.grpo', 'correction.icepop']", "else"]))
    assert set(got) == {"inert-correction"}
    assert got["inert-correction"].evidence == "icepop changed no weight and rejected no token in 20 learner steps"
    assert diagnose(rows_of("quiet"), warnings=["inert: ['loss.grpo']"]).findings == ()


def test_older_records_are_read_as_far_as_they_go(diagnose):
    new = {name for name in COLUMNS if name.startswith(("surprisal", "tail", "kv_", "misaligned", "expert", "route"))}
    old_rows = []
    for row in rows_of("coarse"):
        kept = {k: v for k, v in row.items() if k not in new and not k.startswith("mismatch_")}
        if row["step"]:
            kept |= {
                "old_mu_logratio_mean": -row["mismatch_k1_nats"],
                "old_mu_k3_nats": row["mismatch_k3_nats"],
                "old_mu_logratio_abs_mean": row["mismatch_logratio_abs_mean"],
            }
        old_rows.append(kept)
    got = diagnose(old_rows)
    assert set(named(got)) == {"sampler-mismatch"}
    assert "the records hold no standard deviation" in named(got)["sampler-mismatch"].evidence
    lacking = {"retokenised", "truncated-support", "logged-raw", "temperature", "expert-flips", "replay-fallback"}
    assert {gap.id for gap in got.gaps} == lacking
    assert {gap.why for gap in got.gaps} == {"the records, of an older version, lack it"}
    # Under another proximal policy old/μ is not a mismatch of the sampler.
    assert diagnose(old_rows, proximal={"choice": "ema"}).findings == ()


def test_what_trl_does_not_record_is_said(diagnose):
    rows = [{**row, **dict.fromkeys(batch_columns("quiet", np.random.default_rng(0)))} for row in rows_of("quiet")]
    got = diagnose(rows, **{"engine.choice": "trl"})
    assert got.findings == ()
    assert {gap.why for gap in got.gaps} == {"engine=trl does not record it"}
    assert {"log-probs", "sampler-mismatch", "logged-raw"} <= {gap.id for gap in got.gaps}


def test_columns_are_read_as_json_reads_them(tmp_path):
    path = tmp_path / "steps.jsonl"
    writer = StepWriter(path)
    for step in range(3):
        writer.append({"step": step, "loss": math.nan, "tokens": 7, "stepped": step > 0})
    writer.append({"step": 3, "loss": -math.inf, "removed_icepop_frac": 0.5})
    writer.close()
    with path.open("a") as out:
        out.write(json.dumps({"version": -2.5e-7, "step": 4, "stepped": None}) + "\n")
        out.write('{"step": 5, "lo')
    names = ("step", "loss", "stepped", "version", "removed_icepop_frac", "tokens")
    rows = list(read_rows(path))
    found = list(read_columns(path, lambda name: name in names))
    assert [row.named for row in found] == [frozenset(row) for row in rows]
    for got, row in zip(found, rows, strict=True):
        expected = {name: row[name] for name in row if name in names}
        assert json.dumps(got.values) == json.dumps({k: v if v is None else float(v) for k, v in expected.items()})
    assert list(read_columns(tmp_path / "none", lambda name: True)) == []


@pytest.mark.parametrize(
    "line", ['{"step":2,"lo', '{"step":2,"loss":0.', "[1]", '{"step":2,"loss":x}', '{"step":2,"loss":[1,2]}', ""]
)
def test_a_broken_line_is_an_error(tmp_path, line):
    path = tmp_path / "steps.jsonl"
    path.write_text('{"step":1,"loss":0.5}\n' + line + "\n")
    with pytest.raises(ValueError, match=r"Expecting|Unterminated|not an object|could not convert"):
        list(read_columns(path, lambda name: True))


def test_a_cell_without_a_step_is_counted(diagnose):
    got = diagnose([{"step": 0, "version": 0}])
    assert got.findings == ()
    assert len(got.gaps) == len(CHECKS)


def test_batches_that_are_not_finite_are_left_out_and_counted(diagnose):
    rows = rows_of("coarse")
    for row in rows[-3:]:
        row.update({name: math.nan for name in batch_columns("coarse", np.random.default_rng(0)) if name != "tokens"})
    got = named(diagnose(rows))["sampler-mismatch"]
    assert got.numbers["tokens"] == 17 * BATCH
    assert got.evidence.endswith("3 batches are not finite and left out")


def test_every_batch_counts_once(tmp_path, cell_config):
    rows = rows_of("coarse", batches=4)
    repeated = [rows[0]]
    for row in rows[1:]:
        for part in range(3):
            repeated.append(row | {"step": 3 * row["step"] - 2 + part, "at_refresh": part == 0})
    seen = []
    for name, written in (("once", rows), ("thrice", repeated), ("twice written", [*rows, rows[-1]])):
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in written))
        seen.append(surprisal(read_records(path, name, cell_config(S=1, lr=1e-3, seed=0), {})))
    assert seen[0] == seen[1] == seen[2]


@pytest.fixture(scope="module")
def mixed(tmp_path_factory, cell_config, write_cell, write_plan):
    """Three cells: a quiet one, a coarse sampler, and a coarser one of another arm."""
    root = tmp_path_factory.mktemp("doctor") / "mixed"
    cells = {name: cell_config(S=1, lr=1e-3, seed=0, **{"loss.beta": i / 10}) for i, name in enumerate("abc")}
    write_plan(root, cells)
    for i, (name, kind) in enumerate(zip("abc", ("quiet", "int4", "coarse"), strict=True)):
        write_cell(root, name, cells[name], rows_of(kind, seed=i, batches=12))
    return root


def test_findings_of_a_sweep_are_grouped_and_name_the_worst_cell(mixed):
    got = examine_directory(mixed)
    (finding,) = got.diagnosis.findings
    assert (finding.id, finding.severity) == ("sampler-mismatch", "problem")
    assert (finding.cells, finding.checked, finding.worst) == (2, 3, "c")
    alone = examine_directory(mixed / "cells" / "c")
    assert alone.name == "c"
    assert alone.diagnosis.findings[0].evidence == finding.evidence


def test_a_folder_that_is_neither_and_a_broken_file_are_errors(mixed, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"plan\.json"):
        examine_directory(tmp_path)
    broken = shutil.copytree(mixed, tmp_path / "broken")
    (broken / "cells" / "b" / "steps.jsonl").write_text("no json\n{}\n")
    with pytest.raises(ValueError, match=r"cells/b/steps\.jsonl holds a line that is not a step record"):
        examine_directory(broken)
    (broken / "cells" / "b" / "outcome.json").write_text("{")
    with pytest.raises(ValueError, match=r"outcome\.json is not readable JSON"):
        examine_directory(broken)


def test_the_report_has_a_section_with_the_numbers_of_the_records(mixed, tmp_path):
    files = build_report(shutil.copytree(mixed, tmp_path / "mixed"))
    again = build_report(shutil.copytree(mixed, tmp_path / "again" / "mixed"))
    text = files.markdown.read_text()
    assert files.markdown.read_bytes() == again.markdown.read_bytes()
    assert files.html.read_bytes() == again.html.read_bytes()
    section = text.split("## Mismatch: do sampler and trainer agree?")[1].split("\n## ")[0]
    rows = [[part.strip() for part in line.strip("|").split("|")] for line in section.splitlines() if "beta=" in line]
    assert [row[-3] for row in rows] == ["none", "sampler", "sampler"]
    assert all(row[-2:] == ["1", "0"] for row in rows)
    assert "**sampler-mismatch** (problem)." in section
    assert "In 2 of 3 cells, most in c:" in section
    assert '<h2 id="mismatch">' in files.html.read_text()


def test_a_quiet_sweep_has_no_section(tmp_path, make_sweep, cell_config, write_cell, write_plan):
    cell = cell_config(S=1, lr=1e-3, seed=0)
    write_plan(tmp_path / "quiet", {"a": cell})
    write_cell(tmp_path / "quiet", "a", cell, rows_of("quiet"))
    older = make_sweep(tmp_path / "older", S=(4,), lrs=(1e-3,), seeds=(0,))
    for root in (tmp_path / "quiet", older):
        files = build_report(root)
        assert "mismatch" not in files.html.read_text().lower()


@pytest.mark.parametrize(("name", "value"), [("alpha", 0.0), ("alignment", 1.5), ("min_tokens", 1)])
def test_settings_refuse_nonsense(name, value):
    with pytest.raises(ValueError, match=f"DoctorSettings.{name}={value}"):
        DoctorSettings(**{name: value})


def test_every_finding_is_documented():
    text = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text()
    assert all(f"## `{check.name}`" in text for check in CHECKS)


@pytest.mark.parametrize("kind", ["cold", "cold, raw", "quiet"])
def test_a_batch_that_is_trained_on_in_parts_is_judged_as_a_whole(kind, diagnose):
    whole = named(diagnose(rows_of(kind)))
    parts = named(diagnose(rows_of(kind, tokens=BATCH // 4, batch_tokens=BATCH)))
    assert parts.keys() == whole.keys()
    assert ("temperature" in whole) == (kind != "quiet")
    if kind != "quiet":
        assert parts["temperature"] == whole["temperature"]
