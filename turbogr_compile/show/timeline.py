"""When each part of a schedule runs, by estimate: as data, as text and as a picture.

    {estimated: true, arms: [{name, seconds, exposed, blocks: [{name, op, stream, start, end}], waits: [...]}]}

Streams are compute, communication and host. Waits are where compute stands still; `for` names what it stands for.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any
from xml.sax.saxutils import escape

from .charts import round_step
from .diagram import document

STREAMS = ("compute", "communication", "host")
FEWEST = 1 / 250  # of the whole: neighbours shorter than that become one block
LEFT, WIDTH, HEIGHT, GAP = 122, 760, 30, 8


def block(name: str, op: str, stream: str, start: float, end: float) -> dict[str, Any]:
    return {"name": name, "op": op, "stream": stream, "start": round(start, 9), "end": round(end, 9)}


def wait(what: str, start: float, end: float) -> dict[str, Any]:
    return {"for": what, "stream": "compute", "start": round(start, 9), "end": round(end, 9)}


def arm(name: str, seconds: float, exposed: float, blocks: Sequence[Any], waits: Sequence[Any]) -> dict[str, Any]:
    shown = _together(blocks, seconds * FEWEST)
    return {
        "name": name, "seconds": round(seconds, 9), "exposed": round(exposed, 9), "blocks": shown, "waits": list(waits),
    }  # fmt: skip


def _together(blocks: Iterable[dict[str, Any]], shortest: float) -> list[dict[str, Any]]:
    """Compute that follows without a gap, as one block where each part is too short to be seen."""
    shown: list[dict[str, Any]] = []
    for each in blocks:
        last = shown[-1] if shown else None
        if (
            last is not None
            and each["stream"] == last["stream"] == "compute"
            and math.isclose(each["start"], last["end"], abs_tol=1e-9)
            and min(each["end"] - each["start"], last["end"] - last["start"]) < shortest
        ):
            count = last.get("count", 1) + 1
            shown[-1] = {**last, "end": each["end"], "op": f"{count} ops", "count": count}
        else:
            shown.append(each)
    return shown


def duration(seconds: float) -> str:
    """'19.8 ms'."""
    if not seconds:
        return "0"
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= scale or unit == "µs":
            return f"{seconds / scale:.3g} {unit}"
    raise AssertionError


def heading(of: dict[str, Any]) -> str:
    return f"{of['name']}: {duration(of['seconds'])} (estimated), of which compute waits {duration(of['exposed'])}"


def timeline_text(timeline: dict[str, Any]) -> str:
    lines = ["Estimated, not measured."]
    for each in timeline["arms"]:
        lines += ["", heading(each)]
        rows = sorted([*each["blocks"], *each["waits"]], key=lambda b: (b["start"], STREAMS[::-1].index(b["stream"])))
        for b in rows:
            what = f"waits for {b['for']}" if "for" in b else f"{b['name']}  {b['op']}"
            lines.append(f"  {duration(b['start']):>9} {duration(b['end'] - b['start']):>9}  {b['stream']:<14} {what}")
    return "\n".join(lines) + "\n"


# --- the picture -------------------------------------------------------------------------------------


def timeline_svg(timeline: dict[str, Any], title: str = "Schedule", embedded: bool = False) -> str:
    """One lane a stream, one above the other for each arm, all to the same scale."""
    arms = timeline["arms"]
    longest = max((a["seconds"] for a in arms), default=0.0) or 1e-9
    used = {b["stream"] for a in arms for b in a["blocks"]} | {"compute"}
    body, y = [], 24.0
    for each in arms:
        body.append(f'<text class="head" x="16" y="{y:g}">{escape(heading(each))}</text>')
        y += 12
        for stream in (s for s in STREAMS if s in used):
            body += _lane(each, stream, y, WIDTH / longest)
            y += HEIGHT + GAP
        y += 26
    body += _axis(longest, y - 18)
    body += _legend(y + 22)
    return document(body, LEFT + WIDTH + 24, y + 38, title, embedded)


def _lane(each: dict[str, Any], stream: str, y: float, scale: float) -> list[str]:
    line = f'<path class="rule" d="M{LEFT} {y + HEIGHT:g}H{LEFT + WIDTH}"/>'
    drawn = [f'<text class="sub" x="16" y="{y + 19:g}">{stream}</text>', line]
    waits = each["waits"]
    for b in (b for b in each["blocks"] if b["stream"] == stream):
        start, end, length = (duration(t) for t in (b["start"], b["end"], b["end"] - b["start"]))
        tip = f"{b['name']}  {b['op']}\n{start} to {end}, {length}"
        kind = {"compute": "context", "communication": "hidden", "host": "hidden"}[stream]
        drawn.append(_bar(b, kind, tip, y, scale))
        for w in (w for w in waits if stream != "compute" and b["name"] in w["for"].split(", ")):
            part = {"start": max(w["start"], b["start"]), "end": min(w["end"], b["end"])}
            if part["end"] > part["start"]:
                drawn.append(_bar(part, "removed", f"{tip}\nexposed", y, scale))
        drawn.append(_label(b, b["name"] if "count" not in b else b["op"], y, scale))
    for w in (w for w in waits if stream == "compute"):
        seconds = duration(w["end"] - w["start"])
        drawn.append(_bar(w, "removed", f"compute waits {seconds} for {w['for']}", y, scale))
        drawn.append(_label(w, f"waits {seconds}", y, scale))
    return drawn


def _bar(b: dict[str, Any], kind: str, tip: str, y: float, scale: float) -> str:
    width = max((b["end"] - b["start"]) * scale, 1.0)
    at = f"translate({LEFT + b['start'] * scale:.2f} {y:g})"
    return (
        f'<g class="{kind} bar" transform="{at}"><title>{escape(tip)}</title>'
        f'<rect width="{width:.2f}" height="{HEIGHT}"/></g>'
    )


def _label(b: dict[str, Any], text: str, y: float, scale: float) -> str:
    """As much of it as fits into the bar."""
    room = int(((b["end"] - b["start"]) * scale - 10) / 6.2)
    shown = text if len(text) <= room else (text[: room - 1] + "…" if room > 3 else "")
    x = LEFT + b["start"] * scale + 5
    return f'<text class="bar-label" x="{x:.2f}" y="{y + 19:g}">{escape(shown)}</text>' if shown else ""


def _axis(longest: float, y: float) -> list[str]:
    step = round_step(longest / 6)
    ticks = [i * step for i in range(int(longest / step + 1e-9) + 1)]
    drawn = [f'<path class="edge" d="M{LEFT} {y:g}H{LEFT + WIDTH}"/>']
    for t in ticks:
        x = LEFT + t / longest * WIDTH
        drawn.append(f'<path class="edge" d="M{x:.2f} {y:g}v4"/>')
        drawn.append(f'<text class="label" x="{x + 3:.2f}" y="{y + 13:g}">{duration(t) if t else "0"}</text>')
    return drawn


def _legend(y: float) -> list[str]:
    kinds = {"context": "compute", "hidden": "communication, host: behind compute", "removed": "exposed: compute waits"}
    drawn, x = [], 16.0
    for kind, text in kinds.items():
        drawn.append(f'<g class="{kind} bar" transform="translate({x:g} {y - 9:g})"><rect width="12" height="12"/></g>')
        drawn.append(f'<text class="sub" x="{x + 18:g}" y="{y + 1:g}">{text}</text>')
        x += 18 + 6.2 * len(text) + 22
    drawn.append(f'<text class="sub" x="{x:g}" y="{y + 1:g}">estimated, not measured</text>')
    return drawn
