"""Colours and the style sheet of drawings, light and dark."""

from __future__ import annotations

_COLOURS = ("ink", "dim", "line", "box", "add", "add-ink", "del", "del-ink")
_LIGHT = ("#1f2328", "#656d76", "#afb8c1", "#f6f8fa", "#dafbe1", "#116329", "#ffebe9", "#a40e26")
_DARK = ("#e6edf3", "#8d96a0", "#484f58", "#1c2128", "#12331f", "#7ee2a0", "#38181b", "#ffa198")


def _palette(values: tuple[str, ...]) -> str:
    return "svg.tg{" + ";".join(f"--{name}:{value}" for name, value in zip(_COLOURS, values, strict=True)) + "}"


# The viewer puts this once into its page; a picture on its own carries it along.
STYLE = """\
svg.tg text{font:11px ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;fill:var(--ink)}
svg.tg .sub{font-size:10px;fill:var(--dim)}
svg.tg .head{font-weight:600}
svg.tg .mark{font-weight:700;font-size:13px}
svg.tg .label{font-size:9px;fill:var(--dim)}
svg.tg rect{fill:var(--box);stroke:var(--line);rx:5px}
svg.tg .edge{fill:none;stroke:var(--line);stroke-width:1.2;stroke-linejoin:round}
svg.tg .rule{stroke:var(--line);stroke-dasharray:1 4}
svg.tg .added rect{fill:var(--add);stroke:var(--add-ink)}
svg.tg .added .mark{fill:var(--add-ink)}
svg.tg .removed rect{fill:var(--del);stroke:var(--del-ink)}
svg.tg .removed .mark{fill:var(--del-ink)}
svg.tg .removed .head{text-decoration:line-through;text-decoration-thickness:1px}
svg.tg .rewired rect{stroke:var(--ink)}
svg.tg .hidden rect{fill:var(--add);stroke:var(--add-ink)}
svg.tg .bar rect{rx:2px}
svg.tg .bar-label{font-size:10px;pointer-events:none}
svg.tg .absent rect{stroke-dasharray:4 3;fill:none}
svg.tg .absent text{fill:var(--dim)}
svg.tg .soft{stroke-dasharray:4 3}
svg.tg .needs{stroke:var(--ink)}
"""
PALETTE = f"{_palette(_LIGHT)}\n@media (prefers-color-scheme:dark){{{_palette(_DARK)}}}\n"
# XML 1.0 has no place for these characters, escaped or not.
