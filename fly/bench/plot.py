"""Plots of sweeps, as files. Needs matplotlib (the ``plots`` extra)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["check_plot", "save_lines"]

_FORMATS = (".png", ".svg", ".pdf")


def check_plot(path: Path | None) -> None:
    """Raises ``ValueError``, before any work is done, if no plot can be written to ``path``."""
    if path is None:
        return
    if path.suffix not in _FORMATS:
        raise ValueError(f"plot {str(path)!r} must end in one of {', '.join(_FORMATS)}")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ValueError("plots need matplotlib: pip install 'flyspec[plots]'") from None


def save_lines(
    path: Path,
    title: str,
    x: str,
    y: str,
    lines: Mapping[str, Sequence[tuple[float, float]]],
    log_x: bool = False,
    low: float | None = 0,
) -> None:
    """Draw named lines of (x, y) points."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    for name, points in lines.items():
        axes.plot(*zip(*points), marker="o", label=name)
    if log_x:
        ticks = sorted({point[0] for points in lines.values() for point in points})
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set(title=title, xlabel=x, ylabel=y, ylim=(low, None))
    axes.title.set_fontsize(9)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
