"""Charts as SVG text, by hand: no fonts, colours from the page's variables so that they follow light and dark. They are whole
without a script; the page's own shows the values beside the pointer.

Everything that comes from data is escaped by :class:`markupsafe.Markup`.
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

from verl_adaptive.text import clean

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


def short(value: float, digits: int = 3) -> str:
    """A number for an axis: 1.2k, 3M, 0.25."""
    if not math.isfinite(value):
        return "-"
    value = float(f"{value:.{digits}g}")  # 999,999 is 1M
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.{digits}g}{unit}"
    return f"{value:.{digits}g}"


def _said(ticks: Sequence[float], percent: bool = False) -> list[str]:
    """Ticks in words, with as many digits as they have: half a per cent is not said to be none."""
    values = [100 * value for value in ticks] if percent else list(ticks)
    step = values[1] - values[0] if len(values) > 1 else math.inf
    enough = (d for d in range(3, 10) if all(abs(float(f"{v:.{d}g}") - v) < 0.01 * step for v in values))
    digits = next(enough, 10)
    return [short(value, digits) + "%" * percent for value in values]


def _ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers from ``low`` to ``high``."""
    if not high > low:
        return [low]
    raw = (high - low) / max(1, count - 1)
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
    """An SVG with axes; x and y are data coordinates."""

    def __init__(self, title: str, x: tuple[float, float], y: tuple[float, float], labels: tuple[str, str]) -> None:
        self.title, self.x, self.y, self.labels = title, x, y, labels
        self.parts: list[Markup] = []

    def px(self, value: float) -> float:
        low, high = self.x
        return _LEFT + (value - low) / ((high - low) or 1.0) * (WIDTH - _LEFT - _RIGHT)

    def py(self, value: float) -> float:
        low, high = self.y
        return HEIGHT - _BOTTOM - (value - low) / ((high - low) or 1.0) * (HEIGHT - _TOP - _BOTTOM)

    def add(self, text: str, **values: object) -> None:
        """A piece of SVG; ``values`` are formatted as the text says, and escaped."""
        self.parts.append(Markup(text).format(**values))

    def below(self, value: float, label: str) -> None:
        """A label of the x axis."""
        text = '<text x="{x:.1f}" y="{y}" text-anchor="middle">{t}</text>'
        self.add(text, x=self.px(value), y=HEIGHT - _BOTTOM + 18, t=label)

    def beside(self, value: float, label: str) -> None:
        """A label of the y axis."""
        text = '<text x="{x}" y="{y:.1f}" dy="4" text-anchor="end">{t}</text>'
        self.add(text, x=_LEFT - 6, y=self.py(value), t=label)

    def named(self) -> None:
        """Label the axes."""
        level = '<text x="{x}" y="{y}" text-anchor="middle" class="label">{t}</text>'
        self.add(level, x=(_LEFT + WIDTH - _RIGHT) / 2, y=HEIGHT - 6, t=self.labels[0])
        upright = '<text transform="rotate(-90)" x="{x}" y="13" text-anchor="middle" class="label">{t}</text>'
        self.add(upright, x=-(HEIGHT - _BOTTOM + _TOP) / 2, t=self.labels[1])

    def axes(
        self, x_ticks: Sequence[tuple[float, str]] | None = None, percent: bool = False, whole: bool = False
    ) -> None:
        line = '<line class="{k}" x1="{a}" x2="{b}" y1="{y}" y2="{y}"/>'
        ticks = [value for value in _ticks(*self.y) if not whole or value.is_integer()]
        for value, label in zip(ticks, _said(ticks, percent), strict=True):
            self.add(line, k="grid", a=_LEFT, b=WIDTH - _RIGHT, y=f"{self.py(value):.1f}")
            self.beside(value, label)
        if x_ticks is None:
            along = _ticks(*self.x)
            x_ticks = list(zip(along, _said(along), strict=True))
        for value, label in x_ticks:
            self.below(value, label)
        self.add(line, k="axis", a=_LEFT, b=WIDTH - _RIGHT, y=HEIGHT - _BOTTOM)
        self.named()

    def done(self, legend: Sequence[Series] = (), hover: dict[str, Any] | None = None) -> Markup:
        """The chart and its legend; ``hover`` is what the page's script shows beside the pointer."""
        data = Markup("")
        if hover is not None:
            box = [_LEFT, WIDTH - _RIGHT, _TOP, HEIGHT - _BOTTOM]
            told = {"box": box, "x": self.x, "y": self.y, "of": self.labels[0], **hover}
            data = Markup(' data-hover="{d}"').format(d=json.dumps(told, separators=(",", ":")))
        svg = Markup(
            '<svg viewBox="0 0 {w} {h}" role="img" aria-label="{t}" preserveAspectRatio="xMidYMid meet"{d}>'
        ).format(w=WIDTH, h=HEIGHT, t=self.title, d=data)
        keys = Markup("").join(
            Markup(
                '<span class="key"><svg class="swatch" viewBox="0 0 14 10" aria-hidden="true">'
                '<line x1="0" x2="14" y1="5" y2="5" stroke="{c}"{k}/></svg>{n}</span>'
            ).format(c=s.color, n=s.name if s.key is None else s.key, k=_DASH.format(d=s.dash) if s.dash else _THICK)
            for s in legend
            if s.key != ""
        )
        legends = Markup('<div class="legend">{k}</div>').format(k=keys) if legend else Markup("")
        return Markup('<div class="chart">{s}{p}</svg></div>{k}').format(
            s=svg, p=Markup("").join(self.parts), k=legends
        )


_PLACE = 'x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}"'
_THICK = Markup(' stroke-width="8"')
_DASH = Markup(' stroke-width="3" stroke-dasharray="{d}"')
#: The stylesheet has --c1 to --c8.
COLORS = 8
#: For one run after the other.
DASHES = ("5 4", "2 2", "9 2 2 2", "12 3")


def _plain(values: np.ndarray) -> list[float | None]:
    """For JSON: four digits are as many as a chart shows."""
    return [float(f"{v:.4g}") if math.isfinite(v) else None for v in values.tolist()]


def _hover(x: np.ndarray, series: Sequence[Series], percent: bool = False) -> dict[str, Any]:
    """What the script needs: each line's points as numbers."""
    lines = []
    for s in series:
        own = [] if s.x is None else [_exact(s.x)]
        lines.append([s.name, s.color, _plain(s.values), *own])
    return {"at": _exact(x), "lines": lines, "percent": percent}


def _exact(x: np.ndarray) -> list[float | int | None]:
    values = x.astype(np.float64).tolist()
    return [None if not math.isfinite(v) else int(v) if v.is_integer() else round(v, 4) for v in values]


def stacked(
    title: str, x: np.ndarray, series: Sequence[Series], labels: tuple[str, str], *, percent: bool = False
) -> Markup:
    """Areas on top of each other.

    Args:
        title: for those who cannot see it.
        x: float ``(n,)``, ascending.
        series: what to stack, lowest first; those that are zero throughout are left out.
        labels: of the axes.
        percent: the y axis is a share.
    """
    shown = [s for s in series if np.nansum(s.values) > 0]
    total = np.sum([np.nan_to_num(s.values) for s in shown], axis=0) if shown else np.zeros(len(x))
    if len(x) == 1:  # one point has no area
        x, total = np.array([x[0] - 0.5, x[0] + 0.5]), np.repeat(total, 2)
        shown = [Series(s.name, np.repeat(s.values, 2), s.color) for s in shown]
    top = 1.0 if percent else _round_range(0.0, float(total.max(initial=0.0)) or 1.0)[1]
    canvas = _Canvas(title, (float(x[0]), float(x[-1])) if len(x) else (0.0, 1.0), (0.0, top), labels)
    below = np.zeros(len(x))
    for s in shown:
        above = below + np.nan_to_num(s.values)
        forth = " ".join(f"{canvas.px(a):.1f},{canvas.py(b):.1f}" for a, b in zip(x, above, strict=True))
        back = " ".join(f"{canvas.px(a):.1f},{canvas.py(b):.1f}" for a, b in zip(x[::-1], below[::-1], strict=True))
        canvas.add(
            '<polygon points="{p}" fill="{c}"><title>{n}</title></polygon>', p=f"{forth} {back}", c=s.color, n=s.name
        )
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
    if high <= low and from_zero:  # nothing but zeros, and below zero there is nothing
        low, high = 0.0, 1.0
    elif high <= low:
        low, high = low - 0.5, high + 0.5
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
    pieces: list[list[tuple[float, float]]] = [[]]
    for a, b in zip(x.tolist(), values.tolist(), strict=True):
        if math.isfinite(b) and math.isfinite(a):
            pieces[-1].append((canvas.px(a), canvas.py(b)))
        elif pieces[-1]:
            pieces.append([])
    few = sum(map(len, pieces)) <= 40 and kind != "raw"
    dashed = Markup(' stroke-dasharray="{d}"').format(d=s.dash) if s.dash else Markup("")
    for piece in pieces:
        if len(piece) > 1:
            points = " ".join(f"{a:.1f},{b:.1f}" for a, b in piece)
            line = '<polyline class="{k}" points="{p}" fill="none" stroke="{c}"{d}/>'
            canvas.add(line, k=kind, p=points, c=s.color, d=dashed)
        for a, b in piece if few or len(piece) == 1 else ():
            canvas.add('<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{c}"/>', x=a, y=b, c=s.color)


def spark(values: Sequence[float]) -> Markup:
    """A curve without axes, as high as a line of text; empty of fewer than two values."""
    if len(values) < 2:
        return Markup("")
    y = np.asarray(values, dtype=np.float64)
    heights = 15 - 14 * (y - y.min()) / ((y.max() - y.min()) or 1.0)
    points = " ".join(f"{x:.1f},{h:.1f}" for x, h in zip(np.linspace(1, 79, len(y)), heights, strict=True))
    line = '<svg class="spark" viewBox="0 0 80 16" aria-hidden="true"><polyline points="{p}" fill="none" stroke="{c}"/></svg>'
    return Markup(line).format(p=points, c="var(--c1)")


def bars(title: str, names: Sequence[str], values: Sequence[float], labels: tuple[str, str], color: str) -> Markup:
    """Upright bars with their numbers above."""
    top = max([float(v) for v in values], default=0.0) or 1.0
    canvas = _Canvas(title, (0.0, float(max(1, len(names)))), (0.0, top * 1.08), labels)
    canvas.axes([(i + 0.5, name) for i, name in enumerate(names)], whole=True)
    for i, (name, value) in enumerate(zip(names, values, strict=True)):
        left, right, y = canvas.px(i + 0.1), canvas.px(i + 0.9), canvas.py(float(value))
        bar = f'<rect {_PLACE} fill="{{c}}"><title>{{n}}: {{v:,.0f}}</title></rect>'
        canvas.add(bar, x=left, y=y, w=right - left, h=HEIGHT - _BOTTOM - y, c=color, n=name, v=value)
        number = '<text x="{x:.1f}" y="{y:.1f}" text-anchor="middle" class="value">{v}</text>'
        canvas.add(number, x=(left + right) / 2, y=y - 4, v=short(float(value)))
    return canvas.done()


def heatmap(
    title: str, columns: Sequence[str], rows: Sequence[str], share: np.ndarray, labels: tuple[str, str]
) -> Markup:
    """Cells shaded by a share.

    Args:
        title: for those who cannot see it.
        columns, rows: names, left to right and bottom to top.
        share: float ``(rows, columns)`` in [0, 1]; nan is left empty.
        labels: of the axes.
    """
    canvas = _Canvas(title, (0.0, float(max(1, len(columns)))), (0.0, float(max(1, len(rows)))), labels)
    most = float(np.nanmax(share)) if share.size and np.isfinite(share).any() else 1.0
    wide, high = canvas.px(1) - canvas.px(0) - 1, canvas.py(0) - canvas.py(1) - 1
    cell = f'<rect {_PLACE} fill="var(--c1)" fill-opacity="{{o:.3f}}"><title>{{t}}</title></rect>'
    for (r, row), (c, column) in itertools.product(enumerate(rows), enumerate(columns)):
        if math.isfinite(share[r, c]):
            x, y, shade = canvas.px(c) + 0.5, canvas.py(r + 1) + 0.5, 0.04 + 0.96 * share[r, c] / (most or 1.0)
            canvas.add(cell, x=x, y=y, w=wide, h=high, o=shade, t=f"{column}, {row}: {share[r, c]:.1%}")
    for r, row in enumerate(rows):
        canvas.beside(r + 0.5, row)
    for c, column in enumerate(columns):
        canvas.below(c + 0.5, column)
    canvas.named()
    return canvas.done()


def reliability(title: str, predicted: np.ndarray, observed: np.ndarray, weight: np.ndarray) -> Markup:
    """Predicted against observed, the diagonal, and dots as large as their weight."""
    canvas = _Canvas(title, (0.0, 1.0), (0.0, 1.0), ("predicted pass rate", "observed pass rate"))
    canvas.axes()
    ends = {"a": canvas.px(0), "b": canvas.py(0), "c": canvas.px(1), "d": canvas.py(1)}
    canvas.add('<line class="diagonal" x1="{a}" y1="{b}" x2="{c}" y2="{d}"/>', **ends)
    most = float(weight.max(initial=0.0)) or 1.0
    dot = (
        '<circle cx="{x:.1f}" cy="{y:.1f}" r="{r:.1f}" fill="var(--c1)" fill-opacity="0.75"><title>{t}</title></circle>'
    )
    for p, o, w in zip(predicted.tolist(), observed.tolist(), weight.tolist(), strict=True):
        if w > 0:
            told = f"predicted {p:.2f}, observed {o:.2f}, {w:,.0f} groups"
            canvas.add(dot, x=canvas.px(p), y=canvas.py(o), r=3 + 9 * math.sqrt(w / most), t=told)
    return canvas.done()
