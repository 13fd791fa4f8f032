"""Charts as SVG: no fonts, colours from the page's variables so that they follow light and dark. They are whole without a
script; the page's own shows the values beside the pointer. What they are made of is worked out here; ``chart.html.j2`` writes
it, everything escaped.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from markupsafe import Markup

from verl_adaptive.report.templates import fill
from verl_adaptive.text import clean, short

WIDTH, HEIGHT = 560, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 14, 14, 44


@dataclass
class Series:
    """One line or area.

    Attributes:
        name: for the legend.
        values: float ``(n,)``; nan leaves a gap in a line.
        color: a CSS colour, usually ``var(--c1)``.
        x: its own x, float ``(n,)``; None: the picture's.
        raw: float ``(n,)``, drawn faint behind it, where ``values`` were smoothed.
        dash: another run's, an SVG dash array (of ``DASHES``); empty: drawn through.
        key: its name in the legend, if another one (empty: none).
        faint: drawn thin, behind others.
    """

    name: str
    values: np.ndarray
    color: str
    x: np.ndarray | None = None
    raw: np.ndarray | None = None
    dash: str = ""
    key: str | None = None
    faint: bool = False

    def __post_init__(self) -> None:
        self.name, self.key = clean(self.name, 80), None if self.key is None else clean(self.key, 80)


def _said(ticks: Sequence[float], percent: bool = False) -> list[str]:
    """Ticks in words, with as many digits as they have: half a per cent is not said to be none."""
    values = [100 * value for value in ticks] if percent else list(ticks)
    step = values[1] - values[0] if len(values) > 1 else math.inf
    enough = (d for d in range(3, 10) if all(abs(float(f"{v:.{d}g}") - v) < 0.01 * step for v in values))
    digits = next(enough, 10)
    return [short(value, digits) + "%" * percent for value in values]


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers from ``low`` to ``high``."""
    if not high > low:
        return [low]
    raw = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9) * step
    return [first + i * step for i in range(int((high - first) / step + 1e-9) + 1)]


def _round_range(low: float, high: float) -> tuple[float, float]:
    """A range that begins and ends at ticks, so that a line never leaves the grid."""
    ticks = _ticks(low, high)
    if len(ticks) < 2:
        return low, high
    step = ticks[1] - ticks[0]
    return math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step


class _Canvas:
    """A chart with axes; x and y are data coordinates."""

    def __init__(self, title: str, x: tuple[float, float], y: tuple[float, float], labels: tuple[str, str]) -> None:
        self.title, self.x, self.y, self.labels = title, x, y, labels
        self.marks: list[tuple[str, dict[str, Any], str, str]] = []

    def px(self, value: float) -> float:
        low, high = self.x
        return _LEFT + (value - low) / ((high - low) or 1.0) * (WIDTH - _LEFT - _RIGHT)

    def py(self, value: float) -> float:
        low, high = self.y
        return HEIGHT - _BOTTOM - (value - low) / ((high - low) or 1.0) * (HEIGHT - _TOP - _BOTTOM)

    def points(self, x: np.ndarray, y: np.ndarray) -> str:
        return " ".join(f"{self.px(a):.1f},{self.py(b):.1f}" for a, b in zip(x.tolist(), y.tolist(), strict=True))

    def add(self, tag: str, text: str = "", told: str = "", **attributes: Any) -> None:
        """An element, the text in it, and what is told of it beside the pointer; lengths get one decimal."""
        named = {name.rstrip("_").replace("_", "-"): value for name, value in attributes.items()}
        named = {name: f"{value:.1f}" if isinstance(value, float) else value for name, value in named.items()}
        self.marks.append((tag, named, text, told))

    def below(self, value: float, label: str) -> None:
        """A label of the x axis."""
        self.add("text", label, x=self.px(value), y=HEIGHT - _BOTTOM + 18, text_anchor="middle")

    def beside(self, value: float, label: str) -> None:
        """A label of the y axis."""
        self.add("text", label, x=_LEFT - 6, y=self.py(value), dy=4, text_anchor="end")

    def axes(self, x_ticks: Sequence[tuple[float, str]] = (), percent: bool = False) -> None:
        """The grid, and ticks; where those of x are given, what is counted along y are whole things."""
        across: dict[str, Any] = {"x1": _LEFT, "x2": WIDTH - _RIGHT}
        ticks = [value for value in _ticks(*self.y) if not x_ticks or value.is_integer()]
        for value, label in zip(ticks, _said(ticks, percent), strict=True):
            self.add("line", class_="grid", **across, y1=self.py(value), y2=self.py(value))
            self.beside(value, label)
        along = _ticks(*self.x)
        for value, label in x_ticks or zip(along, _said(along), strict=True):
            self.below(value, label)
        self.add("line", class_="axis", **across, y1=HEIGHT - _BOTTOM, y2=HEIGHT - _BOTTOM)

    def done(self, legend: Sequence[Series] = (), hover: dict[str, Any] | None = None) -> Markup:
        """The chart and its legend; ``hover`` is what the page's script shows beside the pointer."""
        left, right, top, bottom = box = [_LEFT, WIDTH - _RIGHT, _TOP, HEIGHT - _BOTTOM]
        told = {"box": box, "x": self.x, "y": self.y, "of": self.labels[0], **(hover or {})}
        return fill(
            "chart.html.j2",
            size=(WIDTH, HEIGHT),
            middle=((left + right) / 2, -(top + bottom) / 2),
            title=self.title,
            labels=self.labels,
            marks=self.marks,
            legend=legend,
            hover=None if hover is None else json.dumps(told, separators=(",", ":")),
        )


#: As the stylesheet has them.
PALETTE = tuple(f"var(--c{i})" for i in range(1, 9))
#: For one run after the other.
DASHES = ("5 4", "2 2", "9 2 2 2", "12 3")


def _plain(values: np.ndarray, digits: int) -> list[float | None]:
    """For JSON, as short as it can be."""
    rounded = [float(f"{v:.{digits}g}") if math.isfinite(v) else None for v in values.tolist()]
    return [int(v) if v is not None and v.is_integer() else v for v in rounded]


def _hover(x: np.ndarray, series: Sequence[Series], percent: bool) -> dict[str, Any]:
    """What the script needs: each line's points as numbers; of values four digits are as many as a chart shows."""
    lines = [[s.name, s.color, _plain(s.values, 4), *([] if s.x is None else [_plain(s.x, 9)])] for s in series]
    return {"at": _plain(x, 9), "lines": lines, "percent": percent}


def stacked(
    title: str, x: np.ndarray, series: Sequence[Series], labels: tuple[str, str], *, percent: bool = False
) -> Markup:
    """Areas on top of each other.

    Args:
        title: for those who cannot see it.
        x: float ``(n,)``, ascending, one at least.
        series: what to stack, lowest first; those that are zero throughout are left out.
        labels: of the axes.
        percent: the y axis is a share.
    """
    shown = [s for s in series if np.nansum(s.values) > 0]
    total = np.sum([np.zeros(len(x)), *(np.nan_to_num(s.values) for s in shown)], axis=0)
    if len(x) == 1:  # one point has no area
        x, total = np.array([x[0] - 0.5, x[0] + 0.5]), np.repeat(total, 2)
        shown = [Series(s.name, np.repeat(s.values, 2), s.color) for s in shown]
    top = 1.0 if percent else _round_range(0.0, float(total.max()) or 1.0)[1]
    canvas = _Canvas(title, (float(x[0]), float(x[-1])), (0.0, top), labels)
    below = np.zeros(len(x))
    for s in shown:
        above = below + np.nan_to_num(s.values)
        around = f"{canvas.points(x, above)} {canvas.points(x[::-1], below[::-1])}"
        canvas.add("polygon", told=s.name, points=around, fill=s.color)
        below = above
    canvas.axes(percent=percent)
    return canvas.done(shown[::-1], _hover(x, shown[::-1], percent))


def lines(
    title: str,
    x: np.ndarray,
    series: Sequence[Series],
    labels: tuple[str, str],
    *,
    from_zero: bool = True,
    percent: bool = False,
) -> Markup:
    """Lines over a common x (or each over its own); gaps where a value is nan.

    Args:
        title: for those who cannot see it.
        x: float ``(n,)``, ascending.
        series: the lines.
        labels: of the axes.
        from_zero: the y axis begins at 0.
        percent: the y axis is a share.
    """
    xs = [x if s.x is None else s.x for s in series]
    drawn = [values for s in series for values in (s.values, s.raw) if values is not None]
    values = np.concatenate([np.zeros(0), *drawn])
    values = values[np.isfinite(values)]
    low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)
    if from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if high <= low:  # below nothing but zeros there is nothing
        low, high = (0.0, 1.0) if from_zero else (low - 0.5, high + 0.5)
    low, high = _round_range(low, high)
    ends = np.concatenate([np.zeros(0), x, *xs])
    ends = ends[np.isfinite(ends)]
    canvas = _Canvas(title, (float(ends.min()), float(ends.max())) if len(ends) else (0.0, 1.0), (low, high), labels)
    canvas.axes(percent=percent)
    for s, own in zip(series, xs, strict=True):
        if s.raw is not None:
            _draw(canvas, own, s.raw, s, "raw")
    for s, own in zip(series, xs, strict=True):
        _draw(canvas, own, s.values, s, "raw" if s.faint else "line")
    return canvas.done(series, _hover(x, series, percent))


def _draw(canvas: _Canvas, x: np.ndarray, values: np.ndarray, s: Series, kind: str) -> None:
    known = np.isfinite(x) & np.isfinite(values)
    at = np.flatnonzero(known)
    few = len(at) <= 40 and kind != "raw"
    for piece in np.split(at, np.flatnonzero(np.diff(at) > 1) + 1):
        if len(piece) > 1:
            dashed: dict[str, Any] = {"stroke_dasharray": s.dash} if s.dash else {}
            points = canvas.points(x[piece], values[piece])
            canvas.add("polyline", class_=kind, points=points, fill="none", stroke=s.color, **dashed)
        for i in piece.tolist() if few or len(piece) == 1 else ():
            canvas.add("circle", cx=canvas.px(x[i]), cy=canvas.py(values[i]), r=2.5, fill=s.color)


def spark(values: Sequence[float]) -> str:
    """Points of a curve without axes, 80 wide and 16 high."""
    y = np.asarray(values, dtype=np.float64)
    heights = 15 - 14 * (y - y.min()) / ((y.max() - y.min()) or 1.0)
    return " ".join(f"{x:.1f},{h:.1f}" for x, h in zip(np.linspace(1, 79, len(y)), heights, strict=True))


def bars(title: str, names: Sequence[str], values: Sequence[float], labels: tuple[str, str], color: str) -> Markup:
    """Upright bars with their numbers above."""
    top = float(max(values)) or 1.0
    canvas = _Canvas(title, (0.0, float(len(names))), (0.0, top * 1.08), labels)
    canvas.axes([(i + 0.5, name) for i, name in enumerate(names)])
    for i, (name, value) in enumerate(zip(names, values, strict=True)):
        left, right, y = canvas.px(i + 0.1), canvas.px(i + 0.9), canvas.py(float(value))
        place: dict[str, Any] = {"x": left, "y": y, "width": right - left, "height": HEIGHT - _BOTTOM - y}
        canvas.add("rect", told=f"{name}: {value:,.0f}", **place, fill=color)
        canvas.add("text", short(float(value)), x=(left + right) / 2, y=y - 4, text_anchor="middle", class_="value")
    return canvas.done()


def heatmap(
    title: str, columns: Sequence[str], rows: Sequence[str], share: np.ndarray, labels: tuple[str, str]
) -> Markup:
    """Cells shaded by a share.

    Args:
        title: for those who cannot see it.
        columns, rows: names, left to right and bottom to top.
        share: float ``(rows, columns)`` in [0, 1], not zero throughout; nan is left empty.
        labels: of the axes.
    """
    canvas = _Canvas(title, (0.0, float(len(columns))), (0.0, float(len(rows))), labels)
    most = float(np.nanmax(share))
    size = {"width": canvas.px(1) - canvas.px(0) - 1, "height": canvas.py(0) - canvas.py(1) - 1}
    for (r, row), (c, column) in itertools.product(enumerate(rows), enumerate(columns)):
        if math.isfinite(share[r, c]):
            place: dict[str, Any] = {"x": canvas.px(c) + 0.5, "y": canvas.py(r + 1) + 0.5, **size}
            shade = f"{0.04 + 0.96 * share[r, c] / most:.3f}"
            told = f"{column}, {row}: {share[r, c]:.1%}"
            canvas.add("rect", told=told, **place, fill="var(--c1)", fill_opacity=shade)
    for r, row in enumerate(rows):
        canvas.beside(r + 0.5, row)
    for c, column in enumerate(columns):
        canvas.below(c + 0.5, column)
    return canvas.done()


def reliability(title: str, predicted: np.ndarray, observed: np.ndarray, weight: np.ndarray) -> Markup:
    """Predicted against observed, the diagonal, and dots as large as their weight, all above 0."""
    canvas = _Canvas(title, (0.0, 1.0), (0.0, 1.0), ("predicted pass rate", "observed pass rate"))
    canvas.axes()
    canvas.add("line", class_="diagonal", x1=canvas.px(0), y1=canvas.py(0), x2=canvas.px(1), y2=canvas.py(1))
    for p, o, w in zip(predicted.tolist(), observed.tolist(), weight.tolist(), strict=True):
        place: dict[str, Any] = {"cx": canvas.px(p), "cy": canvas.py(o), "r": 3 + 9 * math.sqrt(w / weight.max())}
        told = f"predicted {p:.2f}, observed {o:.2f}, {w:,.0f} groups"
        canvas.add("circle", told=told, **place, fill="var(--c1)", fill_opacity="0.75")
    return canvas.done()
