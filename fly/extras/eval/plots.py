"""Plots as SVG, drawn by matplotlib (``flyspec[plots]``). A report's page contains them, and a command's ``--plot``
writes one to a file. This module knows nothing of runs."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from markupsafe import Markup

from fly.extras.statistics import Estimate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["COLOURS", "Curve", "Point", "curves", "front", "has_plots", "pareto", "save_lines"]

# Colours that most readers can tell apart (Paul Tol's bright scheme, and two more).
COLOURS = ("#4477aa", "#ee6677", "#228833", "#aa8800", "#66aadd", "#aa3377", "#777777", "#cc6611")


@dataclass(frozen=True)
class Point:
    """A way to decode, placed by two estimates."""

    name: str
    colour: str
    x: Estimate
    y: Estimate


@dataclass(frozen=True)
class Curve:
    """A line through points, from left to right."""

    name: str
    colour: str
    points: Sequence[tuple[float, float]]


def has_plots() -> bool:
    """Return whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def front(points: Sequence[Point]) -> list[Point]:
    """Return the Pareto front, from left to right: the points that no other point beats in both coordinates."""

    def beaten(point: Point, by: Point) -> bool:
        no_worse = by.x.value >= point.x.value and by.y.value >= point.y.value
        return no_worse and (by.x.value > point.x.value or by.y.value > point.y.value)

    best = [point for point in points if not any(beaten(point, other) for other in points)]
    return sorted(best, key=lambda point: point.x.value)


def pareto(points: Sequence[Point], x_name: str, y_name: str) -> Markup:
    """Plot points with the bars of their intervals, and a line through the Pareto front. Raises ``ValueError`` without
    matplotlib."""
    figure, axes = _axes(x_name, y_name)
    best = front(points)
    axes.plot([each.x.value for each in best], [each.y.value for each in best], "--", color="#5b5e58", linewidth=1)
    for point in points:
        bars = [[[each.value - each.low], [each.high - each.value]] for each in (point.x, point.y)]
        axes.errorbar(
            point.x.value, point.y.value, xerr=bars[0], yerr=bars[1], fmt="o", color=point.colour, label=_plain(point)
        )
    return Markup(_svg(figure, axes))


def curves(
    lines: Sequence[Curve],
    x_name: str,
    y_name: str,
    y: tuple[float, float] | None = None,
    log_x: bool = False,
    caption: str = "",
) -> Markup:
    """Plot lines through points. ``y`` is the range of the y axis; None takes the range of the points. A logarithmic x
    axis is marked at the points. Raises ``ValueError`` without matplotlib."""
    figure, axes = _axes(x_name, y_name)
    for number, line in enumerate(lines):
        xs, ys = zip(*line.points)
        axes.plot(xs, ys, "-o", color=line.colour, markersize=4, label=_plain(line), gid=f"curve_{number}")
    if log_x:
        marks = sorted({at for line in lines for at, _ in line.points})
        axes.set_xscale("log")
        axes.set_xticks(marks, [f"{mark:g}" for mark in marks])
        axes.set_xticks([], minor=True)
    if y is not None:
        axes.set_ylim(*y)
    if caption:
        axes.set_title(caption, parse_math=False)
    return Markup(_svg(figure, axes))


def save_lines(
    path: Path,
    title: str,
    x_name: str,
    y_name: str,
    lines: Mapping[str, Sequence[tuple[float, float]]],
    log_x: bool = False,
    from_zero: bool = True,
) -> None:
    """Write a plot of named lines to a file. Raises ``ValueError`` without matplotlib."""
    plot_curves = [Curve(name, COLOURS[n % len(COLOURS)], points) for n, (name, points) in enumerate(lines.items())]
    highest = max(height for curve in plot_curves for _, height in curve.points)
    y = (0.0, 1.06 * highest) if from_zero else None
    path.write_text(curves(plot_curves, x_name, y_name, y, log_x, title) + "\n", encoding="utf-8")


def _axes(x_name: str, y_name: str) -> tuple[Figure, Axes]:
    if not has_plots():
        raise ValueError("plots need matplotlib: pip install 'flyspec[plots]'")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    axes = figure.subplots()
    axes.grid(color="#d3d5cd")
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)
    axes.set_xlabel(x_name, parse_math=False)
    axes.set_ylabel(y_name, parse_math=False)
    return figure, axes


def _plain(named: Point | Curve) -> str:
    """Return a name for the key, in quotes where matplotlib would leave it out: empty, or after an underscore."""
    return f"'{named.name}'" if named.name.startswith("_") or not named.name else named.name


def _svg(figure: Figure, axes: Axes) -> str:
    """Return the picture with the key of its colours below it: the same text for the same picture."""
    from matplotlib import rc_context

    key = figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    for text in key.get_texts():
        text.set_parse_math(False)
    buffer = io.StringIO()
    # Letters stay letters, which a page can colour and a reader can search.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "fly", "font.family": "sans-serif"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    picture = buffer.getvalue()
    return picture[picture.index("<svg") :]  # a page has no place for the declaration before it
