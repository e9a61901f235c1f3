"""What a running pass may ask of the compiler, and say to it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import sympy
from torch import fx

from ..graph.phases import Role, Vocabulary
from ..graph.provenance import Origin, Site, inherit, line_of
from ..graph.shapes import expression
from .pass_base import Pass
from .remarks import Remark, RemarkKind


class RewriteLimit(Exception):
    """Ends a pass early: bisection allowed it no further rewrites."""


@dataclass(frozen=True)
class Rewrite:
    """One edit of a pass, as it happened. Names are those of the graph at that moment."""

    rule: str
    site: str
    sources: tuple[str, ...]
    removed: tuple[str, ...]
    added: tuple[str, ...]


@dataclass(frozen=True)
class Obstacle:
    """Why a pattern did not match here."""

    kind: str  # op, literal, escape, dtype, shape, barrier, when, insert
    text: str
    node: str = ""
    hint: str = ""


@dataclass(frozen=True)
class NearMiss:
    """A place where a rule almost applied."""

    rule: str
    site: str
    node: str
    line: Any  # UserLine | None
    matched: int
    total: int
    obstacles: tuple[Obstacle, ...]


@dataclass
class Context:
    """Handed to `Pass.run`. Holds the state of this one run; passes keep none of their own."""

    pass_: Pass
    role: Role
    target: str
    options: Any
    graph: fx.Graph
    words: Vocabulary
    examples: Any = None  # the caller's own inputs, where they are known at compile time; a list or None
    explaining: bool = False  # rules look for near misses only when somebody will read them
    limit: int | None = None  # at most this many rewrites (bisection)
    on_rewrite: Callable[[Rewrite], None] | None = None
    refresh: Callable[[], None] = lambda: None  # describe new values now; raises VerifyError at one that cannot be
    rewrites: list[Rewrite] = field(default_factory=list)
    near_misses: list[NearMiss] = field(default_factory=list)
    remarks: list[Remark] = field(default_factory=list)
    savings: dict[str, sympy.Expr] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)  # texts for the reader of a dump, by file name
    timeline: dict[str, Any] | None = None  # when things run by estimate, as timeline.py draws it
    parts: dict[str, float] = field(default_factory=dict)  # CPU seconds by part of the pass
    at: fx.Node | None = None  # where the pass is working; names the culprit when it raises

    @property
    def log(self) -> logging.Logger:
        return logging.getLogger(f"turbogr_compile.passes.{self.pass_.name}")

    @contextmanager
    def rewrite(self, rule: str, *sources: fx.Node, site: Site | str | None = None) -> Iterator[None]:
        """One edit. Nodes made inside descend from `sources`; the graph must be whole again at the end."""
        if self.limit is not None and len(self.rewrites) >= self.limit:
            raise RewriteLimit
        order = {n: i for i, n in enumerate(self.graph.nodes)}
        came_from = sorted(sources, key=lambda n: order.get(n, -1))
        self.at = came_from[-1] if came_from else self.at
        # Keep the sources' identity: they may be erased inside the body.
        names = tuple(n.name for n in came_from)
        before = dict.fromkeys(self.graph.nodes)
        names_before = {n: n.name for n in before}
        yield
        after = dict.fromkeys(self.graph.nodes)
        added = [n for n in after if n not in before]
        origin = Origin(self.pass_.name, rule, names)
        for node in added:
            inherit(node, came_from, origin)
        done = Rewrite(
            rule=rule,
            site=str(site or self.pass_.site()),
            sources=names,
            removed=tuple(names_before[n] for n in before if n not in after),
            added=tuple(n.name for n in added),
        )
        self.rewrites.append(done)
        if self.on_rewrite is not None:
            self.on_rewrite(done)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """A part of the pass, for whoever wants to know where the time of compiling goes."""
        began = time.process_time()
        try:
            yield
        finally:
            self.parts[name] = self.parts.get(name, 0.0) + time.process_time() - began

    def missed(self, id: str, text: str, node: fx.Node | None = None, hint: str = "") -> None:
        """Say that an optimisation did not apply at `node`, and why."""
        self._remark(RemarkKind.MISSED, id, text, node, hint)

    def applied(self, id: str, text: str, node: fx.Node | None = None) -> None:
        self._remark(RemarkKind.APPLIED, id, text, node, "")

    def analysis(self, id: str, text: str, node: fx.Node | None = None) -> None:
        self._remark(RemarkKind.ANALYSIS, id, text, node, "")

    def _remark(self, kind: RemarkKind, id: str, text: str, node: fx.Node | None, hint: str) -> None:
        line = line_of(node) if node is not None else None
        name = node.name if node is not None else ""
        self.remarks.append(Remark(kind, id, self.pass_.name, text, line, name, hint))

    def saved(self, **amounts: Any) -> None:
        """Add to what this pass saves, e.g. `ctx.saved(padding=b * n - total)`; symbolic sizes welcome."""
        for what, amount in amounts.items():
            self.savings[what] = self.savings.get(what, sympy.Integer(0)) + expression(amount)

    def note(self, name: str, text: Callable[[], str]) -> None:
        """Leave a text beside the dump of this pass; written only when somebody will read it."""
        if self.explaining:
            self.notes[name] = text()

    def hint(self, size: Any) -> int | None:
        """A number for a symbolic size, where the compiler has seen one; never adds a guard."""
        if isinstance(size, int):
            return size
        node = getattr(size, "node", None)
        return int(node.hint) if node is not None and node.has_hint() else None
