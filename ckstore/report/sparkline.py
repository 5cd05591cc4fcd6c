"""Sparklines: small inline SVG lines of a metric."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

_WIDTH, _HEIGHT, _MARGIN = 160, 28, 3


def sparkline(metrics: Mapping[str, Sequence[Any]], marked: int | None = None) -> str:
    """Return the first metric with numbers as a line in SVG, under its name; empty without one.

    `marked` is the place of a version that a dot marks; by default the last one.

    Examples
    --------
    >>> sparkline({"val_loss": [3.1, 2.7, None, 2.8]})[:33]
    '<figure><figcaption>val_loss: 2.8'
    """
    for name, values in metrics.items():
        points = [(place, float(value)) for place, value in enumerate(values) if _is_number(value)]
        if points:
            return _drawn(name, points, marked)
    return ""


def _is_number(value: Any) -> bool:
    return (
        isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300 and not math.isnan(value)
    )


def _drawn(name: str, points: Sequence[tuple[int, float]], marked: int | None) -> str:
    low, high = min(value for _, value in points), max(value for _, value in points)
    span, length = high - low or 1.0, points[-1][0] - points[0][0] or 1

    def at(point: tuple[int, float]) -> tuple[float, float]:
        x = _MARGIN + (_WIDTH - 2 * _MARGIN) * (point[0] - points[0][0]) / length
        return x, _MARGIN + (_HEIGHT - 2 * _MARGIN) * (high - point[1]) / span

    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(at, points))
    dot = next((point for point in points if point[0] == marked), points[-1])
    x, y = at(dot)
    return (
        f"<figure><figcaption>{escape(name)}: {dot[1]:.6g}</figcaption>"
        f'<svg role="img" aria-label="{escape(name)} from {points[0][1]:.6g} to {points[-1][1]:.6g}" width="{_WIDTH}" '
        f'height="{_HEIGHT}"><polyline points="{line}" fill="none" stroke="currentColor" stroke-width="1.5"/>'
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="currentColor"/></svg></figure>'
    )
