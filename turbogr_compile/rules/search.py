"""Searching a graph for the places where a rule applies, and ranking those where it almost does.

A place is found in two steps. First by structure: the pattern, traced once on generic tensors, gives the ops, and
binds holes and literals; other literals and sizes do not count. Then strictly: the pattern is traced again on
the very tensors that were bound, and everything must agree: ops, literals, and sizes by proof. Ranks and dims are
right by construction.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from .._torch import is_erased, shape_env_of, trying
from ..errors import PassError, TurbogrError
from ..graph.phases import Vocabulary
from ..graph.provenance import Origin, UserLine, line_of
from ..pipeline.context import NearMiss, Obstacle
from .match import Match, Matcher, State, best
from .obstacles import does_not_fit, does_nothing, ends_early, no_other_output
from .pattern import Pattern

if TYPE_CHECKING:
    from .rule import Rule, Spelling

NEAR_MISSES_PER_RULE = 3


@dataclass(frozen=True)
class Attempt:
    """How far a rule got at one place."""

    nodes: frozenset[fx.Node]
    at: fx.Node
    matched: int
    total: int
    obstacles: tuple[Obstacle, ...]

    @property
    def rank(self) -> tuple[float, int, fx.Node]:
        return -self.matched / self.total, len(self.obstacles), self.at

    @property
    def worth_telling(self) -> bool:
        """Half of the ops, and more than an op, or two of one kind, that merely happen to be there."""
        alike = self.total > 1 and len({n.target for n in self.nodes}) == 1
        by_chance = alike and (
            self.matched == 1 or len(self.obstacles) > 1 or any(o.kind == "op" for o in self.obstacles)
        )
        differing = sum(o.kind in ("op", "literal") for o in self.obstacles)
        far_off = 2 * self.matched < self.total or 2 * differing > self.matched + 1
        return not far_off and not by_chance


class Search:
    """Matches and near misses of rules in one graph."""

    def __init__(self, graph: fx.Graph, words: Vocabulary) -> None:
        self.graph, self.words = graph, words
        self._env = shape_env_of(graph)
        self._traced: dict[Any, Pattern | Obstacle] = {}

    def matches(self, rule: Rule) -> Iterator[Match]:
        """Every place where the rule applies, one after the other; the graph may change in between."""
        present = Counter(n.target for n in self.graph.nodes if n.op == "call_function")
        for spelling in rule.spellings:
            if not spelling.may_occur(self.words, present):
                continue
            for pattern in spelling.patterns(self.words):
                if not pattern.required <= present.keys():
                    continue
                for node in self._found(pattern.sinks[0]):
                    # Rewrites made meanwhile may have taken the node away.
                    found = None if is_erased(node) else self._first(rule, spelling, pattern, node)
                    if found is not None:
                        yield found

    def _found(self, wanted: fx.Node) -> list[fx.Node]:
        return list(self.graph.find_nodes(op="call_function", target=wanted.target))

    def _first(self, rule: Rule, spelling: Spelling, pattern: Pattern, node: fx.Node) -> Match | None:
        for state in self._by_structure(rule, pattern, pattern.sinks[0], node, soft=False):
            for match in self._strictly(rule, spelling, pattern, state, soft=False):
                if isinstance(match, Match) and next(match.obstacles(), None) is None:
                    return match
        return None

    def _by_structure(self, rule: Rule, pattern: Pattern, anchor: fx.Node, node: fx.Node, soft: bool) -> list[State]:
        matcher = Matcher(pattern, rule.literals, soft)
        states = matcher.match([(anchor, node)], State())
        if anchor is not pattern.sinks[0]:
            return states
        for sink in pattern.sinks[1:]:
            tries = [(s, other) for s in states for other in self._beside(s, sink)]
            if soft and not tries:
                return [replace(s, obstacles=(*s.obstacles, no_other_output(sink, s.nodes))) for s in states]
            states = best(after for s, other in tries for after in matcher.match([(sink, other)], s))
        return states

    def _beside(self, state: State, sink: fx.Node) -> Sequence[fx.Node]:
        """Where a further output may be: among the users of what is already bound, nearest to it first."""
        bound = [state.nodes[n] for n in sink.all_input_nodes if n in state.nodes]
        taken = set(state.nodes.values())
        near = [u for n in bound for u in n.users] if bound else self._found(sink)
        return [n for n in dict.fromkeys(near) if n.target == sink.target and n not in taken]

    def _strictly(
        self, rule: Rule, spelling: Spelling, pattern: Pattern, state: State, soft: bool
    ) -> Iterator[Match | tuple[Pattern, State]]:
        """The pattern traced on what was bound, compared in full; else how far which pattern got."""
        inputs = [state.nodes.get(p) for p in pattern.inputs]
        bound = [n for n in inputs if n is not None]
        if len(bound) < len(inputs) or state.literals.keys() != rule.literals.keys():
            yield pattern, state
            return
        exact = self._retrace(spelling, bound, state.literals)
        if isinstance(exact, Obstacle):
            yield pattern, replace(state, obstacles=(*state.obstacles, exact))
            return
        at = [state.nodes.get(p) for p in pattern.outputs]
        pairs = [(o, g) for o, g in zip(exact.outputs, at, strict=True) if g is not None]
        start = State(dict(zip(exact.inputs, dict.fromkeys(bound), strict=True)), state.literals)
        holes = dict(zip(rule.tensors, bound, strict=True))
        for found in Matcher(exact, rule.literals, soft).match(pairs, start):
            complete = len(pairs) == len(exact.outputs) and exact.ops <= found.nodes.keys()
            if complete and (soft or not found.obstacles):
                yield Match(rule, exact, found, holes, soft)
            elif soft and not found.obstacles:
                missing = next(o for o in exact.outputs if o not in found.nodes)
                yield exact, replace(found, obstacles=(no_other_output(missing, found.nodes),))
            else:
                yield exact, found

    def _retrace(self, spelling: Spelling, nodes: list[fx.Node], literals: dict[str, Any]) -> Pattern | Obstacle:
        distinct = list(dict.fromkeys(nodes))
        which = tuple(distinct.index(n) for n in nodes)
        values = [_tensor_of(n) for n in distinct]
        key = (id(spelling), which, tuple(_described(v) for v in values), tuple(sorted(literals.items())))
        if key not in self._traced:
            try:
                with trying(self._env):
                    exact = spelling.trace_on(values, which, literals, self.words)
                computes = all(o in exact.cones for o in exact.outputs)
                self._traced[key] = exact if computes else does_nothing(nodes)
            except TurbogrError:
                raise
            except Exception as error:
                self._traced[key] = does_not_fit(error, nodes)
        return self._traced[key]

    def near_misses(self, rule: Rule) -> list[NearMiss]:
        """The best attempts, one per place and per user line. Places where the rule applied are gone by now."""
        attempts = [a for a in self._attempts(rule) if a.obstacles and a.worth_telling]
        told: list[NearMiss] = []
        taken: set[fx.Node] = set()
        lines: set[tuple[str, int]] = set()
        for attempt in sorted(attempts, key=lambda a: a.rank):
            line = self._line(attempt)
            where = (line.file, line.line) if line else ("", -len(told))
            if len(told) == NEAR_MISSES_PER_RULE or taken & attempt.nodes or where in lines:
                continue
            taken |= attempt.nodes
            lines.add(where)
            told.append(
                NearMiss(
                    rule.name, str(rule.site), attempt.at.name, line, attempt.matched, attempt.total, attempt.obstacles
                )
            )
        return told

    def _line(self, attempt: Attempt) -> UserLine | None:
        """The line to look at: where the first obstacle is."""
        at = next((n for n in self.graph.nodes if n.name == attempt.obstacles[0].node), attempt.at)
        return line_of(at) or line_of(attempt.at)

    def _attempts(self, rule: Rule) -> Iterator[Attempt]:
        for spelling in rule.spellings:
            for pattern in spelling.patterns(self.words):
                anchors = [n for n in sorted(pattern.ops) if 2 * len(pattern.cones[n]) >= len(pattern.ops)]
                for anchor in anchors:
                    for node in self._found(anchor):
                        tries = self._by_structure(rule, pattern, anchor, node, soft=True)[:2]
                        made = [a for s in tries for a in self._assess(rule, spelling, pattern, anchor, s)]
                        made = [a for a in made if not _made_by(rule, a.nodes)]
                        yield from sorted(made, key=lambda a: a.rank)[:1]

    def _assess(
        self, rule: Rule, spelling: Spelling, pattern: Pattern, anchor: fx.Node, state: State
    ) -> Iterator[Attempt]:
        at = state.nodes.get(anchor)
        if at is None:
            return
        if anchor not in pattern.sinks:
            wanted = {u.target for u in anchor.users}
            if any(u.target in wanted for u in at.users):
                return  # more of the pattern is there; the attempt from further up says more
            yield _attempt(pattern, replace(state, obstacles=(*state.obstacles, ends_early(anchor, at))), at)
            return
        for found in self._strictly(rule, spelling, pattern, state, soft=True):
            if isinstance(found, Match):
                all_of_it = replace(found._state, obstacles=(*found._state.obstacles, *found.obstacles()))
                yield _attempt(found._pattern, all_of_it, at)
            else:
                yield _attempt(*found, at)


def _attempt(pattern: Pattern, state: State, at: fx.Node) -> Attempt:
    mapped = {p: g for p, g in state.nodes.items() if p in pattern.ops}
    obstacles = tuple(dict.fromkeys(state.obstacles))
    return Attempt(frozenset(mapped.values()), at, len(mapped), len(pattern.ops), obstacles)


def _made_by(rule: Rule, nodes: Iterable[fx.Node]) -> bool:
    origins = (n.meta.get("turbogr") for n in nodes)
    return any(isinstance(o, Origin) and o.rule == rule.name for o in origins)


def _tensor_of(node: fx.Node) -> torch.Tensor:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        at = str(line_of(node) or "")
        raise PassError(f"%{node.name} has no fake tensor in meta['val']", node=node.name, line=at)
    return value


def _described(value: torch.Tensor) -> tuple[Any, ...]:
    sizes = [d.node.expr if isinstance(d, torch.SymInt) else d for d in (*value.shape, *value.stride())]
    return value.dtype, value.device, value.requires_grad, tuple(sizes)
