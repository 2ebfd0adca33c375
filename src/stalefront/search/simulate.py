"""How well the search does on runs that are made up: `python -m stalefront.search.simulate`; see `docs/search.md`.

A replicate has five arms, S = 4 … 64, with the boundary at b = log10 c − log10 S and c drawn anew, in a window of four
decades. A made-up run at x collapses with probability

    1 / (1 + exp((b − x) / w))        logistic, width w in dex; w = 0 is a step
    p if b < x, 1 − p if b > x        the model the search assumes

The grid has the same number of runs an arm, evenly spaced over the window, and is read in two ways: by the posterior
that the search uses, and by the middle between its highest run that did not collapse and its lowest that did.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from stalefront.search.bisection import Answer, candidates, estimate, posterior
from stalefront.search.findings import LEVEL
from stalefront.search.rule import Rule, Run

LEVELS = (4, 8, 16, 32, 64)
LOG10_C = (-3.7, -2.7)
WINDOW = (-6.0, -2.0)
MANY_SEEDS = tuple(range(64))
ARM = "arm"

Response = Callable[[float], bool]
Noise = Callable[[np.random.Generator, float], Response]


@dataclass(frozen=True)
class Score:
    """Errors of log10 η50 in dex over all arms and replicates; `coverage` of the interval, NaN where there is none."""

    rms: float
    p90: float
    coverage: float


def logistic(width: float) -> Noise:
    """Runs whose probability to collapse rises over about four times `width` (dex) around the boundary."""

    def noise(rng: np.random.Generator, b: float) -> Response:
        def collapses(x: float) -> bool:
            chance = float(x > b) if width == 0 else 1.0 / (1.0 + math.exp(min((b - x) / width, 700.0)))
            return bool(rng.random() < chance)

        return collapses

    return noise


def flipped(right: float) -> Noise:
    """Runs that show their side with probability `right`, wherever they are."""
    return lambda rng, b: lambda x: bool((x > b) == (rng.random() < right))


def make_rule(runs: int, right: float, per_decade: int) -> Rule:
    """Rule of one arm over the window."""
    lr_K = candidates(10.0 ** WINDOW[0], 10.0 ** WINDOW[1], per_decade)
    return Rule((ARM,), tuple(map(math.log10, lr_K)), lr_K, MANY_SEEDS, right, runs, None)


def search(rule: Rule, collapses: Response) -> list[Answer]:
    """Answers that the search collects from one arm, one run at a time."""
    runs: list[Run] = []
    while (question := rule.next_question({ARM: runs})) is not None:
        x = math.log10(question.lr)
        runs.append(Run(len(runs), ARM, x, question.lr, question.seed, "", "decided", collapses(x)))
    return [Answer(run.x, bool(run.collapsed)) for run in runs]


def grid(rule: Rule, collapses: Response) -> list[Answer]:
    """Answers of evenly spaced runs, as many as the search may have."""
    low, high = WINDOW
    places = low + (np.arange(rule.runs_per_arm) + 0.5) * (high - low) / rule.runs_per_arm
    return [Answer(float(x), collapses(float(x))) for x in places]


def middle(answers: Sequence[Answer]) -> float:
    """Middle between the highest x that did not collapse and the lowest that did; the window's ends where none did."""
    stable = max([x for x, collapsed in answers if not collapsed], default=WINDOW[0])
    return (stable + min([x for x, collapsed in answers if collapsed], default=WINDOW[1])) / 2


def scores(noise: Noise, *, runs: int, right: float, per_decade: int, replicates: int, seed: int) -> dict[str, Score]:
    """Score of the search, of the grid read by the posterior, and of the grid read by its middle."""
    rule = make_rule(runs, right, per_decade)
    rng = np.random.default_rng(seed)
    errors: dict[str, list[float]] = {"search": [], "grid": [], "grid, middle": []}
    covered: dict[str, list[bool]] = {"search": [], "grid": []}
    for _ in range(replicates):
        c = rng.uniform(*LOG10_C)
        for S in LEVELS:
            b = c - math.log10(S)
            collapses = noise(rng, b)
            answers = {"search": search(rule, collapses), "grid": grid(rule, collapses)}
            for design, found in answers.items():
                eta50 = estimate(rule.x_K, posterior(rule.x_K, found, right), LEVEL)
                errors[design].append(math.log10(eta50.value) - b)
                covered[design].append((eta50.low or 0.0) <= 10.0**b <= (eta50.high or math.inf))
            errors["grid, middle"].append(middle(answers["grid"]) - b)
    return {design: _score(found, covered.get(design, [])) for design, found in errors.items()}


def _score(errors: Sequence[float], covered: Sequence[bool]) -> Score:
    absolute = np.abs(errors)
    coverage = float(np.mean(covered)) if covered else math.nan
    return Score(float(np.sqrt(np.mean(absolute**2))), float(np.quantile(absolute, 0.9)), coverage)


def main() -> None:
    """Print the table of `docs/search.md`."""
    parser = argparse.ArgumentParser(description="Search and grid on runs that are made up.")
    parser.add_argument("--replicates", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--collapsed-prob", type=float, default=0.85)
    parser.add_argument("--points-per-decade", type=int, default=8)
    given = parser.parse_args()
    right = given.collapsed_prob
    noises = {f"w = {width:g} dex": logistic(width) for width in (0.0, 0.05, 0.15, 0.3)}
    noises["as assumed"] = flipped(right)
    print(f"{given.replicates} replicates of {len(LEVELS)} arms, p = {right:g}, seed {given.seed}; errors in dex")
    print("| runs an arm | noise | design | rms | 90 % of errors below | coverage of the 90 % interval |")
    print("|---|---|---|---|---|---|")
    for runs in given.runs:
        for name, noise in noises.items():
            options = {"right": right, "per_decade": given.points_per_decade}
            found = scores(noise, runs=runs, replicates=given.replicates, seed=given.seed, **options)
            for design, score in found.items():
                coverage = "" if math.isnan(score.coverage) else f"{score.coverage:.0%}"
                print(f"| {runs} | {name} | {design} | {score.rms:.3f} | {score.p90:.3f} | {coverage} |")


if __name__ == "__main__":
    main()
