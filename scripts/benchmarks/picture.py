"""Draws results as a picture: ratios as bars, growth as curves. No TensorFlow."""

from __future__ import annotations

import io
import os
import re
import textwrap
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from scripts.benchmarks.results import MISSED, Results, Row, Section

OURS, BY_HAND, OTHERS = "#2b6cb0", "#718096", "#dd6b20"
COLUMNS, FEWEST = 2, 5  # sections side by side; rows that a section has room for


def write(results: Results, path: Path) -> None:
    """Replaces the PNG file at `path` by a picture of all sections, atomically."""
    sections = [section for section in results.sections if any(row.values for row in section.rows)]
    pairs = [sections[at : at + COLUMNS] for at in range(0, len(sections), COLUMNS)]
    heights = [0.27 * max(FEWEST, *(len(section.rows) for section in pair)) + 1.3 for pair in pairs]
    figure = Figure(figsize=(17, 1.2 + sum(heights)), layout="constrained")
    grid = figure.add_gridspec(max(1, len(pairs)), COLUMNS, height_ratios=heights or [1])
    for number, section in enumerate(sections):
        axes = figure.add_subplot(grid[number // COLUMNS, number % COLUMNS])
        (_curves if any(row.line for row in section.rows) else _bars)(axes, section)
    figure.suptitle(", ".join(f"{name}: {value}" for name, value in results.machine.items()), fontsize=8)
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=110)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_bytes(image.getvalue())
    os.replace(temporary, path)


def _bars(axes: Any, section: Section) -> None:
    """Draws the ratio of each row to the one that it is compared with; goals as lines, the control as a band."""
    rows = [row for row in section.rows if row.values]
    ratios = [section.ratio(row.name, row.to) if row.to else 1.0 for row in rows]
    places = range(len(rows))
    axes.barh(places, [ratio or 0.0 for ratio in ratios], color=[_colour(row) for row in rows], height=0.7)
    if section.control is not None:
        axes.axvspan(1 - section.control, 1 + section.control, color="black", alpha=0.12, lw=0)
    for place, row, ratio in zip(places, rows, ratios, strict=True):
        text = f" {ratio:.2f}" if ratio is not None else " -"
        other = f" of {row.to}" if row.to not in ("", section.rows[0].name) else ""
        axes.text(ratio or 0.0, place, text + other, va="center", fontsize=7)
        for goal in row.goals:
            if goal.to == row.to:
                colour = "#c53030" if section.verdict(row.name, goal) == MISSED else "#2f855a"
                axes.plot([goal.bound] * 2, [place - 0.45, place + 0.45], color=colour, lw=2)
    axes.set_yticks(places, [row.label for row in rows], fontsize=7)
    axes.set_ylim(max(len(rows), FEWEST) - 0.4, -0.6)
    axes.margins(x=0.15)
    axes.tick_params(axis="x", labelsize=7)
    axes.set_title(_title(section, ", ratios"), fontsize=8, loc="left")


def _curves(axes: Any, section: Section) -> None:
    """Draws each line's cost against the quantity that grows."""
    for line in dict.fromkeys(row.line for row in section.rows if row.line):
        points = [(row.x, row.median) for row in section.rows if row.line == line and row.median is not None]
        colour = _colour(next(row for row in section.rows if row.line == line))
        axes.plot(*zip(*points, strict=True), marker="o", label=line, color=colour) if points else None
    least = min((row.x for row in section.rows), default=1.0)
    axes.set_xscale("log" if least > 0 else "symlog")
    figures = [row.median for row in section.rows if row.median is not None]
    if 0 < 10 * min(figures) < max(figures):
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.set_ylabel(section.unit, fontsize=7)
    axes.tick_params(labelsize=7, which="both")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    axes.set_title(_title(section), fontsize=8, loc="left")


def _title(section: Section, more: str = "") -> str:
    return textwrap.fill(f"{section.name}: {section.title} ({section.unit}{more})", 95)


def _colour(row: Row) -> str:
    if re.search(r"\bours\b|trainer-kit|to step", row.label):
        return OURS
    return BY_HAND if "by hand" in row.label else OTHERS
