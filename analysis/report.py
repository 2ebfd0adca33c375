"""The frontier report: ``report.html``, ``report.md``, ``table.csv``, ``fits.json`` and ``figures/``.

Rebuilt from the files of a sweep directory alone, byte for byte: no clock, no absolute path, no randomness that is
not seeded. Every number in the text comes from the run table or from a fit in ``fits.json``.
"""

from __future__ import annotations

import base64
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined

from stalefront.analysis import mismatch, narrative, push, summary
from stalefront.analysis.doctor.section import section as mismatch_section
from stalefront.analysis.doctor.sweep import examine_directory
from stalefront.analysis.figures import cosine, frontier_map, reward_curves, t_eta
from stalefront.analysis.figures import push as push_figure
from stalefront.analysis.figures.style import png
from stalefront.analysis.fits.base import Fit, finite, outcomes
from stalefront.analysis.fits.eta_max import fit_eta_max
from stalefront.analysis.fits.firth import fit_firth
from stalefront.analysis.fits.s_eta import fit_s_eta
from stalefront.analysis.fits.t_eta import fit_t_eta
from stalefront.analysis.settings import ReportSettings
from stalefront.analysis.tables import SweepTable, build_table, write_table
from stalefront.analysis.verdicts import DEFAULT

Fits = dict[tuple[str, str], Fit]
HEADLINE = ("first_zero", DEFAULT)


@dataclass(frozen=True)
class ReportFiles:
    """Paths of what :func:`build_report` wrote."""

    html: Path
    markdown: Path
    table: Path
    fits: Path
    figures: tuple[Path, ...]


@dataclass(frozen=True)
class Drawn:
    """A figure ready to be written: file stem, title, caption, what a reader without eyes needs, PNG, CSV."""

    stem: str
    title: str
    caption: str
    alt: str
    image: bytes
    data: bytes

    @property
    def base64(self) -> str:
        """PNG as text for a page that needs no other file."""
        return base64.b64encode(self.image).decode("ascii")


def build_report(sweep_dir: Path, *, settings: ReportSettings | None = None) -> ReportFiles:
    """Write the report of a sweep directory, finished or not.

    Parameters
    ----------
    sweep_dir : Path
        Directory with ``plan.json`` and ``cells/``.
    settings : ReportSettings, optional
        Verdict thresholds and drawing limits.

    Returns
    -------
    ReportFiles
        Every file is written to a temporary name and moved into place; ``report.html`` comes last.

    Raises
    ------
    FileNotFoundError, ValueError
        As :func:`stalefront.analysis.tables.build_table`.
    """
    sweep_dir = Path(sweep_dir)
    sweep = build_table(sweep_dir, settings)
    arms = sorted(set(sweep.table["arm"])) if len(sweep.table) else []
    shown = arms[: sweep.settings.max_arms]
    fits = {arm: fit_arm(sweep, arm, full=arm in shown) for arm in arms}
    figures = {arm: draw_arm(sweep, arm, fits[arm], index, len(arms)) for index, arm in enumerate(shown)}
    compared = push.compare(sweep, fits)
    pushes = [draw_push(c, index, len(compared)) for index, c in enumerate(compared)]
    context = _context(sweep_dir.name, sweep, fits, figures)
    context["push"] = [push.context(c, f, sweep.settings.level) for c, f in zip(compared, pushes, strict=True)]
    context["headline"] += [push.headline(c) for c in compared]
    examined = examine_directory(sweep_dir, sweep.settings.doctor)
    context["mismatch"] = mismatch_section(examined, sweep.table, sweep.settings.doctor) if len(sweep.table) else None
    sections = mismatch.sections(sweep_dir, sweep)
    sectional = [draw_section(section, sections) for section in sections]
    context["sections"] = [{**s.context, "figure": f} for s, f in zip(sections, sectional, strict=True)]
    context["headline"] += [sentence for section in sections for sentence in mismatch.headline(section)]
    drawn = [f for arm in shown for f in figures[arm]] + pushes + sectional
    every = [f for arm in fits.values() for f in arm.values()] + [f for c in compared for f in c.every_fit]
    every += [f for section in sections for f in section.fits]
    return _write(sweep_dir, sweep, every, drawn, context)


def fit_arm(sweep: SweepTable, arm: str, *, full: bool = True) -> Fits:
    """Every law on every definition in one arm; with ``full`` false only what the summary of arms needs.

    Returns
    -------
    dict
        (law, definition) → Fit.
    """
    names = [d.name for d in sweep.settings.definitions] if full else [DEFAULT]
    found: Fits = {}
    for name in names:
        frame = outcomes(sweep.table, name, arm)
        found[("eta_max", name)] = fit_eta_max(frame, definition=name, arm=arm)
        found[("s_eta", name)] = fit_s_eta(frame, definition=name, arm=arm)
        found[("firth", name)] = fit_firth(frame, definition=name, arm=arm, level=sweep.settings.level)
        found[("t_eta", name)] = fit_t_eta(frame, definition=name, arm=arm, level=sweep.settings.level)
    return found


def draw_arm(sweep: SweepTable, arm: str, fits: Fits, index: int, n_arms: int) -> list[Drawn]:
    """Draw the four figures of one arm."""
    suffix = "" if n_arms == 1 else f"-{index + 1:02d}-{re.sub(r'[^a-z0-9]+', '_', arm.lower()).strip('_')[:40]}"
    all_fits = list(fits.values())
    table, settings = sweep.table, sweep.settings
    made = (
        ("frontier_map", frontier_map, frontier_map.data(table, arm, all_fits)),
        ("t_eta", t_eta, t_eta.data(table, arm, all_fits)),
        ("reward_curves", reward_curves, reward_curves.data(table, sweep.curves, arm, settings.max_panels)),
        ("cosine", cosine, cosine.data(table, sweep.cosines, arm)),
    )
    return [_drawn(name, suffix, module, frame) for name, module, frame in made]


def draw_push(comparison: push.Comparison, index: int, n: int) -> Drawn:
    """Draw how far the arms of one family push the frontier."""
    return _drawn("push", "" if n == 1 else f"-{index + 1:02d}", push_figure, push_figure.data(comparison))


def draw_section(section: mismatch.Section, among: list[mismatch.Section]) -> Drawn:
    """Draw the figure of one section on mismatch, numbered where there are several of its kind."""
    same = [id(other) for other in among if other.figure == section.figure]
    suffix = "" if len(same) == 1 else f"-{same.index(id(section)) + 1:02d}"
    return _drawn(section.figure, suffix, section.module, section.frame)


def _drawn(name: str, suffix: str, module: Any, frame: pd.DataFrame) -> Drawn:
    title, caption = CAPTIONS[name]
    caption = f"{caption} {frame.attrs.get('note', '')}".strip()
    data = write_table(frame.astype(object).where(frame.notna(), None))
    return Drawn(name + suffix, title, caption, title, png(module.draw(frame)), data)


CAPTIONS = {
    **mismatch.CAPTIONS,
    "push": (
        "How far each arm pushes the frontier",
        "η50 of an arm, and with it S·η50, over that of the reference: above 1 the arm survives larger learning rates. "
        "Geometric mean over S, sorted by the push under the default definition; collapsed / decided runs of the arm "
        "at the right. An arrow as the point marks a push that is known on one side only.",
    ),
    "frontier_map": (
        "The map: which runs collapsed",
        "Collapsed / decided seeds at each staleness S and learning rate η, under two definitions of collapse. Dotted "
        "frames with ≠ mark cells that the two judge differently.",
    ),
    "t_eta": (
        "When: learning rate spent until collapse",
        "Σ of the applied learning rate up to the collapse (t·η), with the interval between validation points it lies "
        "in. Open triangles are runs that did not collapse: their value is at least that high.",
    ),
    "reward_curves": (
        "Reward over the run",
        "Held-out mean reward; crosses on the zero line are non-finite values. Triangles and bands mark the interval "
        "in which a run first reached zero (open) or reached it for good (filled).",
    ),
    "cosine": (
        "Do consecutive gradients point the same way?",
        "Within a reuse cycle both gradients come from the same batch and agree for that reason; only the upper row "
        "compares different batches. Means over seeds, smoothed.",
    ),
}


def _context(name: str, sweep: SweepTable, fits: dict[str, Fits], figures: dict[str, list[Drawn]]) -> dict[str, Any]:
    """Everything the templates say."""
    table = sweep.table
    arms = [_arm_context(arm, sweep, fits[arm], drawn) for arm, drawn in figures.items()]
    empty = not len(table)
    return {
        "name": sweep.plan.get("name") or name,
        "question": sweep.plan.get("question") or "",
        "empty": empty,
        "headline": [] if empty else _headline(sweep, fits),
        "arms": arms,
        "several": len(fits) > 1,
        "hidden_arms": len(fits) - len(figures),
        "arms_table": summary.arms_table(fits, table) if len(fits) > 1 else None,
        "kinds": None if empty else summary.kinds_table(table),
        "axes": summary.axes_rows(sweep.plan),
        "seeds": sorted({str(s) for s in table["seed"].dropna()}) if not empty else [],
        "horizons": sorted({int(t) for t in table["steps"]}) if not empty else [],
        "named": summary.named_settings(sweep.fixed),
        "fixed": [(k, json.dumps(v) if not isinstance(v, str) else v) for k, v in sorted(sweep.fixed.items())],
        "states": "" if empty else summary.states_text(table),
        "provenance": [] if empty else summary.provenance(sweep),
        "lag": None if empty else summary.lag_table(table),
        "unfinished": None if empty else summary.unfinished_table(table),
        "notes": None if empty else summary.noted(table),
        "definitions": [(d.name, d.sentence, d.name == DEFAULT) for d in sweep.settings.definitions],
        "regime": sweep.settings.regime.thresholds(),
        "reward": sweep.settings.reward,
        "level": f"{sweep.settings.level:.0%}",
    }


def _headline(sweep: SweepTable, fits: dict[str, Fits]) -> list[str]:
    """The few sentences a hurried reader should take away."""
    table = sweep.table
    found = table["kind"].value_counts()
    kinds = ", ".join(f"{int(found.get(k, 0))} {text}" for k, text in summary.KIND_TEXT.items())
    out = [f"{narrative.plural(len(table), 'cell')} planned ({summary.states_text(table)}): {kinds}."]
    if found.get("undecided", 0) == len(table):
        out.append(summary.why_undecided(table))
    for arm in list(fits)[:4]:
        text, judgement = narrative.slope_of(fits[arm][("firth", DEFAULT)], fits[arm].get(("s_eta", DEFAULT)))
        prefix = f"{arm}: " if len(fits) > 1 else ""
        slope = f"the frontier's slope d log η / d log S is {text} under {DEFAULT}. " if text != "–" else ""
        sentence = f"{prefix}{slope}{judgement.sentence}"
        out.append(sentence[0].upper() + sentence[1:] if not prefix else sentence)
    if len(fits) > 4:
        out.append(f"{len(fits) - 4} further arms are in the summary of arms below.")
    differing = summary.differing_table(table)
    n = len(differing.rows) + differing.cut
    if n:
        out.append(
            f"The two definitions of collapse disagree on {narrative.plural(n, 'cell')}: zero, but not for good."
        )
    elif found.get("undecided", 0) < len(table):
        out.append("The two definitions of collapse agree on every decided cell.")
    return out


def _arm_context(arm: str, sweep: SweepTable, fits: Fits, drawn: list[Drawn]) -> dict[str, Any]:
    mine = sweep.table[sweep.table["arm"] == arm]
    by_stem = {f.stem.split("-")[0]: f for f in drawn}
    names = [d.name for d in sweep.settings.definitions]
    inversions = [narrative.say_inversions(fits[("eta_max", d)]) for d in names]
    return {
        "label": arm,
        "n": len(mine),
        "kinds": summary.kinds_table(mine),
        "figures": by_stem,
        "surface": [(d, narrative.say_firth(fits[("firth", d)])) for d in HEADLINE],
        "products": [(d, narrative.say_s_eta(fits[("s_eta", d)])) for d in HEADLINE],
        "times": [(d, narrative.say_t_eta(fits[("t_eta", d)])) for d in HEADLINE],
        "brackets": summary.eta_max_table(fits),
        "by_definition": summary.definitions_table(fits, names),
        "differing": summary.differing_table(mine),
        "regimes": summary.regime_table(mine),
        "inversions": [t for t in inversions if t is not None],
    }


def _write(
    sweep_dir: Path, sweep: SweepTable, fits: list[Fit], drawn: list[Drawn], context: dict[str, Any]
) -> ReportFiles:
    """Write every file atomically, the page last, and take away figures of an earlier report."""
    folder = sweep_dir / "figures"
    folder.mkdir(exist_ok=True)
    paths = []
    for figure in drawn:
        for suffix, content in ((".png", figure.image), (".csv", figure.data)):
            paths.append(_replace(folder / f"{figure.stem}{suffix}", content))
    for old in folder.iterdir():
        if old.suffix in (".png", ".csv") and old not in paths:
            old.unlink()
    table = _replace(sweep_dir / "table.csv", write_table(sweep.table))
    fits_path = _replace(sweep_dir / "fits.json", _fits_json(sweep, fits))
    markdown = _replace(sweep_dir / "report.md", _render("report.md.j2", context, autoescape=False))
    html = _replace(sweep_dir / "report.html", _render("report.html.j2", context, autoescape=True))
    return ReportFiles(html, markdown, table, fits_path, tuple(paths))


def _fits_json(sweep: SweepTable, fits: list[Fit]) -> bytes:
    content = {
        "format": 1,
        "definitions": {d.name: d.sentence for d in sweep.settings.definitions},
        "regime": sweep.settings.regime.thresholds(),
        "fits": [f.to_json() for f in fits],
    }
    return (json.dumps(finite(content), indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode("utf-8")


def _render(template: str, context: dict[str, Any], *, autoescape: bool) -> bytes:
    environment = Environment(
        loader=PackageLoader("stalefront.analysis", "."),
        autoescape=autoescape,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["cell"] = lambda text: str(text).replace("|", "\\|").replace("\n", " ")
    return (environment.get_template(template).render(context).rstrip() + "\n").encode("utf-8")


def _replace(path: Path, content: bytes) -> Path:
    """Write to a temporary name beside the target, then move it into place."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_bytes(content)
    os.replace(temporary, path)
    return path
