"""Plots of a report as plain SVG, which a page holds in itself. Knows nothing of runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from fly.eval.statistics import Estimate

__all__ = ["COLOURS", "Curve", "Point", "curves", "pareto"]

COLOURS = ("#4477aa", "#ee6677", "#228833", "#aa8800", "#66aadd", "#aa3377", "#777777", "#cc6611")  # told apart by most
_WIDE, _HIGH, _LEFT, _RIGHT, _TOP, _BOTTOM = 640, 360, 64, 16, 16, 48


@dataclass(frozen=True)
class Point:
    """A way to decode, by two estimates."""

    name: str
    colour: str
    x: Estimate
    y: Estimate


@dataclass(frozen=True)
class Curve:
    """Heights at 1, 2, 3, ..."""

    name: str
    colour: str
    heights: Sequence[float]


class _Frame:
    """Axes from ``low`` to ``high`` on both sides, and what is drawn between them."""

    def __init__(self, x: tuple[float, float], y: tuple[float, float], x_name: str, y_name: str, title: str) -> None:
        self.x, self.y = x, y
        self.parts = [Markup("<title>{}</title>").format(title)]
        for value in _ticks(*x):
            at = self.across(value)
            self.line(at, _TOP, at, _HIGH - _BOTTOM, "grid")
            self.text(at, _HIGH - _BOTTOM + 18, f"{value:g}", "middle")
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
        return _LEFT + (min(max(x, low), high) - low) / (high - low) * (_WIDE - _LEFT - _RIGHT)

    def up(self, y: float) -> float:
        low, high = self.y
        return _HIGH - _BOTTOM - (min(max(y, low), high) - low) / (high - low) * (_HIGH - _TOP - _BOTTOM)

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str, colour: str = "") -> None:
        stroke = Markup(' stroke="{}"').format(colour) if colour else ""
        self.parts.append(
            Markup('<line class="{}" x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}"{}/>').format(
                kind, x1, y1, x2, y2, stroke
            )
        )

    def text(self, x: float, y: float, text: str, anchor: str) -> None:
        self.parts.append(Markup('<text x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>').format(x, y, anchor, text))

    def path(self, points: Sequence[tuple[float, float]], kind: str, colour: str = "") -> None:
        steps = " ".join(f"{self.across(x):.1f},{self.up(y):.1f}" for x, y in points)
        stroke = Markup(' stroke="{}"').format(colour) if colour else ""
        self.parts.append(Markup('<polyline class="{}" points="{}"{}/>').format(kind, steps, stroke))

    def dot(self, x: float, y: float, colour: str, says: str) -> None:
        self.parts.append(
            Markup('<circle cx="{:.1f}" cy="{:.1f}" r="5" fill="{}"><title>{}</title></circle>').format(
                self.across(x), self.up(y), colour, says
            )
        )

    def drawn(self, named: Sequence[Point | Curve]) -> Markup:
        keys = Markup("").join(
            Markup('<span class="key"><i style="background:{}"></i>{}</span>').format(each.colour, each.name)
            for each in named
        )
        inside = Markup("\n").join(self.parts)
        return Markup('<svg viewBox="0 0 {} {}" role="img">{}</svg><p class="keys">{}</p>').format(
            _WIDE, _HIGH, inside, keys
        )


def _ticks(low: float, high: float) -> list[float]:
    """About five round numbers from ``low`` to ``high``."""
    step = 10 ** math.floor(math.log10((high - low) / 4))
    step *= next(times for times in (1, 2, 5, 10) if (high - low) / (step * times) <= 6)
    return [round(n * step, 10) for n in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _room(values: Sequence[float]) -> tuple[float, float]:
    """A range around values, with some room."""
    low, high = min(values), max(values)
    room = (high - low) * 0.06 or 0.1 * (abs(high) or 1)
    return low - room, high + room


def front(points: Sequence[Point]) -> list[Point]:
    """The Pareto front: points that no other beats in both figures, from left to right."""

    def beaten(point: Point, by: Point) -> bool:
        no_worse = by.x.value >= point.x.value and by.y.value >= point.y.value
        return no_worse and (by.x.value > point.x.value or by.y.value > point.y.value)

    best = [point for point in points if not any(beaten(point, other) for other in points)]
    return sorted(best, key=lambda point: point.x.value)


def pareto(points: Sequence[Point], x_name: str, y_name: str) -> Markup:
    """Points with the bars of their intervals, and a line through those that no other beats."""
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


def curves(found: Sequence[Curve], x_name: str, y_name: str) -> Markup:
    """Lines over 1, 2, 3, ..., whose heights are shares."""
    longest = max(len(curve.heights) for curve in found)
    frame = _Frame((0.5, longest + 0.5), (0.0, 1.0), x_name, y_name, f"{y_name} by {x_name}")
    for curve in found:
        colour = curve.colour
        frame.path(list(enumerate(curve.heights, start=1)), "curve", colour)
        for place, height in enumerate(curve.heights, start=1):
            frame.dot(place, height, colour, f"{curve.name}, {place}: {height:.2f}")
    return frame.drawn(found)
