"""Tables of text, for terminals."""

from __future__ import annotations


def table(rows: list[list[str]], header: list[str] | None = None) -> str:
    """Plain aligned columns."""
    every = ([header] if header else []) + rows
    if not every:
        return ""
    widths = [max(len(r[i]) for r in every) for i in range(len(every[0]))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in every]
    if header:
        lines.insert(1, "  ".join("─" * w for w in widths))
    return "\n".join(lines)
