"""What a command line asks a search for: the arms, the interval of learning rates, and the seeds."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.override_parser.types import IntervalSweep, Override

from stalefront.cell import Cell, identity
from stalefront.choice import OptionError
from stalefront.compose import Composer, Planned
from stalefront.grid import Axis, collect_axes, expand
from stalefront.labels import only, varying
from stalefront.search.bisection import candidates
from stalefront.sweepfiles import NamedSweep

SEARCHED = "optimizer.lr"
SEED = "seed"


@dataclass(frozen=True)
class Arm:
    """Everything about a cell but its learning rate and its seed.

    Attributes
    ----------
    arm_id : str
        Hash of that, so that an arm is found again whatever else is searched beside it and however it was typed.
    label : str
        What tells it from the other arms of this command.
    overrides : tuple of str
        As the command line and the sweep's file give them.
    """

    arm_id: str
    label: str
    overrides: tuple[str, ...]

    def cell_overrides(self, lr: float, seed: int) -> tuple[str, ...]:
        """Overrides of one of its cells."""
        return (*self.overrides, f"{SEARCHED}={lr!r}", f"{SEED}={seed}")


@dataclass(frozen=True)
class Space:
    """What is searched.

    Attributes
    ----------
    lr_K : tuple of float
        Candidate learning rates, increasing.
    """

    arms: tuple[Arm, ...]
    lr_K: tuple[float, ...]
    seeds: tuple[int, ...]

    @property
    def x_K(self) -> tuple[float, ...]:
        """log10 of the candidates."""
        return tuple(map(math.log10, self.lr_K))


def read_space(
    composer: Composer, sweep: NamedSweep, arguments: Sequence[str], per_decade: int, say: Callable[[str], None]
) -> Space:
    """Space of a command line; every arm is composed and checked at both ends of its interval, with every seed.

    Raises
    ------
    OptionError
        About the first thing that could not run, before anything is run or written.
    """
    interval, sweep, rest = _take_interval(composer, sweep, arguments)
    lr_K = _candidates(interval, per_decade)
    axes = collect_axes(composer, sweep, rest)
    seed_axis = next((axis for axis in axes if axis.base == SEED), None)
    jobs = expand([axis for axis in axes if axis is not seed_axis], composer, say)
    seeds = _seeds(composer, seed_axis, jobs[0])
    telling = varying(jobs)
    arms: dict[str, Arm] = {}
    for overrides in jobs:
        arm = Arm(_arm_id(composer.cell(overrides).cell), " ".join(only(telling, overrides)) or "all", overrides)
        arms.setdefault(arm.arm_id, arm)
    ends = (lr_K[0], lr_K[-1])
    composer.cells(arm.cell_overrides(lr, seed) for arm in arms.values() for lr in ends for seed in seeds)
    return Space(tuple(arms.values()), lr_K, seeds)


def end_cells(composer: Composer, space: Space) -> list[Planned]:
    """A cell of every arm, for checks of what does not depend on learning rate and seed."""
    return [composer.cell(arm.cell_overrides(space.lr_K[0], space.seeds[0])) for arm in space.arms]


def _arm_id(cell: Cell) -> str:
    """Hash of a cell without learning rate and seed."""
    rest: dict[str, Any] = cell.identity()
    rest["optimizer"] = {key: value for key, value in rest["optimizer"].items() if key != "lr"}
    return identity({key: value for key, value in rest.items() if key != SEED})


def _take_interval(
    composer: Composer, sweep: NamedSweep, arguments: Sequence[str]
) -> tuple[tuple[float, float], NamedSweep, list[str]]:
    """Interval of the searched key, and what is left of the sweep and of the command line."""
    typed = {argument: composer.parse(argument) for argument in arguments}
    mine = [override for override in typed.values() if override.key_or_group == SEARCHED]
    rest = [argument for argument, override in typed.items() if override.key_or_group != SEARCHED]
    if SEARCHED in sweep.fixed and not mine:
        legal = "no fixed value: it is what the search looks for"
        field = f"sweep.fixed of {sweep.name}, {SEARCHED}"
        raise OptionError(field, sweep.fixed[SEARCHED], legal, f"Give {SEARCHED}=interval(1e-5,1e-2).")
    values = sweep.axes.get(SEARCHED)
    axes, fixed = ({k: v for k, v in part.items() if k != SEARCHED} for part in (sweep.axes, sweep.fixed))
    left = dataclasses.replace(sweep, axes=axes, fixed=fixed)
    if mine:
        return _ends(mine[-1]), left, rest
    if values is None:
        legal = "an interval to search in"
        raise OptionError(SEARCHED, "<absent>", legal, f"Give {SEARCHED}=interval(1e-5,1e-2), or a sweep that has it.")
    if isinstance(values, str):
        return _ends(composer.parse(f"{SEARCHED}={values}")), left, rest
    return _span(values, values), left, rest


def _ends(override: Override) -> tuple[float, float]:
    """Ends of `interval(a,b)`, or the smallest and the largest of the values that an override lists."""
    shown = override.get_value_string()
    if override.is_interval_sweep():
        found = override.value()
        assert isinstance(found, IntervalSweep)
        return _span([found.start, found.end], shown)
    if override.is_discrete_sweep():
        return _span([_number(text) for text in override.sweep_string_iterator()], shown)
    return _span([override.value()], shown)


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _span(values: Sequence[Any], shown: Any) -> tuple[float, float]:
    numbers = [float(v) for v in values if type(v) in (int, float) and math.isfinite(v) and v > 0]
    if len(numbers) < len(values) or len(set(numbers)) < 2:
        legal = "two or more positive learning rates, whose smallest and largest are the ends of the search"
        raise OptionError(SEARCHED, shown, legal, f"For example {SEARCHED}=interval(1e-5,1e-2).")
    return min(numbers), max(numbers)


def _candidates(interval: tuple[float, float], per_decade: int) -> tuple[float, ...]:
    found = candidates(*interval, per_decade)
    if len(found) < 2:
        low, high = interval
        legal = f"an interval with two candidates or more, at {per_decade} a decade"
        raise OptionError(SEARCHED, f"{low:g} … {high:g}", legal, "Widen it, or raise hydra.sweeper.points_per_decade.")
    return found


def _seeds(composer: Composer, axis: Axis | None, overrides: tuple[str, ...]) -> tuple[int, ...]:
    """Seeds of the axis in order, or the one of the configuration."""
    typed = axis.overrides if axis else []
    chosen = [composer.cell((*overrides, text)).cell.seed for text in typed]
    return tuple(dict.fromkeys(chosen)) or (composer.cell(overrides).cell.seed,)
