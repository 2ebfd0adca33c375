"""The step record: its columns, declared once with unit and equation, and its file."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple


class Column(NamedTuple):
    """Name, unit and meaning of a column; `wall_clock` ones may differ between two runs of one cell."""

    name: str
    unit: str
    what: str
    wall_clock: bool = False


def _pair(pair: str, what: str) -> list[Column]:
    return [
        Column(f"{pair}_ratio_mean", "", f"mean of r = {what} over valid tokens, before any mask"),
        Column(f"{pair}_ratio_max", "", f"largest {what}"),
        Column(f"{pair}_logratio_mean", "nats", f"mean log {what}"),
        Column(f"{pair}_logratio_abs_mean", "nats", f"mean |log {what}|"),
        Column(f"{pair}_logratio_sd_nats", "nats", f"standard deviation of log {what}"),
        Column(f"{pair}_logratio_q05", "nats", f"5 % quantile of log {what}"),
        Column(f"{pair}_logratio_q50", "nats", f"median of log {what}"),
        Column(f"{pair}_logratio_q95", "nats", f"95 % quantile of log {what}"),
        Column(f"{pair}_k1_nats", "nats/token", f"mean of −log {what}"),
        Column(f"{pair}_k2_nats", "nats/token", f"mean of (log {what})²/2"),
        Column(f"{pair}_k3_nats", "nats/token", f"mean of r − 1 − log r, r = {what}"),
        Column(f"{pair}_chi2", "", f"mean of (r − 1)², r = {what}"),
    ]


COLUMNS: tuple[Column, ...] = (
    Column("step", "learner steps", "t; 0 is the row before the first update"),
    Column("batch", "rollout batches", "M, the weight-sync index, from 1"),
    Column("step_in_batch", "learner steps", "1 … S"),
    Column("at_refresh", "bool", "first learner step on a rollout batch"),
    Column("version", "updates", "applied updates after this step"),
    Column("stepped", "bool", "the update was applied"),
    Column("lr_asked", "", "rate of the schedule"),
    Column("lr_scale", "", "product of step scales, of corrections and controllers; 0 where the step was skipped"),
    Column("lr_applied", "", "lr_asked · lr_scale"),
    Column("tokens", "tokens", "completion tokens in the update"),
    Column("tokens_kept_frac", "share", "tokens that corrections keep, with a weight other than 0"),
    Column("rows_kept_frac", "share", "sequences with such a token"),
    Column("lag_mean_updates", "updates", "mean of version before the update − version of the token"),
    Column("lag_max_updates", "updates", "its maximum"),
    Column("lag_wait_mean_updates", "updates", "part since the sequence was finished"),
    Column("lag_gen_mean_updates", "updates", "part within generation"),
    Column("reward_train", "", "mean reward of the rollout batch"),
    Column("reward_train_n", "samples", "its sequences"),
    Column("reward_train_passes", "samples", "its sequences with reward > 0"),
    Column("reward_val", "", "mean reward on held-out prompts, after this step"),
    Column("reward_val_n", "samples", "held-out samples"),
    Column("reward_val_passes", "samples", "held-out samples with reward > 0"),
    Column("reward_std_group_mean", "", "mean over groups of the standard deviation of reward"),
    Column("zero_adv_group_frac", "share", "groups whose rewards are all equal"),
    Column("completion_length_mean", "tokens", "mean length of completions"),
    Column("truncated_frac", "share", "completions cut at the length limit"),
    Column("loss", "", "the minimised scalar, KL term included"),
    Column("entropy_nats", "nats/token", "mean entropy at the sampled positions"),
    Column("kl_ref_k1_nats", "nats/token", "mean of log θ − log ref"),
    Column("kl_ref_k3_nats", "nats/token", "mean of e^d − d − 1, d = log ref − log θ"),
    *_pair("theta_mu", "θ/μ"),
    *_pair("theta_old", "θ/old"),
    *_pair("old_mu", "old/μ"),
    Column("ess_token_frac", "share", "(Σw)²/(n Σw²), w = θ/μ of tokens"),
    Column("ess_seq_frac", "share", "the same with w = product over a sequence"),
    Column("old_mu_ess_token_frac", "share", "(Σw)²/(n Σw²), w = old/μ of tokens"),
    Column("old_mu_ess_seq_frac", "share", "the same with w = product over a sequence"),
    Column("mismatch_ratio_mean", "", "mean of r = recomputed/μ, the sampling weights by the trainer's forward over μ"),
    Column("mismatch_logratio_abs_mean", "nats", "mean |log recomputed/μ|"),
    Column("mismatch_logratio_sd_nats", "nats", "standard deviation of log recomputed/μ"),
    Column("mismatch_k1_nats", "nats/token", "mean of −log recomputed/μ"),
    Column("mismatch_k3_nats", "nats/token", "mean of r − 1 − log r, r = recomputed/μ"),
    Column("mismatch_chi2", "", "mean of (r − 1)², r = recomputed/μ"),
    Column("logratio_var_nats2", "nats²", "Var(log θ/μ) over valid tokens"),
    Column("mismatch_var_share", "", "(Var(a) + Cov(a, b))/Var(log θ/μ), a = log recomputed/μ, b = log θ/recomputed"),
    Column("lag_var_share", "", "(Var(b) + Cov(a, b))/Var(log θ/μ)"),
    Column("decomposition_error_nats", "nats", "max |log θ/μ − (a + b)|"),
    Column("batch_tokens", "tokens", "completion tokens of the whole rollout batch, which the next columns are over"),
    Column("surprisal_gap_nats", "nats/token", "mean of −log old − entropy; 0 in expectation if old is sampled from"),
    Column("surprisal_gap_se_nats", "nats/token", "its standard error"),
    Column("tail_expected_frac", "share", "mean mass of the tokens with probability < 0.01 under old"),
    Column("tail_observed_frac", "share", "sampled tokens with probability < 0.01 under old"),
    Column("kv_stale_frac", "share", "tokens drawn with key-value states of an older version"),
    Column("misaligned_frac", "share", "sampled tokens that lost their log-prob when the text was encoded again"),
    Column("expert_flip_frac", "share", "(layer, token) choices of experts: sampler and trainer, same weights, differ"),
    Column("expert_flip_token_frac", "share", "tokens with at least one such layer"),
    Column("route_fallback_frac", "share", "(layer, token) choices that the sampler did not hand over, of fed tokens"),
    Column("clip_low_frac", "share", "tokens where the lower clip is active"),
    Column("clip_high_frac", "share", "tokens where the upper clip is active"),
    Column("weight_mean", "", "mean correction weight over valid tokens"),
    Column("weight_min", "", "smallest correction weight"),
    Column("weight_ess_frac", "share", "(Σw)²/(n Σw²), w = correction weight, 0 for rejected tokens"),
    Column("mask_frac", "share", "tokens that a correction rejected"),
    Column("route_drift_frac", "share", "(layer, token) choices of θ that differ from what is replayed, or from old's"),
    Column("replay_gap_k3_nats", "nats/token", "mean of r − 1 − log r, r = θ by its own routes / θ by those replayed"),
    Column("mismatch_factor", "", "what mismatch.target_kl multiplied all strengths by; on the row of π₀"),
    Column("mismatch_kl_nats", "nats/token", "KL that was measured with it; on the row of π₀"),
    Column("grad_norm_raw", "", "gradient norm before clipping"),
    Column("grad_norm_applied", "", "gradient norm after clipping"),
    Column("clip_factor", "", "factor the gradient was multiplied by"),
    Column("update_norm", "", "‖Δθ‖"),
    Column("dist_from_start", "", "‖θ − θ₀‖"),
    Column("param_norm", "", "‖θ‖"),
    Column("cos_grad", "", "cosine of this applied gradient with the previous one"),
    Column("cos_update", "", "cosine of this Δθ with the previous one"),
    Column("vcpo_ess_frac", "share", "controller vcpo: (Σw)²/(Σw² + 1e-8)/B, w = product of θ/μ over a sequence"),
    Column("vcpo_base", "share", "controller vcpo: share at which the rate stays whole"),
    Column("vcpo_scale", "", "controller vcpo: min(1, ess/base)^power"),
    Column("gac_cos", "", "controller gac: cosine of the accumulated gradient with the one applied last"),
    Column("gac_removed_frac", "share", "controller gac: of the parallel part; 1 where the step was skipped"),
    Column("optimizer_reset_now", "bool", "controller optimizer_reset: the moments were forgotten before this step"),
    Column("update_cap_factor", "", "controller update_cap: factor on Δθ"),
    Column("cosine_trigger_mean", "", "controller cosine_trigger: smoothed cos_grad after this step"),
    Column("cosine_trigger_fired", "bool", "controller cosine_trigger: it acted before this step"),
    Column("cosine_trigger_count", "triggers", "controller cosine_trigger: so far"),
    Column("wall_rollout_s", "s", "sampling and rewards", wall_clock=True),
    Column("wall_score_s", "s", "log-probs of the sampling weights and the reference", wall_clock=True),
    Column("wall_learn_s", "s", "forward, backward, update", wall_clock=True),
    Column("wall_val_s", "s", "validation", wall_clock=True),
)
NAMES = tuple(column.name for column in COLUMNS)
# Columns that exist once for every choice a cell lists, or for every layer; `*` stands for it.
FAMILIES: tuple[Column, ...] = (
    Column("removed_*_frac", "share", "tokens that no longer counted after this correction, and did before it"),
    Column("expert_flip_layer_*_frac", "share", "expert_flip_frac of one layer with experts, from 0"),
)
WALL_CLOCK = frozenset(column.name for column in COLUMNS if column.wall_clock)


class StepWriter:
    """Appends rows to a step file, one `write` each, so that a kill leaves at most one torn last line."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def append(self, row: dict[str, Any]) -> None:
        """Write one row; columns it lacks are null, columns nobody declared are an error."""
        more = [name for name in row if name not in NAMES]
        unknown = [name for name in more if not any(fnmatchcase(name, family.name) for family in FAMILIES)]
        if unknown:
            raise KeyError(f"columns {sorted(unknown)} are not declared in stalefront.record")
        line = json.dumps({name: row.get(name) for name in (*NAMES, *more)}, separators=(",", ":")) + "\n"
        rest = line.encode()
        while rest:  # one write in practice; a full disk or a signal can cut it short
            rest = rest[os.write(self._file, rest) :]

    def sync(self) -> None:
        """Bring all rows to the disk."""
        os.fsync(self._file)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Whole rows of a step file; a torn last line is left out, a broken line elsewhere raises."""
    if not path.exists():
        return
    with path.open("rb") as lines:
        for line in lines:
            if not line.endswith(b"\n"):
                return
            yield json.loads(line)


def rewind(path: Path, last_step: int, spare: Path) -> int:
    """Keep the rows up to `last_step`; what lay beyond it goes to `spare` first. Returns how many rows that was.

    The rows beyond a checkpoint are computed again, so they would stand twice; they are kept aside, not dropped.
    """
    if not path.exists():
        return 0
    lines = path.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if line.endswith(b"\n") and json.loads(line)["step"] <= last_step]
    beyond = lines[len(kept) :]
    if not beyond:
        return 0
    spare.parent.mkdir(parents=True, exist_ok=True)
    with spare.open("ab") as out:
        out.writelines(beyond)
    tmp = path.with_suffix(".tmp")
    tmp.write_bytes(b"".join(kept))
    os.replace(tmp, path)
    return len(beyond)
