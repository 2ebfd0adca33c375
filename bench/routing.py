"""Cost of recording routes in a rollout, and of replaying them in a forward and backward pass, on random models.

A round times the untapped model, the tapped one with nothing switched on, and the tapped one at work, then the untapped
one again; ratios are to the mean of the two untapped times around. Both models hold the same weights, so that the
routes, and with them the work of the experts, are the same on both sides.

Usage: python bench/routing.py [ROUNDS]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from harness import spread, write_result
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from stalefront.model import clean_copy
from stalefront.policy import cache_argument
from stalefront.routing import RouterTap, route_bytes_per_token

MODELS: dict[str, dict[str, int]] = {
    "tiny": {
        **{"vocab_size": 16, "hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 32},
        **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8},
        **{"num_experts": 8, "num_experts_per_tok": 2},
    },
    "larger": {
        **{"vocab_size": 1000, "hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 128},
        **{"num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32},
        **{"num_experts": 32, "num_experts_per_tok": 4},
    },
}
# Sequences, prompt tokens and sampled tokens of a rollout, and how often it is run for one time.
SHAPES = {"tiny": (64, 8, 16, 2), "larger": (32, 16, 16, 1)}


def build(name: str) -> Any:
    """Random model of the Qwen3-MoE family."""
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3_moe", norm_topk_prob=True, max_position_embeddings=64, **MODELS[name])
    return AutoModelForCausalLM.from_config(config).eval()


@torch.no_grad()
def decode(model: Any, prompt_BL: torch.Tensor, length: int) -> torch.Tensor:
    """Sampled sequences, by a prefill and one step a token."""
    random = torch.Generator().manual_seed(1)
    cache, tokens = DynamicCache(config=model.config), [prompt_BL]
    for _ in range(length):
        named = {cache_argument(model): cache}
        logits = model(input_ids=tokens[-1], use_cache=True, logits_to_keep=1, **named).logits[:, -1]
        tokens.append(torch.multinomial(torch.softmax(logits, -1), 1, generator=random))
    return torch.cat(tokens, 1)


def learn(model: Any, tokens_BT: torch.Tensor) -> None:
    """Forward and backward of the tokens' log-probs."""
    logp = torch.log_softmax(model(input_ids=tokens_BT, use_cache=False).logits[:, :-1], -1)
    logp.gather(-1, tokens_BT[:, 1:, None]).mean().backward()
    model.zero_grad()


def cpu_ms(run: Callable[[], object], repeats: int) -> float:
    """CPU milliseconds of one run."""
    start = time.process_time()
    for _ in range(repeats):
        run()
    return 1e3 * (time.process_time() - start) / repeats


def compare(runs: dict[str, Callable[[], object]], rounds: int, repeats: int) -> dict[str, Any]:
    """Times of every run over those of `plain`, which comes before and after the others in each round."""
    plain, *others = runs
    for run in runs.values():
        run()
    before = [cpu_ms(runs[plain], repeats)]
    ratios: dict[str, list[float]] = {name: [] for name in others}
    for number in range(rounds):
        order = others if number % 2 == 0 else others[::-1]
        own = {name: cpu_ms(runs[name], repeats) for name in order}
        before.append(cpu_ms(runs[plain], repeats))
        for name, value in own.items():
            ratios[name].append(value / (sum(before[-2:]) / 2))
    return {"plain cpu ms": spread(before), "over plain": {name: spread(values) for name, values in ratios.items()}}


def measure(name: str, rounds: int) -> dict[str, Any]:
    """Both comparisons on one model."""
    rows, prompt, length, repeats = SHAPES[name]
    tapped = build(name)
    plain = clean_copy(tapped)
    tap = RouterTap(tapped)
    prompt_BL = torch.randint(MODELS[name]["vocab_size"], (rows, prompt), generator=torch.Generator().manual_seed(2))
    tokens_BT = decode(plain, prompt_BL, length)
    with torch.no_grad(), tap.recording() as recorded:
        tapped(input_ids=tokens_BT)
    routes_LBTK = recorded.routes_LNK().view(tap.layers, *tokens_BT.shape, tap.top_k)

    def record() -> None:
        with tap.recording() as recorded:
            decode(tapped, prompt_BL, length)
        recorded.routes_LNK()

    def learn_under(context: Callable[[], AbstractContextManager[object]]) -> None:
        with context():
            learn(tapped, tokens_BT)

    rollout = {
        "plain": lambda: decode(plain, prompt_BL, length),
        "tapped, nothing on": lambda: decode(tapped, prompt_BL, length),
        "recording": record,
    }
    learner = {
        "plain": lambda: learn(plain, tokens_BT),
        "tapped, nothing on": lambda: learn_under(nullcontext),
        "replaying": lambda: learn_under(lambda: tap.replaying(routes_LBTK)),
    }
    return {
        "sequences, prompt, sampled": [rows, prompt, length],
        "bytes a token": route_bytes_per_token(tap.layers, tap.top_k),
        "rollout": compare(rollout, rounds, repeats),
        "forward and backward": compare(learner, rounds, repeats),
    }


def main(rounds: int) -> None:
    """Measure and write the result."""
    torch.set_num_threads(1)
    write_result("routing", {"rounds": rounds, **{name: measure(name, rounds) for name in MODELS}})


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 15)
