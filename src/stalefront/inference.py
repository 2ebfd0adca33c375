"""The sampler's side of a cell: which module it runs, how it decodes, what it draws from and what it writes down."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from stalefront.decoding import Blended, Cached, Chunked, Decoding, Prompts, Routers, Teacher
from stalefront.mismatch import HalfPath, Logging, Mismatch, Noise, Path, Processing, Routing
from stalefront.mismatch.batch_kernels import BatchKernels
from stalefront.mismatch.parity import Parity
from stalefront.mismatch.retokenise import Retokenise
from stalefront.mismatch.stale_kv import StaleKV
from stalefront.noise import row_keys
from stalefront.policy import completion_logits

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from stalefront.rollout import Sampler, Samples
    from stalefront.routing import RouterChange, RouterTap
    from stalefront.sampler_module import SamplerModule


class Place(NamedTuple):
    """Which rollout is sampled: the random numbers of its rows are keyed by these."""

    seed: int
    purpose: str
    batch: int
    first_row: int = 0


class Engines(NamedTuple):
    """Modules of one rollout, weights in place.

    Attributes
    ----------
    plain
        What samples, or what the other way is compared with.
    half
        The same in half precision, on a path of that kind.
    before
        Holds older weights, which made the cache of the prompts.
    """

    plain: PreTrainedModel
    half: PreTrainedModel | None = None
    before: PreTrainedModel | None = None


class Drawn(NamedTuple):
    """Distributions of one column.

    Attributes
    ----------
    logp_BV : nats
        Drawn from.
    logged_BV : nats
        Written down.
    keep_BV : bool, or None
        Support that the trainer is told.
    """

    logp_BV: Tensor
    logged_BV: Tensor
    keep_BV: Tensor | None


Kind = TypeVar("Kind", bound=Mismatch)


class Inference:
    """How a sampler samples; without injectors the trainer's module, a cache, and a plain softmax.

    Parameters
    ----------
    temperature : float
        The trainer's.
    injectors
        A cell's mismatch.
    module, half, before
        Modules of the sampler's own: where its weights or its head are not the trainer's, for half precision, and for
        the older weights of a stale cache.
    routed : bool
        Routes are recorded; the model's routers are understood.
    slices, pad
        The learner's rows, and the padding token: for the path `parity`.
    """

    def __init__(
        self,
        temperature: float,
        injectors: Sequence[Mismatch] = (),
        *,
        module: SamplerModule | None = None,
        half: SamplerModule | None = None,
        before: SamplerModule | None = None,
        routed: bool = False,
        slices: Sequence[Tensor] = (),
        pad: int = 0,
    ) -> None:
        self.temperature, self.injectors = temperature, injectors
        self.module, self.half, self.before = module, half, before
        self.routed, self.slices, self.pad = routed, slices, pad
        self._taps: dict[int, RouterTap] = {}
        self.scale(1.0)

    def scale(self, factor: float) -> None:
        """Multiply every strength by `factor`; entries without any are left out."""
        self.factor = factor
        scaled = [injector.scaled(factor) for injector in self.injectors]
        self.active = [injector for injector in scaled if injector.strength]
        for module in (self.module, self.half, self.before):
            if module is not None:
                module.injectors = self.active

    def of(self, kind: Callable[..., Kind]) -> list[Kind]:
        """Entries of one kind, a class that may be abstract, that act."""
        assert isinstance(kind, type)
        found: list[Any] = [injector for injector in self.active if isinstance(injector, kind)]
        return found

    def load(self, model: PreTrainedModel, before: PreTrainedModel | None = None) -> Engines:
        """Modules to sample with the weights of `model`; `before` comes from `load_before`."""
        return Engines(
            plain=model if self.module is None else self.module.load(model),
            half=self.half.load(model) if self.half is not None and self.of(HalfPath) else None,
            before=before,
        )

    def load_before(self, model: PreTrainedModel) -> PreTrainedModel | None:
        """Module that fills a stale cache with the weights of `model`; None where no entry asks for one."""
        return self.before.load(model) if self.before is not None and self.of(StaleKV) else None

    def start(self, engines: Engines, prompts: Prompts, num_generations: int, length: int, place: Place) -> Rollout:
        """Begin a rollout of at most `length` tokens a row."""
        rows = len(prompts.tokens_PL) * num_generations
        key_B = {
            injector.choice(): row_keys(
                place.seed,
                _purpose(injector, place),
                place.batch,
                rows,
                place.first_row,
                prompts.tokens_PL.device,
            )
            for injector in self.active
        }
        return Rollout(self, self._decoding(engines, prompts, num_generations, length, place), key_B)

    def _decoding(
        self, engines: Engines, prompts: Prompts, num_generations: int, length: int, place: Place
    ) -> Decoding:
        path = next(iter(self.of(Path)), None)
        if isinstance(path, Parity):
            return Teacher(
                lambda tokens, position: completion_logits(
                    engines.plain, tokens, position, first=prompts.tokens_PL.shape[1]
                ),
                prompts,
                num_generations,
                slices=self.slices or [torch.arange(len(prompts.tokens_PL) * num_generations)],
                length=length,
                pad=self.pad,
            )

        def cached(model: PreTrainedModel, rows: slice = slice(None), first_row: int = 0) -> Cached:
            return Cached(
                model,
                prompts.rows(rows),
                num_generations,
                routers=self._routers(model, place),
                before=engines.before,
                stale=sum(entry.strength for entry in self.of(StaleKV)),
                first_row=place.first_row + first_row,
            )

        if path is None:
            return cached(engines.plain)
        if isinstance(path, HalfPath):
            assert engines.half is not None
            other: Decoding = cached(engines.half)
        else:
            assert isinstance(path, BatchKernels)
            starts = range(0, len(prompts.tokens_PL), path.prompts)
            spans = [slice(start, min(start + path.prompts, len(prompts.tokens_PL))) for start in starts]
            pieces = [cached(engines.plain, span, span.start * num_generations) for span in spans]
            other = Chunked(pieces, [(span.stop - span.start) * num_generations for span in spans])
        return other if path.strength == 1 else Blended(cached(engines.plain), other, path.strength)

    def _routers(self, model: PreTrainedModel, place: Place) -> Routers | None:
        if not self.routed:
            return None
        entries = self.of(Routing)

        def change(row_N: Tensor, position_N: Tensor) -> list[RouterChange]:
            found = []
            for entry in entries:
                purpose = _purpose(entry, place)
                first, last = int(row_N.min()), int(row_N.max())
                key = row_keys(place.seed, purpose, place.batch, last - first + 1, first, row_N.device)
                found.append(entry.change(key[row_N - first], position_N))
            return found

        return Routers(self.tap_of(model), change)

    def tap_of(self, model: PreTrainedModel) -> RouterTap:
        """Handle on the routers of one of the modules in use."""
        from stalefront.routing import RouterTap

        if id(model) not in self._taps:
            self._taps[id(model)] = RouterTap(model)
        return self._taps[id(model)]

    def process(self, logits_BV: Tensor, key_B: dict[str, Tensor], column: int) -> Drawn:
        """Distributions at the sampling temperature after every entry that changes what is drawn."""
        drawn = logged = logits_BV / self.temperature
        keep: Tensor | None = None
        for entry in self.of(Processing):
            noise = Noise(key_B[entry.choice()], column)
            mask = entry.keep_BV(drawn)
            if mask is not None:
                keep = mask if keep is None else keep & mask
            before, drawn = drawn, entry(drawn, noise)
            if entry.logged == "processed":
                logged = drawn if logged is before else entry.logs(logged, before, noise)
        logp = torch.log_softmax(drawn, dim=-1)
        return Drawn(logp, logp if logged is drawn else torch.log_softmax(logged, dim=-1), keep)

    def written(self, logp_B: Tensor, key_B: dict[str, Tensor], column: int) -> Tensor:
        """What the log says where the log-prob is `logp_B`."""
        for entry in self.of(Logging):
            logp_B = entry(logp_B, Noise(key_B[entry.choice()], column))
        return logp_B

    def handed_over(self, samples: Samples, place: Place, sampler: Sampler) -> Samples:
        """What reaches the trainer of `samples`."""
        for entry in self.of(Retokenise):
            rows = len(samples.tokens_BT)
            key_B = row_keys(place.seed, _purpose(entry, place), place.batch, rows, place.first_row)
            samples = entry(samples, key_B.to(samples.tokens_BT.device), sampler.tokenizer, sampler.end_ids)
        return samples


def _purpose(entry: Mismatch, place: Place) -> str:
    """What an entry's random numbers are keyed by."""
    return f"{entry.choice()} {place.purpose}"


class Rollout:
    """One rollout while it is sampled."""

    def __init__(self, inference: Inference, decoding: Decoding, key_B: dict[str, Tensor]) -> None:
        self.inference, self.decoding, self.key_B = inference, decoding, key_B
        self.column = 0

    def draw(self) -> Drawn:
        """Distributions of the next token."""
        return self.inference.process(self.decoding.logits, self.key_B, self.column)

    def log(self, drawn: Drawn, token_B: Tensor) -> Tensor:
        """Log-prob that is written down for the drawn tokens, nats."""
        logp_B = drawn.logged_BV.gather(-1, token_B[:, None]).squeeze(-1)
        return self.inference.written(logp_B, self.key_B, self.column)

    def advance(self, token_B: Tensor) -> None:
        """Go on with these tokens."""
        self.decoding.advance(token_B)
        self.column += 1
