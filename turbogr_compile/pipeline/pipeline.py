"""Pipelines: immutable values made of passes, ordered by what the passes declare.

    Pipeline.default("cpu").without("fold-views").with_(PackJagged(multiple=16))
    Pipeline.parse("remove-noops, pack-jagged{multiple=16}")

Order is never a position: within a phase it is the lexicographically smallest order that respects every
`after`, `before` and `needs`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import networkx as nx

from ..errors import PipelineError, did_you_mean
from ..graph.phases import Phase
from ..graph.provenance import Site, declaration_site
from . import catalogue
from .pass_base import Pass, build, parse_spec, split_specs


@dataclass(frozen=True)
class Repeat:
    """Run passes of one phase again and again until the graph no longer changes."""

    passes: tuple[Pass, ...]
    limit: int = 8

    def __post_init__(self) -> None:
        given = [_item(p) for p in self.passes]
        if not given or any(isinstance(p, Repeat) for p in given):
            raise PipelineError(
                "repeat takes one or more passes: repeat(a, b), or repeat(20: a, b) for 20 rounds at most"
            )
        object.__setattr__(self, "passes", tuple(given))
        if len({p.phase for p in self.passes}) > 1:
            listed = ", ".join(f"{p.name} ({p.phase.value})" for p in self.passes)
            raise PipelineError(f"repeat takes passes of one phase, got {listed}")

    @property
    def spec(self) -> str:
        limit = f"{self.limit}: " if self.limit != 8 else ""
        return f"repeat({limit}{', '.join(p.spec for p in self.passes)})"


Item = Pass | Repeat


@dataclass(frozen=True)
class Declared:
    """One reason for an order: `later` must follow `earlier`, as the class `by` declares."""

    earlier: str
    later: str
    kind: str  # after, before, needs
    by: type[Pass]

    @property
    def site(self) -> Site:
        return declaration_site(self.by, self.kind)

    @property
    def text(self) -> str:
        other = self.later if self.kind == "before" else self.earlier
        return f'{self.kind}=("{other}",)'


@dataclass(frozen=True)
class Pipeline:
    """Passes for one compilation; a value to be passed around, compared and printed."""

    items: tuple[Item, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "items", tuple(_item(i) for i in self.items))
        seen: dict[str, Pass] = {}
        for p in self.passes():
            if p.name in seen:
                raise PipelineError(f"pass '{p.name}' is in the pipeline twice: {seen[p.name].spec} and {p.spec}")
            seen[p.name] = p
        # An impossible order is an error now, not at the first compile.
        object.__setattr__(self, "_order", tuple(self._solve()))

    # --- making pipelines --------------------------------------------------------------------------

    @staticmethod
    def default(target: str = "cpu") -> Pipeline:
        """What runs when the user names no pipeline."""
        from .target import find_target

        return Pipeline.parse(find_target(target).default_pipeline)

    @staticmethod
    def parse(text: str) -> Pipeline:
        """Read the text form that `spec` prints."""
        return Pipeline(tuple(_parse_item(part) for part in split_specs(text)))

    @staticmethod
    def of(value: Pipeline | str | list[Pass | Repeat | str] | tuple[Pass | Repeat | str, ...]) -> Pipeline:
        """Accept what a user may write for a pipeline."""
        if isinstance(value, Pipeline):
            return value
        if isinstance(value, str):
            return Pipeline.parse(value)
        if isinstance(value, (list, tuple)):
            return Pipeline(tuple(_item(v) for v in value))
        raise PipelineError(f"a pipeline is a Pipeline, a text or a list of passes, got {type(value).__name__}")

    def with_(self, *items: Item | str) -> Pipeline:
        """Add passes; one with the name of a pass already here replaces it."""
        new = [_item(i) for i in items]
        names = {p.name for i in new for p in _passes_of(i)}
        return Pipeline((*self._keep(lambda p: p.name not in names), *new))

    def without(self, *names: str) -> Pipeline:
        here = {p.name for p in self.passes()}
        for name in names:
            if name not in here:
                raise PipelineError(f"cannot leave out {name!r}: not in this pipeline{did_you_mean(name, here)}")
        return Pipeline(self._keep(lambda p: p.name not in names))

    def _keep(self, wanted) -> tuple[Item, ...]:
        kept: list[Item] = []
        for item in self.items:
            rest = tuple(p for p in _passes_of(item) if wanted(p))
            if rest:
                kept.append(Repeat(rest, item.limit) if isinstance(item, Repeat) else item)
        return tuple(kept)

    # --- reading them ------------------------------------------------------------------------------

    def passes(self) -> Iterator[Pass]:
        for item in self.items:
            yield from _passes_of(item)

    @property
    def spec(self) -> str:
        """Text form, in the order of running."""
        return ", ".join(item.spec for phase in Phase for item in self.ordered(phase))

    def ordered(self, phase: Phase) -> list[Item]:
        """Items of a phase in the order in which they run."""
        return [item for item in self.order() if _passes_of(item)[0].phase is phase]

    def order(self) -> tuple[Item, ...]:
        """Items of every phase in the order in which they run."""
        return self._order  # type: ignore[attr-defined]

    def _solve(self) -> Iterator[Item]:
        declared = self.declarations()
        for phase in Phase:
            yield from _sort([i for i in self.items if _passes_of(i)[0].phase is phase], declared)

    def ordered_passes(self) -> list[Pass]:
        """Every pass once, in the order in which they first run."""
        return [p for item in self.order() for p in _passes_of(item)]

    def declarations(self) -> list[Declared]:
        """Every order declared between passes of this pipeline; a missing need is an error."""
        here = {p.name: p for p in self.passes()}
        found: list[Declared] = []
        for p in here.values():
            for need in p.needs:
                if need not in here:
                    hint = did_you_mean(need, here) or " (add it, or leave this pass out)"
                    raise PipelineError(
                        f"'{p.name}' needs '{need}', which is not in this pipeline{hint}\n"
                        f"  declared at {declaration_site(type(p), 'needs')}"
                    )
            for kind in ("after", "needs", "before"):
                for other in getattr(p, kind):
                    if other in here:
                        _check_phases(p, here[other], kind)
                        first, second = (p.name, other) if kind == "before" else (other, p.name)
                        found.append(Declared(first, second, kind, type(p)))
        return found


def _passes_of(item: Item) -> tuple[Pass, ...]:
    return item.passes if isinstance(item, Repeat) else (item,)


def _item(value: Any) -> Item:
    """What a user may put into a pipeline: a pass, its class, a rule, a text."""
    if isinstance(value, (Pass, Repeat)):
        if isinstance(value, Pass):
            catalogue.check_pass(type(value))
        return value
    if isinstance(value, str):
        return _parse_item(value)
    cls = getattr(value, "pass_class", value)  # rules and rule sets
    catalogue.check_pass(cls)
    return cls()


def _parse_item(text: str) -> Item:
    text = text.strip()
    if text.startswith("repeat(") and text.endswith(")"):
        inner = text.removeprefix("repeat(").removesuffix(")")
        head, colon, rest = inner.partition(":")
        limit = int(head) if colon and head.strip().isdigit() else None
        specs = split_specs(rest if limit is not None else inner)
        passes = [_parse_item(s) for s in specs]
        return Repeat(tuple(passes), **({"limit": limit} if limit else {}))  # type: ignore[arg-type]
    name, options = parse_spec(text)
    return build(catalogue.find(name), options)


def _check_phases(p: Pass, other: Pass, kind: str) -> None:
    phases = list(Phase)
    wrong = (
        phases.index(p.phase) > phases.index(other.phase)
        if kind == "before"
        else (phases.index(p.phase) < phases.index(other.phase))
    )
    if wrong:
        site = declaration_site(type(p), kind)
        raise PipelineError(
            f"'{p.name}' says {kind} '{other.name}' ({site}), but its phase {p.phase.value} runs on the other side "
            f"of phase {other.phase.value}"
        )


def _sort(items: list[Item], declared: list[Declared]) -> list[Item]:
    """Lexicographically smallest topological order of the items of one phase."""
    owner = {p.name: i for i, item in enumerate(items) for p in _passes_of(item)}
    graph = nx.DiGraph()
    graph.add_nodes_from(range(len(items)))
    for d in declared:
        if d.earlier in owner and d.later in owner and owner[d.earlier] != owner[d.later]:
            graph.add_edge(owner[d.earlier], owner[d.later], declared=d)
    label = [_passes_of(item)[0].name for item in items]
    try:
        order = list(nx.lexicographical_topological_sort(graph, key=lambda i: label[i]))
    except nx.NetworkXUnfeasible:
        raise PipelineError(_cycle_message(graph)) from None
    return [_sort_inside(items[i], declared) for i in order]


def _sort_inside(item: Item, declared: list[Declared]) -> Item:
    if not isinstance(item, Repeat):
        return item
    inner = _sort(list(item.passes), declared)
    return Repeat(tuple(p for p in inner if isinstance(p, Pass)), item.limit)


def _cycle_message(graph: nx.DiGraph) -> str:
    edges = [graph.edges[u, v]["declared"] for u, v in nx.find_cycle(graph)]
    width = max(len(d.later) for d in edges)
    other = max(len(d.earlier) for d in edges)
    where = max(len(str(d.site)) for d in edges)
    lines = [f"  {d.later:{width}}  must follow  {d.earlier:{other}}  {d.site!s:{where}}  {d.text}" for d in edges]
    return (
        "these passes cannot be ordered\n" + "\n".join(lines)
        + f"\nRemove one of these declarations, or split {edges[0].later} in two."
    )  # fmt: skip
