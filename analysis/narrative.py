"""Fits in plain English. Every number in a sentence is read from a Fit; nothing is computed or typed in here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stalefront.analysis.figures.style import number
from stalefront.analysis.fits.base import Constant, Fit, Interval

if TYPE_CHECKING:
    from stalefront.analysis.doctor import Finding

# The two named frontiers a slope is held against.
NAMED = {"the 1/S law (slope −1)": -1.0, "a flat frontier (slope 0)": 0.0}
MINUS = "−"
# Relative to an interval's end.
ROUNDING = 1e-9


@dataclass(frozen=True)
class Judgement:
    """What an interval of the slope says about 1/S and flat: a short tag and a sentence."""

    tag: str
    sentence: str


def show(value: float | None) -> str:
    """A number for reading, with a true minus sign; an en dash where there is none."""
    return "–" if value is None else number(value).replace("-", MINUS)


def show_ends(interval: Interval) -> str:
    """``[lo, hi]``, half-open for a bracket; unbounded ends in words."""
    lo = "unbounded below" if interval.lo is None else show(interval.lo)
    hi = "unbounded above" if interval.hi is None else show(interval.hi)
    return f"[{lo}, {hi}{')' if interval.kind == 'bracket' else ']'}"


def show_interval(interval: Interval | None) -> str:
    """The ends with what kind of interval it is."""
    if interval is None:
        return "no interval"
    kind = {"set": "all slopes the brackets admit", "bracket": "bracket by the grid"}.get(
        interval.kind, f"{interval.level:.0%} {interval.kind} interval" if interval.level else interval.kind
    )
    return f"{show_ends(interval)}, {kind}"


def with_interval(constant: Constant | None) -> str:
    """Value and interval, or only the interval where no value is identified."""
    if constant is None or (constant.value is None and constant.interval is None):
        return "not identified"
    if constant.value is None:
        return show_interval(constant.interval)
    if constant.interval is None:
        return show(constant.value)
    return f"{show(rounded(constant.value, constant.interval))} {show_interval(constant.interval)}"


def rounded(value: float, interval: Interval) -> float:
    """`value`, or 0 where a fit reached zero to its rounding only: for a reader it is one."""
    ends = [abs(end) for end in (interval.lo, interval.hi) if end is not None]
    return 0.0 if ends and abs(value) < ROUNDING * max(ends) else value


def plural(n: int, noun: str) -> str:
    """``1 cell``, ``2 cells``, ``3 values of S``."""
    head, _, tail = noun.partition(" ")
    return f"{n} {noun}" if n == 1 else f"{n} {head}s{' ' + tail if tail else ''}"


def counts(fit: Fit, unit: str = "cell") -> str:
    """n with what is censored."""
    parts = [f"n = {plural(fit.n, unit)}"]
    if fit.name == "firth":
        parts += [f"{fit.n_events} collapsed", f"{fit.n_right} right-censored at T"]
    else:
        parts += [f"{fit.n_left} left-censored"] if fit.n_left else []
        parts += [f"{fit.n_right} right-censored"] if fit.n_right else []
    parts += [f"{plural(fit.n_undecided, 'cell')} left out as undecided"] if fit.n_undecided else []
    return ", ".join(parts)


def judge_slope(interval: Interval | None, source: str) -> Judgement:
    """Hold an interval of the slope against 1/S and flat."""
    if interval is None or (interval.lo is None and interval.hi is None):
        return Judgement("cannot tell", f"{source} does not bound the slope: neither 1/S nor flat can be told here.")
    inside = [name for name, value in NAMED.items() if interval.contains(value)]
    outside = [name for name in NAMED if name not in inside]
    if len(inside) == len(NAMED):
        return Judgement(
            "cannot tell", f"{source} contains both −1 and 0, so this grid cannot tell 1/S from a flat frontier."
        )
    if not inside:
        return Judgement("neither 1/S nor flat", f"{source} is incompatible with both {' and '.join(outside)}.")
    tag = "1/S, not flat" if "1/S" in inside[0] else "flat, not 1/S"
    return Judgement(tag, f"{source} is compatible with {inside[0]} and incompatible with {outside[0]}.")


def slope_of(firth: Fit, s_eta: Fit | None) -> tuple[str, Judgement]:
    """Slope in words and what it says; falls back on the bracket sets where no surface could be fitted."""
    if "slope" in firth.constants:
        constant = firth.constants["slope"]
        source = "The interval" if constant.interval else "The fit"
        return with_interval(constant), judge_slope(constant.interval, source)
    for rule in ("conservative", "optimistic"):
        constant_set = s_eta.constants.get(f"slope_{rule}") if s_eta else None
        if constant_set is not None and constant_set.interval is not None:
            text = f"{show_interval(constant_set.interval)} ({rule})"
            return text, judge_slope(constant_set.interval, f"The set of slopes under {rule} bracketing")
    why = "; ".join(firth.notes) or "no fit"
    return "–", Judgement("no slope", f"No slope is fitted: {why}.")


def say_firth(fit: Fit) -> list[str]:
    """Contour, slope and constant of the collapse surface."""
    if "slope" not in fit.constants:
        return [f"No 50 % contour is fitted: {'; '.join(fit.notes)} ({counts(fit)})."]
    slope, product = fit.constants["slope"], fit.constants["S_eta50"]
    judgement = judge_slope(slope.interval, "The interval")
    tests = fit.tests
    return [
        f"The learning rate at which half the runs collapse scales as S to the power {with_interval(slope)}; "
        f"{counts(fit)}. {judgement.sentence} Penalised likelihood-ratio p-values: "
        f"{show(tests['p_one_over_S'])} against 1/S, {show(tests['p_flat'])} against flat.",
        f"If the slope is held at −1, half the runs collapse at S·η = {with_interval(product)}; {counts(fit)}."
        + ("" if slope.interval and slope.interval.contains(-1.0) else " The data do not support holding it there."),
        *([f"Note: {'; '.join(fit.notes)}."] if fit.notes else []),
    ]


def say_s_eta(fit: Fit) -> list[str]:
    """Whether one S·η_max fits every S, under both bracketing rules."""
    if not fit.constants:
        return []
    if fit.n < 2:
        return ["There is one value of S only, so no S·η_max can be compared across S."]
    c = fit.constants
    rules = ("conservative", "optimistic")
    same = all(c[f"{n}_{rules[0]}"].interval == c[f"{n}_{rules[1]}"].interval for n in ("S_eta_max", "slope"))
    if same:
        return [f"Under either bracketing, {_product_and_slope(fit, rules[0])}"]
    return [f"Under {rule} bracketing, {_product_and_slope(fit, rule)}" for rule in rules]


def _product_and_slope(fit: Fit, rule: str) -> str:
    product, slope = fit.constants[f"S_eta_max_{rule}"].interval, fit.constants[f"slope_{rule}"].interval
    first = (
        "no single S·η_max lies in the bracket of every S"
        if product is None
        else f"any S·η_max in {show_ends(product)} lies in the bracket of every S"
    )
    second = (
        "no straight line in log S passes through every bracket"
        if slope is None
        else f"straight lines through every bracket have slopes in {show_ends(slope)}"
    )
    return f"{first}; {second}; {counts(fit, 'value of S')}."


def say_t_eta(fit: Fit) -> list[str]:
    """t·η at collapse, what is censored, and the slope among events."""
    largest = fit.constants.get("largest_censored")
    censored = (
        f" Right-censored, no event: {plural(fit.n_right, 'run')}, the longest after t·η = {show(largest.value)}."
        if largest
        else ""
    )
    if "t_eta" not in fit.constants:
        return [f"No run collapsed at a measurable time, so there is no t·η.{censored}"]
    c = fit.constants
    first = (
        f"Over the {plural(fit.n, 'run')} that collapsed, the learning rate spent until collapse (t·η) has geometric "
        f"mean {with_interval(c['t_eta'])}; at either end of the event intervals {show(c['t_eta_low'].value)} and "
        f"{show(c['t_eta_high'].value)}. The largest is {show(c['max_over_min'].value)} times the smallest"
        + (f" (coefficient of variation {show(c['cv'].value)})" if c["cv"].value is not None else "")
        + f".{censored}"
    )
    if "slope" not in c:
        return [first]
    slope = c["slope"]
    law = "compatible" if slope.interval and slope.interval.contains(-1.0) else "incompatible"
    return [
        first,
        f"Among those runs d log t/d log η = {with_interval(slope)}, {law} with the −1 of a constant t·η; it is "
        "conditional on collapse, since slow runs are censored.",
    ]


def say_inversions(fit: Fit) -> str | None:
    """Count of non-monotone pairs and what was refused for it."""
    total = fit.tests.get("inversions") or 0.0
    if not total:
        return None
    refused = [n for n in fit.notes if "no single η_max" in n]
    text = f"{fit.definition}: {show(total)} pair(s) where a lower learning rate collapsed and a higher one did not"
    return text + (f". {' '.join(refused)}." if refused else "; seeds are pooled for the brackets.")


def say_finding(finding: Finding, labels: Mapping[str, str]) -> list[str]:
    """What is wrong, where it shows, and the way out; ``labels`` name the cells of a sweep."""
    of, most = f"{finding.cells} of {plural(finding.checked, 'cell')}", "" if finding.cells == 1 else "most in "
    where = f"In {of}, {most}{labels[finding.worst]}: " if labels else ""
    evidence = finding.evidence if where else finding.evidence[0].upper() + finding.evidence[1:]
    return [finding.words, f"{where}{evidence}.", finding.fix]
