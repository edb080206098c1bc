"""Plots as plain SVG. A report's page contains them, and a command's ``--plot`` writes one to a file. This module knows
nothing of runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from fly.extras.eval.statistics import Estimate

__all__ = ["COLOURS", "Curve", "Point", "curves", "pareto", "save_lines"]

# Colours that most readers can tell apart.
COLOURS = ("#4477aa", "#ee6677", "#228833", "#aa8800", "#66aadd", "#aa3377", "#777777", "#cc6611")
_WIDE = 640
_HIGH = 360
_LEFT = 64
_RIGHT = 16
_TOP = 16
_BOTTOM = 48
_LINE = 18
_LETTER = 6.6  # the approximate width of a letter
# The styles of lines; a page may set its own colours by these class names.
_LOOKS = {
    "grid": 'stroke="#d3d5cd"',
    "bar": 'stroke-width="1.5" opacity="0.6"',
    "front": 'fill="none" stroke="#5b5e58" stroke-dasharray="5 4"',
    "curve": 'fill="none" stroke-width="2"',
}


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


class _Frame:
    """The axes of a plot, and the shapes drawn between them.

    Args:
        x, y: the ranges of the axes.
        x_name, y_name: the names of the axes.
        title: the plot's name, for screen readers.
        marks: where the x axis is marked; None for about five round numbers.
        log: whether the x axis is logarithmic.
    """

    def __init__(
        self,
        x: tuple[float, float],
        y: tuple[float, float],
        x_name: str,
        y_name: str,
        title: str,
        marks: Sequence[float] | None = None,
        log: bool = False,
    ) -> None:
        self.x = x
        self.y = y
        self.log = log
        self.parts = [Markup("<title>{}</title>").format(title)]
        free = 0.0  # from this position on there is room for the next number
        for value in _ticks(*x) if marks is None else marks:
            at, half = self.across(value), _LETTER * (len(f"{value:g}") + 1) / 2
            self.line(at, _TOP, at, _HIGH - _BOTTOM, "grid")
            if at - half >= free:
                self.text(at, _HIGH - _BOTTOM + 18, f"{value:g}", "middle")
                free = at + half
        for value in _ticks(*y):
            at = self.up(value)
            self.line(_LEFT, at, _WIDE - _RIGHT, at, "grid")
            self.text(_LEFT - 8, at + 4, f"{value:g}", "end")
        self.text((_LEFT + _WIDE - _RIGHT) / 2, _HIGH - 8, x_name, "middle")
        middle = (_TOP + _HIGH - _BOTTOM) / 2
        self.parts.append(
            Markup('<text transform="translate(14 {:.1f}) rotate(-90)" text-anchor="middle">{}</text>').format(
                middle, y_name
            )
        )

    def across(self, x: float) -> float:
        low, high = self.x
        at = min(max(x, low), high)
        share = math.log(at / low) / math.log(high / low) if self.log else (at - low) / (high - low)
        return _LEFT + share * (_WIDE - _LEFT - _RIGHT)

    def up(self, y: float) -> float:
        low, high = self.y
        return _HIGH - _BOTTOM - (min(max(y, low), high) - low) / (high - low) * (_HIGH - _TOP - _BOTTOM)

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str, colour: str = "") -> None:
        stroke = Markup(' stroke="{}"').format(colour) if colour else ""
        self.parts.append(
            Markup('<line class="{}" {} x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}"{}/>').format(
                kind, Markup(_LOOKS[kind]), x1, y1, x2, y2, stroke
            )
        )

    def text(self, x: float, y: float, text: str, anchor: str) -> None:
        self.parts.append(Markup('<text x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>').format(x, y, anchor, text))

    def path(self, points: Sequence[tuple[float, float]], kind: str, colour: str = "") -> None:
        steps = " ".join(f"{self.across(x):.1f},{self.up(y):.1f}" for x, y in points)
        stroke = Markup(' stroke="{}"').format(colour) if colour else ""
        look = Markup(_LOOKS[kind])
        self.parts.append(Markup('<polyline class="{}" {} points="{}"{}/>').format(kind, look, steps, stroke))

    def dot(self, x: float, y: float, colour: str, tip: str) -> None:
        self.parts.append(
            Markup('<circle cx="{:.1f}" cy="{:.1f}" r="5" fill="{}"><title>{}</title></circle>').format(
                self.across(x), self.up(y), colour, tip
            )
        )

    def drawn(self, named: Sequence[Point | Curve], caption: str = "") -> Markup:
        """Return the picture, with a key of the colours below it and ``caption`` above it."""
        at, line = float(_LEFT), _HIGH + _LINE
        for each in named:
            wide = 16 + _LETTER * len(each.name)
            if at > _LEFT and at + wide > _WIDE:
                at, line = float(_LEFT), line + _LINE
            self.parts.append(
                Markup('<circle cx="{:.1f}" cy="{:.1f}" r="5" fill="{}"/>').format(at, line - 4, each.colour)
            )
            self.text(at + 10, line, each.name, "start")
            at += wide + 16
        if caption:
            self.text(_WIDE / 2, -6, caption, "middle")
        top = _LINE + 6 if caption else 0
        return Markup(
            '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 {} {} {}" role="img" font-size="12" '
            'font-family="system-ui, sans-serif" fill="#1b1c1a">'
            '<rect class="paper" fill="#ffffff" y="{}" width="100%" height="100%"/>\n{}</svg>'
        ).format(-top, _WIDE, line + 8 + top, -top, Markup("\n").join(self.parts))


def _ticks(low: float, high: float) -> list[float]:
    """Return about five round numbers from ``low`` to ``high``."""
    step = 10 ** math.floor(math.log10((high - low) / 4))
    step *= next(times for times in (1, 2, 5, 10) if (high - low) / (step * times) <= 6)
    return [round(n * step, 10) for n in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _room(values: Sequence[float]) -> tuple[float, float]:
    """Return a range around values, with some room."""
    low, high = min(values), max(values)
    room = (high - low) * 0.06 or 0.1 * (abs(high) or 1)
    return low - room, high + room


def front(points: Sequence[Point]) -> list[Point]:
    """Return the Pareto front, from left to right: the points that no other point beats in both coordinates."""

    def beaten(point: Point, by: Point) -> bool:
        no_worse = by.x.value >= point.x.value and by.y.value >= point.y.value
        return no_worse and (by.x.value > point.x.value or by.y.value > point.y.value)

    best = [point for point in points if not any(beaten(point, other) for other in points)]
    return sorted(best, key=lambda point: point.x.value)


def pareto(points: Sequence[Point], x_name: str, y_name: str) -> Markup:
    """Plot points with the bars of their intervals, and a line through the Pareto front."""
    xs = [x for point in points for x in point.x]
    ys = [y for point in points for y in point.y]
    frame = _Frame(_room(xs), _room(ys), x_name, y_name, f"{y_name} against {x_name}")
    frame.path([(point.x.value, point.y.value) for point in front(points)], "front")
    for point in points:
        colour = point.colour
        at, up = frame.across(point.x.value), frame.up(point.y.value)
        frame.line(frame.across(point.x.low), up, frame.across(point.x.high), up, "bar", colour)
        frame.line(at, frame.up(point.y.low), at, frame.up(point.y.high), "bar", colour)
        frame.dot(point.x.value, point.y.value, colour, f"{point.name}: {point.x.value:.2f}, {point.y.value:.3f}")
    return frame.drawn(points)


def curves(
    found: Sequence[Curve],
    x_name: str,
    y_name: str,
    y: tuple[float, float] | None = None,
    log_x: bool = False,
    caption: str = "",
) -> Markup:
    """Plot lines through points. ``y`` is the range of the y axis; None takes the range of the points. A logarithmic x
    axis is marked at the points."""
    xs = [at for curve in found for at, _ in curve.points]
    low, high = (min(xs) / 1.1, max(xs) * 1.1) if log_x else _room(xs)
    y = y or _room([height for curve in found for _, height in curve.points])
    marks = sorted({*xs}) if log_x else None
    frame = _Frame((low, high), y, x_name, y_name, caption or f"{y_name} by {x_name}", marks, log_x)
    for curve in found:
        frame.path(curve.points, "curve", curve.colour)
        for at, height in curve.points:
            frame.dot(at, height, curve.colour, f"{curve.name}, {at:g}: {height:.4g}")
    return frame.drawn(found, caption)


def save_lines(
    path: Path,
    title: str,
    x_name: str,
    y_name: str,
    lines: Mapping[str, Sequence[tuple[float, float]]],
    log_x: bool = False,
    from_zero: bool = True,
) -> None:
    """Write a plot of named lines to a file."""
    found = [Curve(name, COLOURS[n % len(COLOURS)], points) for n, (name, points) in enumerate(lines.items())]
    highest = max(height for curve in found for _, height in curve.points)
    y = (0.0, 1.06 * highest) if from_zero else None
    path.write_text(str(curves(found, x_name, y_name, y, log_x, title)) + "\n", encoding="utf-8")
