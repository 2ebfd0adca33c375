"""The report's section on methods: how far each arm pushes the frontier against its reference, and at what price."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from stalefront.analysis.arms import Arm, Family, families
from stalefront.analysis.fits.base import Fit, outcomes
from stalefront.analysis.fits.price import fit_price, safe_cells
from stalefront.analysis.fits.push import Located, fit_push, locate
from stalefront.analysis.fits.seeds import Draws, draws_of
from stalefront.analysis.narrative import plural, show
from stalefront.analysis.summary import Table, capped
from stalefront.analysis.tables import SweepTable
from stalefront.analysis.verdicts import DEFAULT

DEFINITIONS = ("first_zero", DEFAULT)
# A weight this close to 1 is 1: log-probs of sampler and trainer may differ in their last bits.
WEIGHT_SLACK = 1e-6
MAX_ARMS = 200
OUT, IN, SAME, UNKNOWN = "further out", "further in", "not distinguishable from no push", "not comparable"


@dataclass(frozen=True)
class Comparison:
    """The arms of one family held against its reference.

    Parameters
    ----------
    family : Family
    reference : Arm
    fits : dict
        (arm, definition) → push against the reference, also of the reference itself.
    own : dict
        (arm, definition) → push against the uncorrected arm with the same loss, where that is another one.
    prices : dict
        arm → price.
    remarks : dict
        arm → what a reader must know about it: never acted, cells without a partner.
    seeds : int
        Seeds that were resampled, 0 if too few.
    safe : dict
        S → learning rate of the cells that are safe for every arm; empty if there is none.
    """

    family: Family
    reference: Arm
    fits: dict[tuple[str, str], Fit]
    own: dict[tuple[str, str], Fit]
    prices: dict[str, Fit]
    remarks: dict[str, list[str]]
    seeds: int
    safe: dict[float, float] = field(default_factory=dict)

    @property
    def others(self) -> list[Arm]:
        """Every arm but the reference, the furthest push first, what cannot be compared last."""
        rest = [a for a in self.family.arms if a.label != self.reference.label]
        return sorted(rest, key=lambda a: (*self._rank(a, DEFAULT), *self._rank(a, "first_zero"), a.label))

    @property
    def every_fit(self) -> list[Fit]:
        """All fits, in a fixed order."""
        return [*self.fits.values(), *self.own.values(), *self.prices.values()]

    def _rank(self, arm: Arm, definition: str) -> tuple[bool, float]:
        push = pooled(self.fits[(arm.label, definition)])["push"]
        known = push["lo"] if push["lo"] is not None else push["hi"]
        return (push["censoring"] == "both", 0.0 if known is None else -known)


def pooled(fit: Fit) -> dict[str, Any]:
    """The row of a push over all S."""
    return fit.rows[-1]


def compare(sweep: SweepTable, fits: dict[str, dict[tuple[str, str], Fit]]) -> list[Comparison]:
    """Hold the arms of every family against its reference.

    Parameters
    ----------
    sweep : SweepTable
    fits : dict
        arm → (law, definition) → Fit; surfaces found there are not fitted again.

    Returns
    -------
    list of Comparison
        Empty where no two arms are matched, or none of them is uncorrected.
    """
    found = []
    for family in families(sweep.arms, sweep.settings.push.reference):
        if family.reference is not None:
            found.append(_compare(sweep, family, family.reference, fits))
    return found


def _compare(
    sweep: SweepTable, family: Family, reference: Arm, fits: dict[str, dict[tuple[str, str], Fit]]
) -> Comparison:
    table, level = sweep.table, sweep.settings.level
    labels = [a.label for a in family.arms]
    seeds = sorted(
        {s for s in table[table["arm"].isin(labels)]["seed"] if s is not None}, key=lambda s: (str(type(s)), s)
    )
    draws = draws_of(seeds)
    pushes: dict[tuple[str, str], Fit] = {}
    own: dict[tuple[str, str], Fit] = {}
    for definition in DEFINITIONS:
        frames = {label: outcomes(table, definition, label) for label in labels}
        located = {
            label: locate(
                frames[label],
                definition=definition,
                arm=label,
                draws=draws,
                level=level,
                firth=fits.get(label, {}).get(("firth", definition)),
            )
            for label in labels
        }
        for arm in family.arms:
            against = {reference.label: pushes}
            base = family.base_of(arm)
            if base is not None and base.label not in (arm.label, reference.label):
                against[base.label] = own
            for other, store in against.items():
                store[(arm.label, definition)] = _push(frames, located, arm.label, other, definition, draws)
    safe = safe_cells(table, labels)
    # One arm that collapses everywhere leaves no cell that is safe for all: then each is judged beside the reference.
    cells = {label: safe or safe_cells(table, [label, reference.label]) for label in labels}
    prices = {label: fit_price(table, label, reference.label, cells[label], level=level) for label in labels}
    remarks = {a.label: _remarks(table, a, reference) for a in family.arms}
    return Comparison(family, reference, pushes, own, prices, remarks, len(seeds) if draws else 0, safe)


def _push(
    frames: dict[str, pd.DataFrame],
    located: dict[str, Located],
    arm: str,
    other: str,
    definition: str,
    draws: Draws | None,
) -> Fit:
    return fit_push(frames[arm], located[arm], located[other], draws, definition=definition, labels=(arm, other))


def _remarks(table: pd.DataFrame, arm: Arm, reference: Arm) -> list[str]:
    """Whether the arm ever acted, and how many of its decided cells have no partner in the reference."""
    mine = table[table["arm"] == arm.label]
    out = []
    flags = [_inert(arm, row) for row in mine.to_dict("records")]
    known = [f for f in flags if f is not None]
    if known and all(known):
        out.append(f"inert: never acted ({plural(len(known), 'run')})")
    elif any(known):
        out.append(f"acted in {len(known) - sum(known)} of {plural(len(known), 'run')}")
    n = len(_decided_cells(table, arm.label) ^ _decided_cells(table, reference.label))
    if n:
        out.append(f"{plural(n, 'cell')} without a partner")
    return out


def _inert(arm: Arm, row: dict[Any, Any]) -> bool | None:
    """Whether nothing that the arm adds did anything in one run; None where the record cannot say.

    What is looked at is what the arm adds: corrections and controllers where it has any, else the clip of its loss. The
    run's own warning names what never acted; without one, as in a short run, the columns of the steps decide, which do
    not show what a controller did.
    """
    if row["last_step"] is None:
        return None
    added = [f"correction.{c}" for c in arm.corrections] + [f"controller.{c}" for c in arm.controllers]
    warned = re.search(r"inert: \[([^]]*)\]", str(row["warnings"] or ""))
    if warned:
        return set(added or [f"loss.{arm.loss}"]) <= set(re.findall(r"'([^']*)'", warned[1]))
    if arm.controllers:
        return None
    if arm.corrections:
        seen = [v for v in (row["mask_frac_max"], row["weight_off_max"]) if v is not None]
        return max(seen) <= WEIGHT_SLACK if seen else None
    return None if not arm.clipped or row["clip_frac_max"] is None else row["clip_frac_max"] == 0


def _decided_cells(table: pd.DataFrame, arm: str) -> set[tuple[Any, ...]]:
    frame = outcomes(table, DEFAULT, arm)
    known = frame[frame["collapsed"].notna()]
    return set(known[["S", "lr", "seed"]].itertuples(index=False, name=None))


def read_push(push: dict[str, Any]) -> str:
    """What a push says, in a few words."""
    if push["censoring"] == "both":
        return UNKNOWN
    lo, hi = push["outer"] or (push["lo"], push["hi"])
    if lo is not None and lo > 1:
        return OUT
    if hi is not None and hi < 1:
        return IN
    return SAME


def show_push(push: dict[str, Any] | None) -> str:
    """``1.68 [0.75, 3.9]``; ``≥ 2.1`` or ``≤ 0.4`` with the end of its interval where it is censored."""
    if push is None:
        return "–"
    lo, hi = push["outer"] or (None, None)
    if push["censoring"] == "both":
        return UNKNOWN
    if push["censoring"] == "none":
        return f"{show(push['lo'])} [{'…' if lo is None else show(lo)}, {'…' if hi is None else show(hi)}]"
    sign, bound, end = ("≥", push["lo"], lo) if push["censoring"] == "right" else ("≤", push["hi"], hi)
    if end is None:
        return f"{sign} {show(bound)} (interval open)"
    return (
        f"{sign} {show(bound)} [{sign} {show(end)}]"
        if abs(end - bound) > 1e-9 * abs(bound)
        else f"{sign} {show(bound)}"
    )


def context(c: Comparison, figure: Any, level: float) -> dict[str, Any]:
    """What the templates say about one family."""
    return {
        "name": c.family.name,
        "reference": c.reference.label,
        "why": c.family.why,
        "said": [(d, _say(c, d)) for d in DEFINITIONS],
        "limits": _limits(c, level),
        "price": _say_price(c),
        "figure": figure,
        "table": push_table(c),
        "detail": detail_table(c),
    }


def headline(c: Comparison) -> str:
    """One sentence for a hurried reader."""
    where = f" ({c.family.name})" if c.family.name else ""
    return f"The reference{where} is {c.reference.label}; under {DEFAULT}, {_counts(c, DEFAULT)}."


def _counts(c: Comparison, definition: str) -> str:
    read = [read_push(pooled(c.fits[(a.label, definition)])["push"]) for a in c.others]
    found = [f"{read.count(key)} {key}" for key in (OUT, IN, SAME, UNKNOWN) if read.count(key)]
    return f"of {plural(len(read), 'arm')} held against it, {', '.join(found)}"


def _say(c: Comparison, definition: str) -> list[str]:
    """Counts, then the arms at both ends."""
    out = [f"{_counts(c, definition)[0].upper()}{_counts(c, definition)[1:]}."]
    theirs = c.fits[(c.reference.label, definition)]
    for reading, text in ((OUT, "Furthest out"), (IN, "Furthest in")):
        mine = [a for a in c.others if read_push(pooled(c.fits[(a.label, definition)])["push"]) == reading]
        if not mine:
            continue
        key = [pooled(c.fits[(a.label, definition)])["push"] for a in mine]
        sizes = [p["lo"] if p["lo"] is not None else p["hi"] for p in key]
        at = sizes.index(max(sizes) if reading == OUT else min(sizes))
        fit = c.fits[(mine[at].label, definition)]
        out.append(
            f"{text}: {mine[at].label}, η50 times {show_push(key[at])} over S = {_values(pooled(fit)['over'])} "
            f"({plural(fit.n, 'run')}, {plural(theirs.n, 'run')} of the reference)."
        )
    return out


def _values(values: list[float]) -> str:
    return ", ".join(f"{v:g}" for v in values)


def _limits(c: Comparison, level: float) -> str:
    """Which interval is shown and what the comparison cannot say."""
    n = len(c.others)
    interval = (
        f"Intervals are {level:.0%}: at each end the outer one of the profile likelihood and a paired bootstrap over "
        f"{plural(c.seeds, 'seed')}."
        if c.seeds
        else f"Intervals are {level:.0%}, from profile likelihoods alone: there are too few seeds to resample."
    )
    return (
        f"{interval} They are not adjusted for looking at {plural(n, 'arm')}: without any push, about "
        f"{show((1 - level) * n)} would exclude 1 by chance. A push is a ratio of learning rates at which half the "
        "runs collapse within T steps; it says nothing about runs that go on longer, about other models and tasks, "
        "about options that were not run, or about reward."
    )


def _say_price(c: Comparison) -> str:
    what = (
        "The price is the difference from the reference in mean held-out reward over the last third of the learner "
        "steps, averaged over safe cells, one at each S, and paired over seeds. Safe is"
    )
    rate = "the smallest learning rate at which no run of"
    if not c.safe:
        return (
            f"{what}, for each arm by itself, {rate} it or of the reference touched zero, since no cell is safe for "
            "every arm; prices of different arms are then not of the same cells (fits.json lists them)."
        )
    cells = ", ".join(f"η = {show(lr)} at S = {s:g}" for s, lr in c.safe.items())
    return f"{what} {rate} any arm touched zero: {cells}."


def push_table(c: Comparison) -> Table:
    """One row an arm: push under both definitions, what it says, and its price; the reference first."""
    rows = []
    for arm in [c.reference, *c.others]:
        is_reference = arm.label == c.reference.label
        fits = [c.fits[(arm.label, d)] for d in DEFINITIONS]
        own = c.own.get((arm.label, DEFAULT))
        strict = fits[1]
        reading = "reference" if is_reference else read_push(pooled(strict)["push"])
        n = strict.n + int(strict.settings["n_reference"])
        rows.append(
            [
                arm.label,
                *("1" if is_reference else show_push(pooled(f)["push"]) for f in fits),
                f"{reading} with {plural(n, 'run')}" if reading == SAME else reading,
                "–" if own is None else show_push(pooled(own)["push"]),
                *_price_text(c.prices[arm.label], is_reference),
                f"{strict.n_events} of {strict.n}",
                "; ".join([*c.remarks[arm.label], *_partial(c, strict)]) or "–",
            ]
        )
    head = ["arm", *(f"push, {d}" for d in DEFINITIONS), f"reads as ({DEFAULT})", f"against its own loss ({DEFAULT})"]
    head += ["reward at the safe cells", "its difference (price)", f"collapsed ({DEFAULT})", "remarks"]
    caption = (
        "Push: η50, and with it S·η50, over that of the reference; geometric mean over the S where it is bounded. "
        "≥ and ≤: η50 of one of the two lies beyond the grid; the end of the interval is in brackets (…: unbounded). "
        "Not comparable: both lie beyond the same side of it at every S. Against its own loss: the same ratio to the "
        "uncorrected arm with this arm's loss, where that is not the reference. Inert: in no step did a correction of "
        "the arm, or without one the clip of its loss, change a token."
    )
    return capped(head, rows, caption, MAX_ARMS)


def _partial(c: Comparison, fit: Fit) -> list[str]:
    """Say at which S the push is bounded where that is not everywhere."""
    every = [row["S"] for row in fit.rows if row["S"] is not None]
    over = pooled(fit)["over"]
    return [] if over == every or not over else [f"push over S = {_values(over)} only ({DEFAULT})"]


def _price_text(fit: Fit, is_reference: bool) -> list[str]:
    if "price" not in fit.constants:
        return ["–", "–"]
    reward, price = fit.constants["reward"], fit.constants["price"]
    ends = price.interval
    interval = f" [{show(ends.lo)}, {show(ends.hi)}]" if ends else " (one seed, no interval)"
    return [show(reward.value), "–" if is_reference else show(price.value) + interval]


def detail_table(c: Comparison) -> Table:
    """S·η50 and push at each S: one row an arm and definition."""
    values = sorted({row["S"] for f in c.fits.values() for row in f.rows if row["S"] is not None})
    rows = []
    for arm in [c.reference, *c.others]:
        for definition in DEFINITIONS:
            fit = c.fits[(arm.label, definition)]
            by_s = {row["S"]: row for row in fit.rows}
            cells = [_at_s(by_s.get(s), reference=arm.label == c.reference.label) for s in values]
            rows.append([arm.label, definition, *cells])
    caption = "S·η50 with its interval; after the semicolon the push at that S."
    return capped(["arm", "definition", *(f"S = {s:g}" for s in values)], rows, caption, 2 * MAX_ARMS)


def _at_s(row: dict[str, Any] | None, *, reference: bool) -> str:
    if row is None:
        return "–"
    scaled = {k: _scaled(v, row["S"]) for k, v in row["eta50"].items()}
    text = show_push(scaled).replace(UNKNOWN, "not identified")
    return text if reference or row["push"] is None else f"{text}; push {show_push(row['push'])}"


def _scaled(value: Any, factor: float) -> Any:
    if isinstance(value, list):
        return [_scaled(v, factor) for v in value]
    return value * factor if isinstance(value, float) else value
