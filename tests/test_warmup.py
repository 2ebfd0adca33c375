"""The warm-up: what it teaches, and that the cells of a seed start from one file."""

import numpy as np
import torch

from stalefront.build import build
from stalefront.source import BatchSource
from stalefront.warmup import IGNORED, answer_alphabet, noisy_batch


def test_noise_is_on_the_answer_alone_and_as_frequent_as_asked(make_cell):
    cell = make_cell(**{"model.warmup.noise": 0.25, "model.warmup.batch_size": 2000})
    tokenizer, task = cell.model.tokenizer(), cell.task
    alphabet = answer_alphabet(tokenizer, task, 0)
    assert sorted(tokenizer.decode(alphabet)) == list("0123456789")
    got = noisy_batch(tokenizer, task, alphabet, cell.model.warmup, 0, 0)
    again = noisy_batch(tokenizer, task, alphabet, cell.model.warmup, 0, 0)
    assert torch.equal(got["labels"], again["labels"])
    prompt, answer = got["input_ids"][:, :7], got["labels"][:, 7:]
    assert (got["labels"][:, :7] == IGNORED).all()
    assert (answer[:, -1] == tokenizer.eos_token_id).all()
    digits = [sorted(tokenizer.decode(row[1:6]).replace(" ", "")) for row in prompt]
    gold = torch.tensor([tokenizer.encode("".join(d)) for d in digits])
    wrong = (answer[:, :5] != gold).double().mean().item()
    # A replaced digit is the right one in one case of ten: .25 · .9, standard error .004.
    assert abs(wrong - 0.225) < 0.02


def test_cells_of_a_seed_share_one_file_and_other_seeds_do_not(make_cell, tmp_path):
    few = {"model.warmup.steps": 5}
    one = build(make_cell(**few), tmp_path)
    before = {p: p.stat().st_mtime_ns for p in tmp_path.glob("*.pt")}
    two = build(make_cell(loss="cispo", **{"optimizer.lr": 1e-3, **few}), tmp_path)
    assert {p: p.stat().st_mtime_ns for p in tmp_path.glob("*.pt")} == before
    assert len(before) == 1
    build(make_cell(seed=1, **few), tmp_path)
    assert len(list(tmp_path.glob("*.pt"))) == 2
    for a, b in zip(one.model.parameters(), two.model.parameters(), strict=True):
        assert torch.equal(a, b)
    for a, b in zip(one.model.parameters(), one.reference.parameters(), strict=True):
        assert torch.equal(a, b)
        assert a.data_ptr() != b.data_ptr()


def test_the_default_warm_up_passes_about_one_time_in_four(make_cell, cache_dir):
    cell = make_cell(**{"task.num_prompts": 512, "task.num_generations": 2})
    parts = build(cell, cache_dir)
    batch = BatchSource(cell, parts, clock=_no_clock).sample(parts.model, 1, 0)
    share = float(batch.reward_B.mean())
    # The noisy expert itself passes with (.75 + .25/10)^5 = .279; measured on six seeds: .23 to .28.
    assert 0.18 < share < 0.33
    assert np.isfinite(batch.logp_behav_BT.numpy()).all()


def _no_clock(name):
    import contextlib

    return contextlib.nullcontext()
