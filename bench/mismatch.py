"""Size and cost of every entry of `mismatch` with its defaults, on the built-in test-bed's π₀.

Size: rollout batches of the tiny cell (the mixture of experts for entries on routers), scored by the trainer; what is
written down is compared with what the trainer computes on the same tokens, `BATCHES` batches pooled. Cost: CPU time of
a rollout over that of a plain one before and after it, rounds interleaved. No updates, no time outside of sampling.

Usage: python bench/mismatch.py [ROUNDS]
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import torch
from harness import spread, write_result
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from stalefront.build import build
from stalefront.cell import Cell
from stalefront.compose import OUTSIDE
from stalefront.loop import Learner
from stalefront.resolvers import register_resolvers
from stalefront.slurm.profile import register_profiles
from stalefront.stats import ess_frac
from stalefront.sweepfiles import register_sweeps

BATCHES, TIMED = 24, 8
# Needs older weights, which π₀ has none of; and a round trip that is the identity for a character tokenizer.
LEFT_OUT = ("stale_kv", "retokenise")
VARIANTS = {
    "fp8, activations too": ["mismatch=[fp8]", "mismatch.fp8.activations=true"],
    "fp8, one scale a matrix": ["mismatch=[fp8]", "mismatch.fp8.scale=tensor"],
    "int8, dynamic": ["mismatch=[int8]", "mismatch.int8.dynamic=true"],
    "lm_head, float16": ["mismatch=[lm_head]", "mismatch.lm_head.dtype=float16"],
    "bf16, fp32_head=both": ["mismatch=[bf16]", "model.fp32_head=both"],
    "temperature 0.6": ["mismatch=[temperature]", "mismatch.temperature.temperature=0.6"],
    "temperature, raw": ["mismatch=[temperature]", "mismatch.temperature.logged=raw"],
    "top_p 0.99": ["mismatch=[top_p]", "mismatch.top_p.p=0.99"],
    "top_p, raw": ["mismatch=[top_p]", "mismatch.top_p.logged=raw"],
    "top_p, keep_mask": ["mismatch=[top_p]", "mismatch.top_p.keep_mask=true"],
    "expert_flips, replay=r3": ["mismatch=[expert_flips]", "replay=r3"],
}


def cell_of(overrides: list[str]) -> Cell:
    """The default tiny cell with these overrides."""
    with initialize_config_module("stalefront.conf", version_base="1.3"):
        config = OmegaConf.to_container(compose("config", overrides=["~sweep", *overrides]), resolve=True)
    outside = {*OUTSIDE, "arm", "framework"}
    return Cell.from_config({key: value for key, value in config.items() if key not in outside})


def cells() -> dict[str, list[str]]:
    """Overrides of everything measured, by name."""
    with initialize_config_module("stalefront.conf", version_base="1.3"):
        from hydra.core.global_hydra import GlobalHydra

        stems = GlobalHydra.instance().config_loader().get_group_options("mismatch")
    names = [stem for stem in stems if stem not in ("none", *LEFT_OUT)]
    found = {"none": [], "none, experts": ["model=tiny_moe"]}
    found |= {name: [f"mismatch=[{name}]"] for name in names} | VARIANTS
    routed = ("router", "expert")
    return {
        name: [*overrides, "model=tiny_moe"] if name.startswith(routed) else overrides
        for name, overrides in found.items()
    }


def size(learner: Learner) -> dict[str, float]:
    """Moments of log old/μ over the tokens of `BATCHES` batches, all sampled by π₀."""
    batches = [learner.source._produce(index, 0) for index in range(1, BATCHES + 1)]
    pooled = torch.cat([(b.logp_old_BT - b.logp_behav_BT)[b.mask_BT].double() for b in batches])
    rows = torch.cat([((b.logp_old_BT - b.logp_behav_BT).double() * b.mask_BT).sum(-1) for b in batches])
    ratio = pooled.exp()
    return {
        "tokens": len(pooled),
        "k1_nats": float(-pooled.mean()),
        "k1_se_nats": float(pooled.std() / len(pooled) ** 0.5),
        "k2_nats": float(pooled.square().mean() / 2),
        "k3_nats": float((torch.expm1(pooled) - pooled).mean()),
        "mean_ratio": float(ratio.mean()),
        "abs_mean_nats": float(pooled.abs().mean()),
        "ess_seq_frac": ess_frac(rows),
    }


def rollout_ms(learner: Learner) -> float:
    """CPU milliseconds of a rollout."""
    start = time.process_time()
    for index in range(1, TIMED + 1):
        learner.source.sample(learner.parts.model, index, 0)
    return 1e3 * (time.process_time() - start) / TIMED


def main(rounds: int) -> None:
    """Measure and write the result."""
    torch.set_num_threads(1)
    register_resolvers()
    register_sweeps()
    register_profiles()
    with tempfile.TemporaryDirectory() as folder:
        learners = {
            name: Learner(cell := cell_of(overrides), build(cell, Path(folder))) for name, overrides in cells().items()
        }
        sizes = {name: size(learner) for name, learner in learners.items()}
        ratios: dict[str, list[float]] = {name: [] for name in learners}
        for _ in range(rounds):
            for name, learner in learners.items():
                plain = learners["none, experts" if learner.parts.routed else "none"]
                before, own, after = rollout_ms(plain), rollout_ms(learner), rollout_ms(plain)
                ratios[name].append(own / ((before + after) / 2))
    cost = {name: spread(values) for name, values in ratios.items()}
    write_result("mismatch", {"rounds": rounds, "batches": BATCHES, "size": sizes, "rollout over plain": cost})


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
