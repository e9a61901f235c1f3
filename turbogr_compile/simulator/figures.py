"""Numbers that know where they come from: a simulation is worth as much as what went into it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

PROVENANCES = {
    "measured": "timed on a machine, as the source says",
    "vendor": "published by the manufacturer",
    "projected": "counted by the AscendC twin and priced with documented rates; no NPU has run it",
    "assumed": "chosen; nobody measured it for this purpose",
    "chosen": "the workload, as asked for",
    "paper-reported": "from the abstract of arXiv 2605.13433; other machine, model and data",
}


class Figure(float):
    """A float with a unit and a provenance."""

    unit: str
    provenance: str
    source: str

    def __new__(cls, value: float, unit: str, provenance: str, source: str) -> Figure:
        if provenance not in PROVENANCES:
            raise ValueError(f"provenance {provenance!r}: one of {', '.join(PROVENANCES)}")
        figure = super().__new__(cls, value)
        figure.unit, figure.provenance, figure.source = unit, provenance, source
        return figure

    def __reduce__(self) -> tuple[Any, ...]:
        return Figure, (float(self), self.unit, self.provenance, self.source)

    def replaced(self, value: float) -> Figure:
        """Another value, as asked for on the command line."""
        return Figure(value, self.unit, "chosen", "as asked for")

    @property
    def text(self) -> str:
        number, prefix = scaled(float(self))
        joined = prefix + self.unit if self.unit.split(" ")[0] in SI else f"{prefix} {self.unit}".strip()
        return f"{number} {joined}".strip()


SI = ("s", "B/s", "FLOP/s")  # units that take a prefix


def scaled(value: float) -> tuple[str, str]:
    """'196', 'G': four digits and a prefix."""
    sizes = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (0.01, ""), (1e-3, "m"), (1e-6, "µ"), (1e-9, "n"))
    for size, prefix in sizes:
        if abs(value) >= size:
            return f"{value / (size if prefix else 1.0):.4g}", prefix
    return f"{value:.4g}", ""


def assumptions(holder: Any, part: str) -> Iterator[dict[str, Any]]:
    """Every figure of a dataclass, for printing."""
    for field in fields(holder):
        value = getattr(holder, field.name)
        if isinstance(value, Figure):
            yield {
                "part": part,
                "name": field.name.replace("_", " "),
                "value": float(value),
                "text": value.text,
                "provenance": value.provenance,
                "source": value.source,
            }
