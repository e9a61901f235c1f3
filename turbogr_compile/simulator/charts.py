"""Pictures of a simulation as SVG, coloured by the page that holds them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import Any

WIDTH, HEIGHT = 590, 300
LEFT, RIGHT, TOP, BOTTOM = 40, 214, 14, 40
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
    across, down = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def x(devices: int) -> float:
        return LEFT + across * (scales.index(devices) / (len(scales) - 1) if len(scales) > 1 else 0.5)

    def y(value: float) -> float:
        return TOP + down * (high - value) / (high - low)

    parts = []
    for tick in range(round(low * 10), round(high * 10) + 1):
        at = y(tick / 10)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{LEFT + across}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text class="tick end" x="{LEFT - 8}" y="{at + 4:.1f}">{show(tick / 10)}</text>')
    for scale in scales:
        parts.append(f'<text class="tick mid" x="{x(scale):.1f}" y="{HEIGHT - BOTTOM + 18}">{scale}</text>')
    parts.append(f'<text class="tick mid" x="{LEFT + across / 2:.1f}" y="{HEIGHT - 4}">devices</text>')
    at = y(paper)
    parts.append(f'<line class="paper" x1="{LEFT}" x2="{LEFT + across}" y1="{at:.1f}" y2="{at:.1f}"/>')

    labels = [(y(paper), paper_text, "paper-label")]
    for name, style in styles.items():
        points = [(x(o["devices"]), y(o[key]), o) for o in outcomes if o["variant"] == name]
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b, _ in points)
        dots = "".join(
            f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3"><title>{escape(name)}, {o["devices"]} devices: {show(o[key])}'
            "</title></circle>"
            for a, b, o in points
        )
        parts.append(f'<g class="{style}"><polyline points="{path}"/>{dots}</g>')
        labels.append((points[-1][1], f"{name}  {show(points[-1][2][key])}", f"{style} label"))
    for at, text, style in _apart(labels, 14.0, HEIGHT - BOTTOM + 6):
        parts.append(f'<text class="{style}" x="{LEFT + across + 10}" y="{at + 4:.1f}">{escape(text)}</text>')
    return _svg(WIDTH, HEIGHT, parts)


def _apart(labels: list[tuple[float, str, str]], gap: float, lowest: float) -> list[tuple[float, str, str]]:
    """Moved down, then up, until no two overlap."""
    placed = sorted(labels)
    tops = [at for at, _, _ in placed]
    for i in range(1, len(tops)):
        tops[i] = max(tops[i], tops[i - 1] + gap)
    for i in range(len(tops) - 1, -1, -1):
        limit = lowest if i == len(tops) - 1 else tops[i + 1] - gap
        tops[i] = min(tops[i], limit)
    return [(top, text, style) for top, (_, text, style) in zip(tops, placed, strict=True)]


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
    return _svg(width, len(outcomes) * (bar + gap) + 4, parts)


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
    return _svg(width, round(top), parts)


def _block(name: str, resource: str, x: float, top: float, seconds: float, scale: float, height: int) -> str:
    size = seconds * scale
    text = f"<title>{escape(name)}: {seconds * 1e3:.2f} ms</title>"
    where = f'x="{x:.1f}" y="{top:.1f}" width="{max(size, 0.4):.1f}" height="{height}"'
    drawn = f'<rect class="task {resource}" {where}>{text}</rect>'
    if size > 7 * len(name):
        drawn += f'<text class="on task-text" x="{x + size / 2:.1f}" y="{top + 12:.1f}">{escape(name)}</text>'
    return drawn


def _svg(width: int, height: int, parts: Sequence[str]) -> str:
    return f'<svg class="chart" viewBox="0 0 {width} {height}" role="img">{"".join(parts)}</svg>'
