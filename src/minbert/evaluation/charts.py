"""Pictures as SVG text, drawn by hand: curves, a scatter with its diagonal, a reliability diagram, word overlap.

    svg = line_chart([Series("dev", [(100, 0.41), (200, 0.47)])], label="dev accuracy", x_label="step")

Shapes carry classes, and the page's CSS gives these a colour for each theme. A series differs from its neighbours by
its marker and its dashes too, for those who cannot tell the colours apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
from numpy.typing import NDArray

from minbert.evaluation.diagnosis import Bin
from minbert.evaluation.overlap import OverlapBin

WIDTH, HEIGHT = 400, 250
LEFT, RIGHT, TOP, BOTTOM = 54, 12, 14, 42
STYLES = 6
"""As many as the page has colours; after them the colours come again, with other markers."""
DENSE = 40
"""A series with more points shows its markers only under the mouse."""
CROWD = 400
"""A scatter with more points draws them smaller and paler."""
MARKERS = (
    "M{x} {y}m-3.5 0a3.5 3.5 0 1 0 7 0a3.5 3.5 0 1 0-7 0",
    "M{x} {y}m-3.2-3.2h6.4v6.4h-6.4z",
    "M{x} {y}m0-4.4l4.2 7.4h-8.4z",
    "M{x} {y}m0-4.6l4.6 4.6l-4.6 4.6l-4.6-4.6z",
    "M{x} {y}m-4.2-3l8.4 0l-4.2 7.4z",
    "M{x} {y}m-4-1.3h2.7v-2.7h2.6v2.7h2.7v2.6h-2.7v2.7h-2.6v-2.7h-2.7z",
)


@dataclass(frozen=True)
class Series:
    """A named curve. A point whose y is nan leaves a gap."""

    name: str
    points: Sequence[tuple[float, float]]
    style: int = 0


@dataclass(frozen=True)
class Frame:
    """From values to places in the picture."""

    x: tuple[float, float]
    y: tuple[float, float]

    def place(self, x: float, y: float) -> tuple[str, str]:
        across = (x - self.x[0]) / (self.x[1] - self.x[0])
        up = (y - self.y[0]) / (self.y[1] - self.y[0])
        return _short(LEFT + across * (WIDTH - LEFT - RIGHT)), _short(HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM))

    def axes(self, x_label: str, y_label: str) -> str:
        """Grid, ticks and the names of both axes."""
        parts = []
        for tick in ticks(*self.x, count=6):
            x, _ = self.place(tick, 0)
            parts.append(f'<line class="grid" x1="{x}" x2="{x}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
            parts.append(f'<text x="{x}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{tick_name(tick)}</text>')
        for tick in ticks(*self.y, count=5):
            _, y = self.place(0, tick)
            parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
            parts.append(f'<text x="{LEFT - 7}" y="{y}" dy="4" text-anchor="end">{tick_name(tick)}</text>')
        middle = (TOP + HEIGHT - BOTTOM) / 2
        across = (LEFT + WIDTH - RIGHT) / 2
        parts.append(f'<path class="axis" d="M{LEFT} {TOP}V{HEIGHT - BOTTOM}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text class="name" x="{across}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x_label)}</text>')
        parts.append(
            f'<text class="name" transform="translate(11 {middle}) rotate(-90)" text-anchor="middle">'
            f"{escape(y_label)}</text>"
        )
        return "".join(parts)


def line_chart(
    series: Sequence[Series],
    *,
    label: str,
    x_label: str,
    y_label: str,
    zero: bool = False,
    mark: tuple[float, str] | None = None,
) -> str:
    """Curves over a common x, which starts at 0; `mark` is a place on it with a name; `zero`: y starts at 0 too."""
    known = [(x, y) for each in series for x, y in each.points if math.isfinite(y)]
    if not known:
        return '<p class="empty">Nothing to draw: no number is defined.</p>'
    values = [y for _, y in known]
    low, high = (min(0.0, *values) if zero else min(values)), max(values)
    frame = Frame((0, max(x for x, _ in known) or 1), rounded(low, high))
    parts = [frame.axes(x_label, y_label)]
    if mark is not None:
        x, _ = frame.place(mark[0], 0)
        side = "end" if float(x) > WIDTH / 2 else "start"
        parts.append(f'<line class="mark" x1="{x}" x2="{x}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
        parts.append(
            f'<text class="marked" x="{x}" dx="{-5 if side == "end" else 5}" y="{HEIGHT - BOTTOM - 6}" '
            f'text-anchor="{side}">{escape(mark[1])}</text>'
        )
    parts += [_curve(each, frame) for each in series]
    return _svg(label, parts)


def _curve(series: Series, frame: Frame) -> str:
    path, pen = [], "M"
    dots = []
    name, style, marker = escape(series.name), series.style % STYLES, _marker(series)
    for x, y in series.points:
        if not math.isfinite(y):
            pen = "M"
            continue
        at_x, at_y = frame.place(x, y)
        path.append(f"{pen}{at_x} {at_y}")
        pen = "L"
        title = f"<title>{name}, step {x:,.0f}: {y:.4g}</title>"
        dots.append(f'<path class="dot" d="{marker.format(x=at_x, y=at_y)}">{title}</path>')
    dense = " dense" if len(dots) > DENSE else ""
    return f'<g class="s{style}{dense}"><path class="line" d="{"".join(path)}"/>{"".join(dots)}</g>'


def _marker(series: Series) -> str:
    return MARKERS[(series.style + series.style // STYLES) % len(MARKERS)]


def legend(series: Sequence[Series]) -> str:
    """What each line is; text of the page and not of the picture, so that long names wrap."""
    items = []
    for each in series:
        style = each.style % STYLES
        dot = f'<path class="dot" d="{_marker(each).format(x=15, y=7)}"/>'
        sample = f'<g class="s{style}"><path class="line" d="M0 7H30"/>{dot}</g>'
        items.append(
            f'<li><svg viewBox="0 0 30 14" width="30" height="14" aria-hidden="true">{sample}</svg>'
            f"{escape(each.name)}</li>"
        )
    return f'<ul class="legend">{"".join(items)}</ul>'


def scatter(labels: NDArray[np.float64], predictions: NDArray[np.float64], *, label: str) -> str:
    """A point a row, label across and prediction up, with the diagonal on which both are equal."""
    both = np.concatenate([labels, predictions])
    frame = Frame(*[rounded(float(both.min()), float(both.max()))] * 2)
    low, high = frame.x
    crowded = len(labels) > CROWD
    parts = [frame.axes("label", "prediction"), f'<g class="s0 {"crowd" if crowded else "cloud"}">']
    for x, y in zip(labels.tolist(), predictions.tolist(), strict=True):
        at_x, at_y = frame.place(x, y)
        title = f"<title>label {x:.4g}, predicted {y:.3f}</title>"
        parts.append(f'<circle cx="{at_x}" cy="{at_y}" r="{2 if crowded else 3}">{title}</circle>')
    parts += ["</g>", _segment("diagonal", frame.place(low, low), frame.place(high, high))]
    return _svg(label, parts)


def overlap_chart(points: NDArray[np.float64], bins: Sequence[OverlapBin], *, label: str, y_label: str) -> str:
    """A dot a pair, its word overlap across and its prediction up; two curves, the mean prediction and mean label.

    Args:
        points: (pairs, 3), of `overlap.overlap_points`.
        bins: the means, of `overlap.by_overlap`.
    """
    values = points[:, 1:]
    frame = Frame((0, 1), rounded(float(values.min()), float(values.max())))
    crowded = len(points) > CROWD
    parts = [frame.axes("word overlap (BLEU)", y_label), f'<g class="s0 {"crowd" if crowded else "cloud"}">']
    for overlap, wanted, found in points.tolist():
        x, y = frame.place(overlap, found)
        title = f"<title>overlap {overlap:.2f}, label {wanted:.4g}, predicted {found:.3f}</title>"
        parts.append(f'<circle cx="{x}" cy="{y}" r="{2 if crowded else 3}">{title}</circle>')
    parts.append("</g>")
    for each in overlap_series(bins):
        places = [(each_bin, frame.place(*point)) for each_bin, point in zip(bins, each.points, strict=True)]
        line = "L".join(" ".join(place) for _, place in places)
        dots = "".join(
            f'<path class="dot" d="{_marker(each).format(x=x, y=y)}"><title>{each.name} {height:.3f}, '
            f"{one.rows:,} pairs with an overlap of {one.low:.1f} to {one.high:.1f}</title></path>"
            for (one, (x, y)), (_, height) in zip(places, each.points, strict=True)
        )
        parts.append(f'<g class="s{each.style}"><path class="line" d="M{line}"/>{dots}</g>')
    return _svg(label, parts)


def overlap_series(bins: Sequence[OverlapBin]) -> list[Series]:
    """The two curves, for the chart and for its legend."""
    return [
        Series("mean prediction", [(each.bleu, each.prediction) for each in bins], 1),
        Series("mean label", [(each.bleu, each.label) for each in bins], 3),
    ]


def reliability_chart(bins: Sequence[Bin], *, label: str) -> str:
    """Share of right answers over confidence: below the diagonal the model is too sure of itself. Big dot, many rows."""
    frame = Frame((0, 1), (0, 1))
    most = max(each.rows for each in bins)
    parts = [frame.axes("confidence", "share right"), _segment("diagonal", frame.place(0, 0), frame.place(1, 1))]
    parts.append('<g class="s0">')
    for each in bins:
        x, y = frame.place(each.confidence, each.right)
        low, high = (frame.place(each.confidence, value) for value in each.interval)
        radius = 2.5 + 5.5 * math.sqrt(each.rows / most)
        title = (
            f"confidence {each.low:.2f} to {each.high:.2f}, mean {each.confidence:.3f}: "
            f"{each.right:.0%} right of {each.rows:,} {'row' if each.rows == 1 else 'rows'}"
        )
        parts.append(_segment("whisker", low, high))
        parts.append(f'<circle class="dot" cx="{x}" cy="{y}" r="{radius:.1f}"><title>{title}</title></circle>')
    return _svg(label, [*parts, "</g>"])


def thinned(points: Sequence[tuple[float, float]], most: int = 120) -> tuple[list[tuple[float, float]], int]:
    """At most so many points, each the mean of neighbours, and how many neighbours these are."""
    size = math.ceil(len(points) / most) or 1
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return [(group[-1][0], float(np.mean([y for _, y in group]))) for group in groups], size


def ticks(low: float, high: float, count: int) -> list[float]:
    """Round numbers from low to high, at most about `count` steps of them."""
    step = _step(low, high, count)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def tick_name(tick: float) -> str:
    value = round(tick, 12)
    if 0 < abs(value) < 0.001:
        figures, power = f"{value:e}".split("e")
        return f"{float(figures):g}e{int(power)}"
    return f"{value:,g}".replace("-", "\u2212")


def rounded(low: float, high: float) -> tuple[float, float]:
    """Both ends moved outwards to a tick; a single value gets room on both sides."""
    if high - low <= 1e-12 * max(abs(low), abs(high)):
        room = abs(high) * 0.1 or 0.1
        low, high = low - room, high + room
    step = 0.0
    while step != (step := _step(low, high, 5)):  # a wider range may want wider steps
        low, high = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
    return low, high


def _step(low: float, high: float, count: int) -> float:
    rough = (high - low) / count
    power: float = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))


def _segment(kind: str, start: tuple[str, str], end: tuple[str, str]) -> str:
    return f'<line class="{kind}" x1="{start[0]}" y1="{start[1]}" x2="{end[0]}" y2="{end[1]}"/>'


def _svg(label: str, parts: Iterable[str]) -> str:
    name = escape(label)
    return f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{name}">{"".join(parts)}</svg>'


def _short(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
