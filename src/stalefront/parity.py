"""Golden files of other frameworks, evaluated through their option mapping: nothing is derived from expected numbers.

A golden file holds `peer`, `function`, `settings` (in that framework's names), `inputs` and `outputs` (the numbers its
own code gave). See `docs/frameworks.md`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from stalefront.batch import LossInputs, Weights
from stalefront.choice import OptionError
from stalefront.correction import chain
from stalefront.frameworks import framework
from stalefront.objective import objective
from stalefront.recipe import Recipe
from stalefront.single import with_single_ratios, with_single_weights

LATER = "staleness rules come later"


class Declined(Exception):  # noqa: N818
    """A golden file that is not evaluated, and why."""


class Unreadable(ValueError):  # noqa: N818
    """A file that is no golden file."""


@dataclass(frozen=True)
class GoldenFile:
    """One golden file; `settings` are the framework's own options and what its harness set beside them."""

    path: Path
    peer: str
    function: str
    settings: Mapping[str, Any]
    inputs: Mapping[str, Any]
    outputs: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> GoldenFile:
        """Raises `Unreadable`."""
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise Unreadable(f"{path}: {error}") from error
        keys = ("peer", "function", "settings", "inputs", "outputs")
        absent = [key for key in keys if not isinstance(stored, dict) or key not in stored]
        if absent:
            raise Unreadable(f"{path}: no golden file, it lacks {', '.join(absent)}")
        return cls(path, *(stored[key] for key in keys))

    @property
    def is_table(self) -> bool:
        """True for scenarios of a staleness rule, one a row."""
        return "rows" in self.outputs

    def tensor(self, name: str) -> Tensor:
        """An input as float64."""
        return number(self.inputs[name])

    def loss_inputs(self) -> LossInputs:
        """The batch of a loss file, θ with gradient, in float64."""
        try:
            return LossInputs(
                logp_theta_BT=self.tensor("logp_theta").requires_grad_(),
                logp_old_BT=self.tensor("logp_old"),
                logp_behav_BT=self.tensor("logp_mu"),
                logp_ref_BT=None,
                advantage_B=self.tensor("advantages"),
                mask_BT=self.tensor("mask").bool(),
                group_B=self.tensor("group_ids").long(),
            )
        except (KeyError, ValueError, TypeError) as error:
            raise Unreadable(f"{self.path}: its inputs are not those of a loss: {error!r}") from error

    def expected(self, key: str) -> Any:
        """An output; a dot goes into a mapping."""
        value: Any = self.outputs
        for part in key.split("."):
            if not isinstance(value, Mapping) or part not in value:
                raise Unreadable(f"{self.path}: its outputs lack {key}")
            value = value[part]
        return value


class Evaluated(NamedTuple):
    """What a recipe gives on a golden file's inputs.

    Attributes
    ----------
    grad_BT
        d loss / d log θ.
    weights
        Weights of ones where the recipe has no correction.
    inputs
        After the proximal policy, detached.
    stopped_BT
        Where a clip, or a mask inside the loss, is active on either side.
    """

    loss: Tensor
    grad_BT: Tensor
    weights: Weights
    inputs: LossInputs
    recipe: Recipe
    stopped_BT: Tensor

    @property
    def kept_BT(self) -> Tensor:
        """Tokens of the batch that corrections keep."""
        return self.inputs.mask_BT & self.weights.keep_BT

    @property
    def weight_BT(self) -> Tensor:
        """Weights, 0 off the mask."""
        return self.weights.weight_BT.where(self.inputs.mask_BT, 0.0)


Number = Callable[[Evaluated], Any]


@dataclass(frozen=True)
class Case:
    """How a framework's golden file is evaluated.

    Attributes
    ----------
    options
        The framework's options, nested or dotted.
    inputs
        Changes the file's batch, where its harness passed another one (old := μ, rewards, lags).
    compare
        Further outputs (dotted keys) and what of ours must equal them; `loss` and `grad_logp_theta` are always
        compared where the file has them. Booleans must be equal, numbers within the framework's tolerance.
    max_completion_length
        L of the reduction `constant`; the width of the batch where nothing is given.
    micro_batch_B
        See `stalefront.objective.objective`.
    single
        What the framework forms in float32 whatever it is given: `ratios` of θ to a policy below it; `weights` of
        corrections with their bounds, or the `unbounded` weights alone. See `stalefront.single`.
    """

    options: Mapping[str, Any]
    inputs: Callable[[LossInputs], LossInputs] | None = None
    compare: Mapping[str, Number] = field(default_factory=dict)
    max_completion_length: int | None = None
    micro_batch_B: Tensor | None = None
    single: Collection[str] = ()


def old_is_mu(inputs: LossInputs) -> LossInputs:
    """The batch of a harness that hands the engine's log-probs over as old ones."""
    return replace(inputs, logp_old_BT=inputs.logp_behav_BT)


def evaluate(recipe: Recipe, inputs: LossInputs, case: Case) -> Evaluated:
    """Loss and gradient of `recipe` on a batch, by the path that the loop takes."""
    parts = recipe.parts()
    if "ratios" in case.single:
        inputs = with_single_ratios(inputs)
    if case.single:
        wide = "weights" not in case.single
        parts = replace(parts, correction=with_single_weights(parts.correction, wide_bounds=wide))
    found = objective(
        parts,
        inputs,
        max_completion_length=case.max_completion_length or inputs.mask_BT.shape[1],
        micro_batch_B=case.micro_batch_B,
    )
    loss = found.value.loss
    (grad,) = torch.autograd.grad(loss, inputs.logp_theta_BT, allow_unused=True)
    grad = torch.zeros_like(inputs.logp_theta_BT) if grad is None else grad
    weights = Weights.ones(inputs) if found.weights is None else found.weights
    stopped = found.value.clip_low_BT | found.value.clip_high_BT
    return Evaluated(loss.detach(), grad, weights, found.inputs.detach(), recipe, stopped)


def alone(found: Evaluated, *, without: Collection[str] = (), only: Collection[str] = ()) -> Weights:
    """What some of a recipe's corrections say by themselves: all but `without`, or `only` those."""
    rules = [rule for rule in found.recipe.parts().correction if rule.choice() not in without]
    chosen = [rule for rule in rules if not only or rule.choice() in only]
    weights = chain(chosen, found.inputs)
    return Weights.ones(found.inputs) if weights is None else weights


class Outcome(NamedTuple):
    """What became of one file; `later` files are of a kind that is not evaluated yet, and are not counted."""

    path: Path
    state: Literal["equal", "miss", "declined", "later"]
    detail: str


def check(file: GoldenFile) -> Outcome:
    """Evaluate one golden file; raises `Unreadable`."""
    if file.is_table:
        return Outcome(file.path, "later", LATER)
    try:
        peer = framework(file.peer)
    except OptionError as error:
        raise Unreadable(f"{file.path}: no mapping for its peer: {error}") from error
    try:
        case = peer.case(file)
        recipe = peer.recipe(case.options)
    except (Declined, OptionError) as error:
        return Outcome(file.path, "later" if str(error) == LATER else "declined", str(error))
    compared = _compared(file, case).items()
    if not compared:
        raise Unreadable(f"{file.path}: its outputs hold nothing that is compared")
    try:
        inputs = file.loss_inputs()
        found = evaluate(recipe, case.inputs(inputs) if case.inputs else inputs, case)
    except (RuntimeError, IndexError) as error:
        raise Unreadable(f"{file.path}: its inputs do not fit together: {error}") from error
    on_BT = inputs.mask_BT
    misses = [text for key, ours in compared if (text := _difference(file, key, ours(found), on_BT))]
    return Outcome(file.path, "miss", "; ".join(misses)) if misses else Outcome(file.path, "equal", "")


def _compared(file: GoldenFile, case: Case) -> dict[str, Number]:
    usual: dict[str, Number] = {"loss": lambda e: e.loss, "grad_logp_theta": lambda e: e.grad_BT}
    return {key: ours for key, ours in usual.items() if file.outputs.get(key) is not None} | dict(case.compare)


def _difference(file: GoldenFile, key: str, ours: Any, mask_BT: Tensor) -> str:
    """What is wrong with an output; empty when it is equal. What weights and masks say of padding means nothing."""
    theirs = number(file.expected(key))
    found = ours.detach() if isinstance(ours, Tensor) else torch.tensor(ours, dtype=torch.float64)
    if theirs.shape[-1:] == (1,) and found.shape == mask_BT.shape:
        # One number a sequence there; ours is the same on all of its tokens.
        theirs = theirs.expand(found.shape)
    if found.shape != theirs.shape:
        return f"{key}: shape {tuple(found.shape)}, expected {tuple(theirs.shape)}"
    if found.shape == mask_BT.shape and key != "grad_logp_theta":
        found, theirs = found[mask_BT], theirs[mask_BT]
    if found.dtype == torch.bool:
        wrong = int((found != theirs.bool()).sum())
        return f"{key}: {wrong} of {found.numel()} entries differ" if wrong else ""
    error = relative_error(found.double(), theirs)
    return "" if error <= framework(file.peer).tolerance else f"{key}: relative error {error:.1e}"


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference over the largest finite size expected; infinite where one is not finite and the other is."""
    same = (ours == theirs) | (ours.isnan() & theirs.isnan())
    if bool(same.all()):
        return 0.0
    if bool((~same & ~(ours.isfinite() & theirs.isfinite())).any()):
        return float("inf")
    scale = float(theirs[theirs.isfinite()].abs().max())
    largest = float((ours - theirs)[~same].abs().max())
    return largest / scale if scale else float("inf")


def number(stored: Any) -> Tensor:
    """Numbers of a golden file, `nan`, `inf` and `-inf` as text, in float64."""

    def plain(value: Any) -> Any:
        return [plain(v) for v in value] if isinstance(value, Sequence) and not isinstance(value, str) else float(value)

    return torch.tensor(plain(stored), dtype=torch.float64)
