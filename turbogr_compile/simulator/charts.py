"""Pictures of a simulation as SVG, coloured by the page that holds them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..show.charts import WIDTH, Axis, Series, escape, plot, svg

SHARES = (
    ("utilisation", "compute"),
    ("exposed_communication", "communication that nothing hides"),
    ("exposed_host", "host"),
    ("waiting", "waiting for other devices"),
)
LANES = (("compute", "compute"), ("inside", "links in the node"), ("across", "links across"), ("host", "host"))
Outcomes = Sequence[dict[str, Any]]


def lines(
    outcomes: Outcomes, key: str, styles: dict[str, str], paper: float, paper_text: str, show: Callable[[float], str]
) -> str:
    """One line per variant over the number of devices, and what the paper reports as a dashed one."""
    scales = sorted({o["devices"] for o in outcomes})
    low = min([o[key] for o in outcomes] + [paper])
    low = min(max(int(low * 10 - 0.3) / 10, 0.0), 0.8)
    high = max([1.0] + [o[key] for o in outcomes])
    # Numbers of devices stand side by side: they grow by factors.
    x = Axis(0, len(scales) - 1, [(i, str(scale)) for i, scale in enumerate(scales)])
    y = Axis(low, high, [(t / 10, show(t / 10)) for t in range(round(low * 10), round(high * 10) + 1)])
    series = []
    for name, style in styles.items():
        found = [o for o in outcomes if o["variant"] == name]
        points = [(scales.index(o["devices"]), o[key]) for o in found]
        tips = [f"{name}, {o['devices']} devices: {show(o[key])}" for o in found]
        series.append(Series(f"{name}  {show(found[-1][key])}", points, style, tips))
    title = f"{key} over the number of devices"
    return plot(title, series, x, y, "devices", dots=True, labels=True, reference=(paper, paper_text))


def shares(outcomes: Outcomes) -> str:
    """Where the time of a step goes: one bar per variant, as long as its step."""
    left, right, bar, gap = 190, 90, 22, 10
    width = 2 * WIDTH + 24
    longest = max(o["step_seconds"] for o in outcomes)
    scale = (width - left - right) / longest
    parts = []
    for row, o in enumerate(outcomes):
        top = 4 + row * (bar + gap)
        parts.append(f'<text class="end" x="{left - 10}" y="{top + 15}">{escape(o["variant"])}</text>')
        at = float(left)
        for key, text in SHARES:
            size = o[key] * o["step_seconds"] * scale
            if size < 0.05:
                continue
            title = (
                f"<title>{escape(text)}: {o[key]:.1%} of the step, {o[key] * o['step_seconds'] * 1e3:.1f} ms</title>"
            )
            parts.append(f'<rect class="{key}" x="{at:.1f}" y="{top}" width="{size:.1f}" height="{bar}">{title}</rect>')
            if size > 44:
                parts.append(f'<text class="on {key}" x="{at + size / 2:.1f}" y="{top + 15}">{o[key]:.0%}</text>')
            at += size
        parts.append(f'<text class="dim" x="{at + 8:.1f}" y="{top + 15}">{o["step_seconds"] * 1e3:.0f} ms</text>')
    return svg(width, len(outcomes) * (bar + gap) + 4, parts, "where the time of a step goes")


def timelines(shown: Sequence[dict[str, Any]]) -> str:
    """What one device does during the last two steps, resource by resource; time has the same scale for all."""
    left, lane, gap = 190, 16, 3
    width = 2 * WIDTH + 24
    longest = max(t["seconds"] for t in shown)
    scale = (width - left - 10) / longest
    parts, top = [], 4.0
    for one in shown:
        parts.append(f'<text class="head end" x="{left - 10}" y="{top + 12:.1f}">{escape(one["variant"])}</text>')
        top += lane + gap
        for resource, text in LANES:
            if not one["lanes"].get(resource):
                continue
            parts.append(f'<text class="dim end" x="{left - 10}" y="{top + 12:.1f}">{text}</text>')
            parts.append(
                f'<rect class="lane" x="{left}" y="{top:.1f}" width="{one["seconds"] * scale:.1f}" height="{lane}"/>'
            )
            for name, start, seconds in one["lanes"][resource]:
                parts.append(_block(name, resource, left + start * scale, top, seconds, scale, lane))
            top += lane + gap
        top += 8
    return svg(width, round(top), parts, "what one device does during two steps")


def _block(name: str, resource: str, x: float, top: float, seconds: float, scale: float, height: int) -> str:
    size = seconds * scale
    text = f"<title>{escape(name)}: {seconds * 1e3:.2f} ms</title>"
    where = f'x="{x:.1f}" y="{top:.1f}" width="{max(size, 0.4):.1f}" height="{height}"'
    drawn = f'<rect class="task {resource}" {where}>{text}</rect>'
    if size > 7 * len(name):
        drawn += f'<text class="on task-text" x="{x + size / 2:.1f}" y="{top + 12:.1f}">{escape(name)}</text>'
    return drawn
