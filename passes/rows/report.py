"""The analysis as text: rows, predicates, masks, attention and demand, each with the line it came from."""

from __future__ import annotations

from typing import Any

from torch import fx

from ...graph.provenance import line_of
from ...graph.text import type_text
from ...show.table import table
from .attending import Attention
from .calls import is_tensor
from .demand import DemandAnalysis, named
from .meaning import Band, Const, Holds, Iota, Meaning, OneHot, Two
from .sets import ALL
from .spaces import Space

LONGEST = 90  # a demand in the table of values; the attention section shows it whole


class Names:
    """Letters for row axes, sizes for the others."""

    def __init__(self, an: DemandAnalysis) -> None:
        self.an = an
        self._names: dict[Any, str] = {}
        for space in an.spaces:
            for axis in space.sequence:
                self._names.setdefault(axis, _numbered("b", [n for n in self._names.values() if n[0] == "b"]))
            for axis in space.column:
                self._names.setdefault(axis, _numbered("n", [n for n in self._names.values() if n[0] == "n"]))

    def dim(self, axes: Any) -> str:
        return "·".join(self._names.get(a) or str(self.an.typing.axes.size(a)) for a in axes) or "1"

    def dims(self, node: fx.Node) -> str:
        return f"({', '.join(self.dim(d) for d in self.an.typing.atoms(node))})"

    def space(self, space: Space) -> str:
        return f"{self.dim(space.sequence)} × {self.dim(space.column)}"


def _numbered(letter: str, known: list[str]) -> str:
    return letter if not known else f"{letter}{len(known)}"


def analysis_text(an: DemandAnalysis) -> str:
    """Everything the analysis found, for a reader who wonders why a value is packed or is not."""
    names = Names(an)
    parts = [_section("row spaces (sequences × columns)", _spaces(an, names)),
             _section("predicates", _predicates(an, names)),
             _section("masks and indices", _masks(an, names)),
             _section("speculated on, and checked on every batch", _speculations(an)),
             _section("attention", [line for a in an.attentions.values() for line in _attention(an, a)]),
             _section("not packed", [_at(m.node, f"%{m.node}: {m.text}") for m in an.missed]),
             _section("values", _values(an, names))]  # fmt: skip
    return "\n".join(p for p in parts if p)


def _section(title: str, lines: list[str]) -> str:
    return f"{title}\n" + "".join(f"  {line}\n" for line in lines) if lines else ""


def _at(node: fx.Node, text: str) -> str:
    line = line_of(node)
    return f"{text}    {line}" if line is not None else text


def _spaces(an: DemandAnalysis, names: Names) -> list[str]:
    out = []
    for space in an.spaces:
        size = " × ".join(str(an.typing.size_of(axes)) for axes in (space.sequence, space.column))
        first = next((n for n in an.graph.nodes if is_tensor(n) and an.space_of(n) == space), None)
        text = f"{names.space(space)}   ({size})"
        out.append(_at(first, f"{text}   first seen in %{first}") if first is not None else text)
    return out


def _predicates(an: DemandAnalysis, names: Names) -> list[str]:
    found: dict[Any, fx.Node] = {}
    for node in an.graph.nodes:
        two = an.meanings.of(node)
        for literal in two.literals if isinstance(two, Two) else ():
            if isinstance(literal, Holds):
                found.setdefault(literal.predicate, node)
        for predicate in an.zeros.support(node):
            found.setdefault(predicate, node)
    return [_at(node, f"{predicate}   over {names.dims(predicate.node)}") for predicate, node in found.items()]


def _masks(an: DemandAnalysis, names: Names) -> list[str]:
    out = []
    for node in an.graph.nodes:
        meaning = an.meanings.of(node)
        if meaning is not None and not isinstance(meaning, Const):
            out.append(_at(node, f"%{node} {names.dims(node)}: {_meaning(meaning)}"))
    return out


def _meaning(meaning: Meaning) -> str:
    if isinstance(meaning, Iota):
        return f"index along dim {meaning.dim}" + (f" + {meaning.offset}" if meaning.offset else "")
    if isinstance(meaning, OneHot):
        return f"1 at %{meaning.index} along dim {meaning.dim}, else 0"
    if isinstance(meaning, Const):
        return str(meaning.value)
    assert isinstance(meaning, Two)
    where = " and ".join(sorted(map(_literal, meaning.literals)))
    return f"{meaning.yes} where {where}, else {meaning.no}"


def _literal(literal: Holds | Band) -> str:
    if isinstance(literal, Band):
        return f"index {literal.i} - index {literal.j} >= {literal.least}"
    return f"{literal.predicate} at dims {list(literal.dims)}"


def _speculations(an: DemandAnalysis) -> list[str]:
    kinds = {
        "binary": "holds only 0 and 1",
        "additive": "holds only 0 and minus infinity",
        "values": "holds only the two numbers it held when this was compiled",
        "same": "holds what it held when this was compiled",
    }
    return [_at(s.node, f"%{s.node} {kinds[s.kind]}") for s in an.meanings.speculations.values()]


def _attention(an: DemandAnalysis, a: Attention) -> list[str]:
    wanted, keys = an.wanted.get(a.node, ALL), an.wanted.get(a.value, ALL)
    first, *rest = str(a.form).split("\n  ")
    return [_at(a.node, f"%{a.node}: {first}"), *(f"  {line}" for line in rest),
            f"  queries: {named(wanted)}", f"  keys:    {named(keys)}"]  # fmt: skip


def _values(an: DemandAnalysis, names: Names) -> list[str]:
    rows = []
    for node in an.graph.nodes:
        if not is_tensor(node) or node.op == "output":
            continue
        wanted = an.wanted.get(node)
        shown = "nothing" if wanted is None else named(wanted)
        zero = " and ".join(sorted(map(str, an.zeros.support(node))))
        line = line_of(node)
        rows.append([f"%{node}", type_text(node.meta["val"]), names.dims(node),
                     shown if len(shown) <= LONGEST else shown[: LONGEST - 1] + "…", zero,
                     line.where if line is not None else ""])  # fmt: skip
    header = ["value", "type", "dims", "demanded rows", "zero unless", "line"]
    return table(rows, header).splitlines()
