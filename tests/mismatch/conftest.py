"""Fixtures of the injectors' tests: an entry by its stem, small cells, rollouts, and plain decodes beside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from stalefront.build import build
from stalefront.cell import make_choice
from stalefront.choice import OptionError
from stalefront.inference import Place
from stalefront.loop import Learner
from stalefront.mismatch import Mismatch
from stalefront.policy import cache_argument, completion_logits
from stalefront.rollout import Samples

SMALL = {
    **{"model.warmup.steps": 40, "model.warmup.batch_size": 16},
    **{"task.num_prompts": 4, "task.num_generations": 4},
}


class Drawn(NamedTuple):
    """What was sampled, and the log-probs (B, C, V) it was drawn from."""

    samples: Samples
    logp_BCV: Tensor

    @property
    def first(self) -> int:
        """First column of the completions."""
        return self.samples.tokens_BT.shape[1] - self.logp_BCV.shape[1]

    @property
    def tokens_BC(self) -> Tensor:
        return self.samples.tokens_BT[:, self.first :]

    @property
    def mask_BC(self) -> Tensor:
        return self.samples.mask_BT[:, self.first :]

    @property
    def written_BC(self) -> Tensor:
        return self.samples.logp_behav_BT[:, self.first :]


@pytest.fixture(scope="session")
def entry(conf_choice) -> Callable[..., Mismatch]:
    """`entry("top_p", p=0.5)`: the entry of a file in `conf/mismatch/`, fields replaced."""
    return lambda stem, **fields: make_choice("mismatch", conf_choice("mismatch", stem) | fields)


@pytest.fixture(scope="session")
def refused(entry) -> Callable[..., None]:
    """`refused("top_p", "p", p=0.0)`: the entry is refused for that field."""

    def check(stem: str, field: str, **fields: Any) -> None:
        with pytest.raises(OptionError) as error:
            entry(stem, **fields)
        assert error.value.field == f"mismatch.{stem}.{field}"

    return check


@pytest.fixture(scope="session")
def make_learner(make_cell, cache_dir) -> Callable[..., Learner]:
    """`make_learner("top_p", **{"mismatch.top_p.p": 0.5})`: a small cell with these entries, built and not started."""

    def make(*mismatch: str, **overrides: Any) -> Learner:
        cell = make_cell(mismatch=list(mismatch), **SMALL | overrides)
        return Learner(cell, build(cell, cache_dir))

    return make


@pytest.fixture(scope="session")
def stir() -> Callable[[Any, int], None]:
    """`stir(model, seed)`: move the weights as far as a large update; the policy of these cells earns nothing yet."""

    @torch.no_grad()
    def run(model: Any, seed: int) -> None:
        random = torch.Generator().manual_seed(seed)
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=random).to(parameter.dtype)

    return run


@pytest.fixture(scope="session")
def draw() -> Callable[..., Drawn]:
    """`draw(learner, batch=1, prompts=slice(0, 2))`: a rollout, as it is sampled and not yet handed over."""

    def run(learner: Learner, *, batch: int = 1, prompts: slice = slice(None)) -> Drawn:
        task, parts, inference = learner.cell.task, learner.parts, learner.source.inference
        padded = parts.sampler.pad(
            task.encode(task.train_rows(learner.cell.seed, batch), parts.tokenizer), parts.device
        )
        place = Place(learner.cell.seed, "rollout", batch, (prompts.start or 0) * task.num_generations)
        seen: list[Tensor] = []
        samples = parts.sampler.sample(
            inference.load(parts.model),
            padded.rows(prompts),
            num_generations=task.num_generations,
            **place._asdict(),
            inference=inference,
            watch=seen.append,
        )
        return Drawn(samples, torch.stack(seen, 1))

    return run


@pytest.fixture(scope="session")
def decode() -> Callable[..., Tensor]:
    """`decode(model, prompt_BL, answer_BC)`: logits of a plain decode of these tokens, float32 (B, C, V).

    Every group of equal prompts is run once, as the sampler does. `filled` is a cache of all but a prompt's last token.
    """

    @torch.no_grad()
    def run(model: Any, prompt_BL: Tensor, answer_BC: Tensor, generations: int, filled: Any = None) -> Tensor:
        cache = DynamicCache(config=model.config) if filled is None else filled
        named = {cache_argument(model): cache, "use_cache": True}
        prompt_PL = prompt_BL[::generations]
        place = torch.arange(prompt_PL.shape[1]).expand_as(prompt_PL)
        skip = 0 if filled is None else prompt_PL.shape[1] - 1
        out = model(input_ids=prompt_PL[:, skip:], position_ids=place[:, skip:], logits_to_keep=1, **named)
        cache.batch_repeat_interleave(generations)
        logits = [out.logits[:, -1].float().repeat_interleave(generations, 0)]
        for column in range(answer_BC.shape[1] - 1):
            at = torch.full((len(answer_BC), 1), prompt_PL.shape[1] + column)
            out = model(input_ids=answer_BC[:, column, None], position_ids=at, logits_to_keep=1, **named)
            logits.append(out.logits[:, -1].float())
        return torch.stack(logits, 1)

    return run


@pytest.fixture(scope="session")
def decoded(decode) -> Callable[..., Tensor]:
    """`decoded(model, drawn)`: log-probs of a plain decode of the tokens that were drawn, (B, C, V)."""

    def run(model: Any, drawn: Drawn, generations: int = 4) -> Tensor:
        prompt_BL = drawn.samples.tokens_BT[:, : drawn.first]
        return torch.log_softmax(decode(model, prompt_BL, drawn.tokens_BC, generations), -1)

    return run


@pytest.fixture(scope="session")
def trainer() -> Callable[..., Tensor]:
    """`trainer(learner, drawn)`: log-probs of the trainer's own forward over the tokens that were drawn, (B, C, V)."""

    @torch.no_grad()
    def run(learner: Learner, drawn: Drawn) -> Tensor:
        samples = drawn.samples
        logits = completion_logits(learner.parts.model, samples.tokens_BT, samples.position_BT, first=drawn.first)
        return torch.log_softmax(logits / learner.cell.task.temperature, -1)

    return run


@pytest.fixture(scope="session")
def loaded() -> Callable[..., Any]:
    """`loaded(learner)`: the sampler's own module with the trainer's weights."""
    return lambda learner: learner.source.inference.load(learner.parts.model).plain


@pytest.fixture(scope="session")
def moved(loaded) -> Callable[[Learner], dict[str, tuple[Tensor, Tensor]]]:
    """`moved(learner)`: name → (trainer's, sampler's) of the parameters in which their modules differ."""

    def run(learner: Learner) -> dict[str, tuple[Tensor, Tensor]]:
        live = dict(learner.parts.model.named_parameters())
        mine = dict(loaded(learner).named_parameters())
        assert mine.keys() == live.keys()
        return {n: (live[n].detach(), p.detach()) for n, p in mine.items() if not torch.equal(p, live[n])}

    return run
