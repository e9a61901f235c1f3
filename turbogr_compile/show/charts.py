"""Charts as SVG, coloured by the page that holds them (page.css.j2). No script, no network; same data, same bytes."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape as _escape

COLOURS = 7  # c0 to c6 of the style sheet
WIDTH, HEIGHT = 590, 300
LEFT, RIGHT, TOP, BOTTOM = 40, 214, 14, 40
# XML 1.0 has no place for these characters, escaped or not.
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
Labels = list[tuple[float, str, str]]  # height, text, style


@dataclass(frozen=True)
class Series:
    """One line: points from left to right, a style of the sheet ('c3', 'c3 dashed'), a text for each point or none."""

    name: str
    points: Sequence[tuple[float, float]]
    style: str = "c0"
    tips: Sequence[str] = ()


@dataclass(frozen=True)
class Bar:
    """One bar; without a length, what is written beside it says why."""

    name: str
    length: float | None
    figure: str
    style: str = "c0"


@dataclass(frozen=True)
class Axis:
    """From `low` to `high`, with a text at each of some places."""

    low: float
    high: float
    ticks: Sequence[tuple[float, str]]

    @property
    def span(self) -> float:
        return (self.high - self.low) or 1.0


def escape(text: str) -> str:
    return _NOT_XML.sub("\ufffd", _escape(text))


def axis(values: Sequence[float], show: Callable[[float], str], zero: bool = False, about: int = 5) -> Axis:
    """Round numbers around the values, and zero where asked."""
    known = [v for v in values if math.isfinite(v)] or [0.0, 1.0]
    low, high = min(known), max(known)
    low = min(low, 0.0) if zero else low
    if high == low:
        high = low + (abs(low) or 1.0)
    step = round_step((high - low) / about)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return Axis(first * step, last * step, [(i * step, show(i * step)) for i in range(first, last + 1)])


def round_step(least: float) -> float:
    """1, 2 or 5 times a power of ten, at least `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(f * power for f in (1, 2, 5, 10) if f * power >= least * (1 - 1e-9))


def plot(
    title: str, series: Sequence[Series], x: Axis, y: Axis, x_name: str, *,
    dots: bool = False, labels: bool = False, reference: tuple[float, str] | None = None, left: int = LEFT,
) -> str:  # fmt: skip
    """Lines over each other; `labels` writes names at their ends, `reference` draws a dashed line with a text.

    Where a value is not finite the line has a gap.
    """
    right = RIGHT if labels else 16
    across, down = WIDTH - left - right, HEIGHT - TOP - BOTTOM

    def at(point: tuple[float, float]) -> tuple[float, float]:
        return left + across * (point[0] - x.low) / x.span, TOP + down * (y.high - point[1]) / y.span

    parts = []
    for value, text in y.ticks:
        height = at((x.low, value))[1]
        parts.append(f'<line class="grid" x1="{left}" x2="{left + across}" y1="{height:.1f}" y2="{height:.1f}"/>')
        parts.append(f'<text class="tick end" x="{left - 8}" y="{height + 4:.1f}">{escape(text)}</text>')
    for value, text in x.ticks:
        parts.append(
            f'<text class="tick mid" x="{at((value, y.low))[0]:.1f}" y="{HEIGHT - BOTTOM + 18}">{escape(text)}</text>'
        )
    parts.append(f'<text class="tick mid" x="{left + across / 2:.1f}" y="{HEIGHT - 4}">{escape(x_name)}</text>')
    ends: Labels = []
    if reference is not None:
        height = at((x.low, reference[0]))[1]
        parts.append(f'<line class="paper" x1="{left}" x2="{left + across}" y1="{height:.1f}" y2="{height:.1f}"/>')
        ends.append((height, reference[1], "paper-label"))
    for one in series:
        parts.append(_line(one, at, dots))
        if labels and one.points:
            ends.append((at(one.points[-1])[1], one.name, f"{one.style} label"))
    for height, text, style in apart(ends, 14.0, HEIGHT - BOTTOM + 6):
        parts.append(f'<text class="{style}" x="{left + across + 10}" y="{height + 4:.1f}">{escape(text)}</text>')
    return svg(WIDTH, HEIGHT, parts, title)


def _line(one: Series, at: Callable[[tuple[float, float]], tuple[float, float]], dots: bool) -> str:
    runs: list[list[str]] = [[]]
    marks = []
    for i, point in enumerate(one.points):
        if not math.isfinite(point[1]):
            runs.append([])
            continue
        a, b = at(point)
        runs[-1].append(f"{a:.1f},{b:.1f}")
        if dots:
            tip = f"<title>{escape(one.tips[i])}</title>" if i < len(one.tips) else ""
            marks.append(f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3">{tip}</circle>')
    drawn = "".join(f'<polyline points="{" ".join(run)}"/>' for run in runs if run)
    return f'<g class="{one.style}">{drawn}{"".join(marks)}</g>'


def bars(title: str, rows: Sequence[Bar], width: int = WIDTH) -> str:
    """Horizontal bars on one linear scale from zero."""
    height, gap, figures = 20, 9, 120
    names = min(max(60, 16 + 9 * max((len(b.name) for b in rows), default=0)), width // 2)
    longest = max((b.length for b in rows if b.length is not None and math.isfinite(b.length)), default=0.0) or 1.0
    parts = []
    for row, bar in enumerate(rows):
        top = 4 + row * (height + gap)
        drawn = bar.length is not None and math.isfinite(bar.length)
        long = max(1.0, (bar.length or 0.0) / longest * (width - names - figures)) if drawn else 0.0
        place = f'x="{names}" y="{top}" width="{long:.1f}" height="{height}" rx="2"'
        parts.append(f'<text class="end" x="{names - 10}" y="{top + 14}">{escape(bar.name)}</text>')
        parts.append(f'<g class="{bar.style}"><rect {place}/></g>' if drawn else "")
        parts.append(
            f'<text class="{"figure" if drawn else "dim"}" x="{names + long + 8:.1f}" y="{top + 14}">'
            f"{escape(bar.figure)}</text>"
        )
    return svg(width, len(rows) * (height + gap) + 4, parts, title)


def apart(labels: Labels, gap: float, lowest: float) -> Labels:
    """Moved down, then up, until no two overlap."""
    placed = sorted(labels)
    tops = [at for at, _, _ in placed]
    for i in range(1, len(tops)):
        tops[i] = max(tops[i], tops[i - 1] + gap)
    for i in range(len(tops) - 1, -1, -1):
        limit = lowest if i == len(tops) - 1 else tops[i + 1] - gap
        tops[i] = min(tops[i], limit)
    return [(top, text, style) for top, (_, text, style) in zip(tops, placed, strict=True)]


def svg(width: int, height: int, parts: Sequence[str], title: str = "") -> str:
    label = f' aria-label="{escape(title)}"' if title else ""
    return f'<svg class="chart" viewBox="0 0 {width} {height}" role="img"{label}>{"".join(parts)}</svg>'
