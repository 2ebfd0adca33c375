"""`stalefront parity`: are the other frameworks' own numbers ours?"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

from stalefront.parity import GoldenFile, Outcome, Unreadable, check

EQUAL, MISSED, UNREADABLE = 0, 1, 2


def parity(files: Sequence[Path]) -> int:
    """Print what became of every file, and totals a framework; returns the exit code."""
    totals: defaultdict[str, Counter[str]] = defaultdict(Counter)
    unreadable = False
    for path in files:
        try:
            golden = GoldenFile.read(path)
            outcome = check(golden)
        except Unreadable as error:
            print(f"error: {error}", file=sys.stderr)
            unreadable = True
            continue
        print(line(outcome))
        totals[golden.peer][outcome.state] += 1
    print_totals(totals)
    if unreadable:
        return UNREADABLE
    return MISSED if any(counts["miss"] for counts in totals.values()) else EQUAL


def line(outcome: Outcome) -> str:
    """One file, as in `equal     verl__cispo__eps02.json`; files that are not evaluated yet say so."""
    state = "declined" if outcome.state == "later" else outcome.state
    return f"{state:<9} {outcome.path.name}" + (f": {outcome.detail}" if outcome.detail else "")


def print_totals(totals: dict[str, Counter[str]]) -> None:
    """A row a framework, and all of them."""
    every: Counter[str] = sum(totals.values(), Counter())
    print()
    for name, counts in [*sorted(totals.items()), ("all", every)]:
        text = ", ".join(f"{counts[state]} {state}" for state in ("equal", "miss", "declined"))
        later = f" ({counts['later']} not counted: staleness rules)" if counts["later"] else ""
        print(f"{name:<16} {text}{later}")
