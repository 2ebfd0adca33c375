"""What figures share: one look, log2 positions, number formats, and byte-stable PNG output."""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib as mpl
import numpy as np
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

DPI = 130
INK = "#1f2933"
MUTED = "#697586"
GRID = "#dde3ea"
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5)), (0, (3, 3)), (0, (8, 2)))

# The family that matplotlib carries itself, so that a figure doesn't depend on the fonts of the machine.
_RC: dict[str, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 9,
    "axes.labelcolor": INK,
    "axes.edgecolor": MUTED,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": GRID,
    "legend.frameon": False,
    "hatch.linewidth": 0.6,
    "svg.hashsalt": "stalefront",
}


@contextmanager
def look() -> Iterator[None]:
    """Style of every figure, whatever the user's matplotlibrc says."""
    with mpl.rc_context():
        mpl.rcdefaults()
        sns.set_theme(style="ticks", context="paper", rc=_RC)
        yield


def new_figure(width: float, height: float) -> Figure:
    """Make an empty figure on the Agg canvas (no display, no global state); inches."""
    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def png(figure: Figure) -> bytes:
    """PNG bytes of a figure, without date or software tag."""
    out = io.BytesIO()
    with look():
        figure.savefig(out, format="png", dpi=DPI, metadata={"Software": None}, facecolor="white")
    return out.getvalue()


def shades(n: int) -> list[tuple[float, float, float]]:
    """Make n colours of cividis, dark to light but never too light for a line on white."""
    palette = sns.color_palette("cividis", as_cmap=True)
    return [tuple(palette(v)[:3]) for v in np.linspace(0.0, 0.82, n)]


def number(value: float) -> str:
    """Three significant digits, scientific below 0.01 and from 10000 on, without padding zeros."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if 0.01 <= abs(value) < 10000:
        return f"{value:.3g}"
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"


def log2_ticks(axis: Any, values: Sequence[float], most: int = 12) -> None:
    """Put ticks at the log2 of the values, labelled with the values; every so many that at most ``most`` remain."""
    ordered = sorted(set(values))
    # An even stride keeps the labels of a regular grid evenly spaced.
    kept = ordered[:: -(-len(ordered) // most)]
    axis.set_ticks([math.log2(v) for v in kept], [number(v) for v in kept])


def thin(values: Sequence[Any], most: int) -> list[Any]:
    """At most ``most`` of the values, evenly spaced, the first and last always among them."""
    if len(values) <= most:
        return list(values)
    picks = np.unique(np.linspace(0, len(values) - 1, most).round().astype(int))
    return [values[i] for i in picks]


def edges(centres: Sequence[float]) -> list[tuple[float, float]]:
    """Interval around each of the increasing positions: to the midpoints between neighbours."""
    if not centres:
        return []
    if len(centres) == 1:
        return [(centres[0] - 0.5, centres[0] + 0.5)]
    middle = [(a + b) / 2 for a, b in itertools.pairwise(centres)]
    first, last = 2 * centres[0] - middle[0], 2 * centres[-1] - middle[-1]
    bounds = [first, *middle, last]
    return list(itertools.pairwise(bounds))


def empty(axes: Axes, text: str) -> None:
    """Say in the figure why there is nothing in it."""
    axes.set_axis_off()
    axes.text(0.5, 0.5, text, ha="center", va="center", color=MUTED, transform=axes.transAxes, wrap=True)


def wrap_title(text: str, width: int) -> str:
    """Break a title at spaces so that no line is longer than ``width`` characters."""
    lines = [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append(word)
        else:
            lines[-1] = f"{lines[-1]} {word}".strip()
    return "\n".join(lines)
