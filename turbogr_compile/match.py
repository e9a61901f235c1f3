"""Finding where a rule applies, and saying why where it almost does.

One algorithm does both. It walks pattern and graph together from the outputs down and carries a small beam of
states. Looking for matches, a state with an obstacle is dropped; explaining, obstacles are collected and the best
attempts are ranked.

A place is found in two steps. First by structure: the pattern, traced once on generic tensors, gives the ops, and
binds holes and literals; other literals and sizes do not count. Then strictly: the pattern is traced again on
the very tensors that were bound, and everything must agree: ops, literals, and sizes by proof. Ranks and dims are
right by construction.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from . import normal
from ._torch import mutated_arguments, shape_env_of
from .context import NearMiss, Obstacle
from .errors import PassError, TurbogrError
from .pass_base import Phase
from .provenance import Origin, UserLine, line_of
from .shapes import TensorSpec, known, same_literal, same_shape, same_size, trying, without_autocast
from .text import dtype_text, target_text, type_text, value_text

if TYPE_CHECKING:
    from .rule import Rule, Spelling

Path = tuple[Any, ...]  # argument name, then positions inside nested lists

BEAM = 16
NEAR_MISSES_PER_RULE = 3

aten = torch.ops.aten
# Tried in both orders. Order is not part of the normal form, because it carries no structure.
COMMUTATIVE = frozenset({
    aten.add.Tensor, aten.mul.Tensor, aten.maximum.default, aten.minimum.default, aten.eq.Tensor, aten.ne.Tensor,
    aten.logical_and.default, aten.logical_or.default, aten.bitwise_and.Tensor, aten.bitwise_or.Tensor,
})  # fmt: skip
# Their size argument says no more than the shape of the result, and may hold a -1.
_SHAPED_BY_RESULT: dict[Any, str] = {
    aten.reshape.default: "shape", aten.view.default: "size", aten.expand.default: "size",
}  # fmt: skip
_MODE_CHANGES = frozenset({"_enter_autocast", "_exit_autocast", "_set_grad_enabled"})
_SCALARS = (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool)


# --- the pattern as a graph ----------------------------------------------------------------------


def is_value(argument: Any) -> bool:
    """A node that computes tensors; sizes and numbers computed in the graph count as literals."""
    return isinstance(argument, fx.Node) and not isinstance(argument.meta.get("val"), _SCALARS)


def holds_values(argument: Any) -> bool:
    if isinstance(argument, (list, tuple)):
        return any(holds_values(a) for a in argument)
    return is_value(argument)


@lru_cache(maxsize=1024)
def _parameters(target: Any) -> tuple[tuple[str, Any], ...]:
    return tuple((a.name, a.default_value) for a in target._schema.arguments)


def arguments(node: fx.Node) -> dict[str, Any]:
    """Every argument by name, defaults filled in from the schema."""
    if not hasattr(node.target, "_schema"):
        return {str(i): a for i, a in enumerate(node.args)} | dict(node.kwargs)
    parameters = _parameters(node.target)
    given = {name: value for (name, _), value in zip(parameters, node.args, strict=False)} | dict(node.kwargs)
    return {name: given.get(name, default) for name, default in parameters}


def literals(node: fx.Node) -> Iterator[tuple[Path, Any]]:
    """The arguments that are not tensors, with where they are."""

    def walk(path: Path, value: Any) -> Iterator[tuple[Path, Any]]:
        if isinstance(value, (list, tuple)):
            for i, v in enumerate(value):
                yield from walk((*path, i), v)
        elif not is_value(value):
            yield path, value

    for name, value in arguments(node).items():
        yield from walk((name,), value)


@dataclass(frozen=True, eq=False)
class Pattern:
    """A traced function: what to look for.

    `positions` says where literal holes sit. A strict pattern, traced on the tensors of one place, compares every
    literal; a generic one only binds the holes.
    """

    module: fx.GraphModule
    positions: dict[tuple[fx.Node, Path], str] = field(default_factory=dict)
    strict: bool = False
    example: dict[str, Any] = field(default_factory=dict)  # values of the literals it was traced with

    @cached_property
    def inputs(self) -> tuple[fx.Node, ...]:
        return tuple(n for n in self.module.graph.nodes if n.op == "placeholder")

    @cached_property
    def outputs(self) -> tuple[Any, ...]:
        result = self.module.graph.output_node().args[0]
        return tuple(result) if isinstance(result, (list, tuple)) else (result,)

    @cached_property
    def cones(self) -> dict[fx.Node, frozenset[fx.Node]]:
        """For each op, itself and every op it is computed from."""
        cones: dict[fx.Node, frozenset[fx.Node]] = {}
        for node in self.module.graph.nodes:
            if node.op == "call_function" and is_value(node):
                below = (cones[n] for n in node.all_input_nodes if n in cones)
                cones[node] = frozenset({node}).union(*below)
        return cones

    @cached_property
    def ops(self) -> frozenset[fx.Node]:
        return frozenset().union(*(self.cones.get(o, ()) for o in self.outputs))

    @cached_property
    def required(self) -> frozenset[Any]:
        return frozenset(n.target for n in self.ops)

    @cached_property
    def sinks(self) -> tuple[fx.Node, ...]:
        """Outputs that no other output is computed from; the largest first, from which matching starts."""
        outputs = [o for o in dict.fromkeys(self.outputs) if o in self.cones]
        top = [o for o in outputs if not any(o in self.cones[p] for p in outputs if p is not o)]
        return tuple(sorted(top, key=lambda o: -len(self.cones[o])))

    def skeleton(self) -> list[Any]:
        """What the generic step compares; equal skeletons find the same places."""
        place = {n: i for i, n in enumerate(self.module.graph.nodes)}
        named = {(place[n], path): name for (n, path), name in self.positions.items()}
        ops = sorted(self.ops)
        nodes = [(place[n], n.target, [place[a] for a in n.all_input_nodes]) for n in ops]
        return [nodes, sorted(named.items(), key=str), [place.get(o) for o in self.outputs]]


def trace_holes(
    fn: Callable[..., Any], values: list[torch.Tensor], which: Sequence[int], bound: dict[str, Any], phase: Phase
) -> fx.GraphModule:
    """Trace `fn`, whose tensor hole i is `values[which[i]]`; one tensor may fill several holes."""
    seen: set[int] = set()
    distinct = []
    for value in values:
        # Two nodes may share one fake tensor; a tracer tells its inputs apart by identity.
        distinct.append(value.detach() if id(value) in seen else value)
        seen.add(id(value))
    with without_autocast():  # of the code that is being compiled; a rule says its own casts
        return normal.trace(lambda *tensors: fn(*(tensors[i] for i in which), **bound), distinct, phase)


# --- walking pattern and graph together ----------------------------------------------------------


@dataclass(frozen=True)
class State:
    """A partial match."""

    nodes: dict[fx.Node, fx.Node] = field(default_factory=dict)  # pattern node → graph node
    literals: dict[str, Any] = field(default_factory=dict)
    obstacles: tuple[Obstacle, ...] = ()

    @property
    def rank(self) -> tuple[int, int]:
        return len(self.obstacles), -len(self.nodes)


def _best(states: Iterable[State]) -> list[State]:
    return sorted(states, key=lambda s: s.rank)[:BEAM]


class Matcher:
    """Extends states so that they cover more of a pattern. `soft` keeps going past obstacles."""

    def __init__(self, pattern: Pattern, types: dict[str, type], soft: bool) -> None:
        self.pattern, self.types, self.soft = pattern, types, soft

    def match(self, pairs: Iterable[tuple[Any, Any]], state: State) -> list[State]:
        """States in which each pattern value is found at its graph value; best first."""
        states = [state]
        for wanted, found in pairs:
            states = self._each(states, partial(self._value, wanted=wanted, found=found, user=None))
        return states

    def _each(self, states: list[State], step: Callable[[State], list[State]]) -> list[State]:
        return _best(after for s in states for after in step(s))

    def _no(self, state: State, obstacle: Callable[[], Obstacle]) -> list[State]:
        """In strict mode the text is never made."""
        return [replace(state, obstacles=(*state.obstacles, obstacle()))] if self.soft else []

    def _value(self, state: State, wanted: Any, found: Any, user: fx.Node | None) -> list[State]:
        if not is_value(found):
            return self._no(state, lambda: _wrong_op(wanted, found, user))
        if wanted in state.nodes:
            if state.nodes[wanted] is found:
                return [state]
            return self._no(state, lambda: _not_shared(wanted, state.nodes[wanted], found))
        if wanted.op == "placeholder" and isinstance(found.meta.get("val"), (list, tuple)):
            return self._no(state, lambda: _wrong_op(wanted, found, user))
        if wanted.op != "placeholder" and (found.op != wanted.op or found.target != wanted.target):
            return self._no(state, lambda: _wrong_op(wanted, found, user))
        state = replace(state, nodes={**state.nodes, wanted: found})
        return [state] if wanted.op == "placeholder" else self._arguments(state, wanted, found)

    def _arguments(self, state: State, wanted: fx.Node, found: fx.Node) -> list[State]:
        theirs = arguments(found)
        states = self._in_order(state, wanted, found, theirs)
        if wanted.target in COMMUTATIVE and theirs.get("alpha", 1) == 1:
            first, second, *rest = theirs
            swapped = {first: theirs[second], second: theirs[first], **{k: theirs[k] for k in rest}}
            states = _best([*states, *self._in_order(state, wanted, found, swapped)])
        return states

    def _in_order(self, state: State, wanted: fx.Node, found: fx.Node, theirs: dict[str, Any]) -> list[State]:
        states = [state]
        for name, ours in arguments(wanted).items():
            if self.pattern.strict and _SHAPED_BY_RESULT.get(wanted.target) == name:
                step = partial(self._result_shape, wanted=wanted, found=found)
            else:
                step = partial(self._argument, wanted=ours, found=theirs.get(name), at=(wanted, found, (name,)))
            states = self._each(states, step)
        return states

    def _argument(self, state: State, wanted: Any, found: Any, at: tuple[fx.Node, fx.Node, Path]) -> list[State]:
        op, user, path = at
        if is_value(wanted):
            return self._value(state, wanted, found, user)
        if isinstance(wanted, (list, tuple)) and (holds_values(wanted) or self._holds_literal(op, path)):
            if not isinstance(found, (list, tuple)) or len(found) != len(wanted):
                return self._no(state, lambda: _wrong_count(wanted, found, user))
            states = [state]
            for i, (w, f) in enumerate(zip(wanted, found, strict=True)):
                states = self._each(states, partial(self._argument, wanted=w, found=f, at=(op, user, (*path, i))))
            return states
        if holds_values(found):
            return self._no(state, lambda: _wrong_op(wanted, found, user))
        name = self.pattern.positions.get((op, path))
        if name is not None:
            return self._bind(state, name, found, user)
        # Which result of a tuple is taken is structure, not a number.
        if (self.pattern.strict or not hasattr(op.target, "_schema")) and not same_literal(
            literal_of(wanted), literal_of(found)
        ):
            return self._no(state, lambda: _wrong_literal(wanted, found, user))
        return [state]

    def _holds_literal(self, op: fx.Node, path: Path) -> bool:
        return any(n is op and p[: len(path)] == path for n, p in self.pattern.positions)

    def _result_shape(self, state: State, wanted: fx.Node, found: fx.Node) -> list[State]:
        ours, theirs = wanted.meta["val"], found.meta["val"]
        if same_shape(ours.shape, theirs.shape):
            return [state]
        return self._no(state, lambda: _wrong_shape(ours, theirs, found))

    def _bind(self, state: State, name: str, found: Any, user: fx.Node) -> list[State]:
        found = literal_of(found)
        if self.types[name] is int and isinstance(found, float) and found.is_integer():
            found = int(found)  # the normal form writes whole numbers as floats where they meet floats
        if not _is_a(found, self.types[name]):
            return self._no(state, lambda: _not_a_literal(name, self.types[name], found, user))
        if name in state.literals and not same_literal(state.literals[name], found):
            return self._no(state, lambda: _two_values(name, state.literals[name], found, user))
        return [replace(state, literals={name: found, **state.literals})]


def literal_of(argument: Any) -> Any:
    """A literal argument as a number; sizes computed by nodes are read from their metadata."""
    if isinstance(argument, (list, tuple)):
        return [literal_of(a) for a in argument]
    return argument.meta.get("val") if isinstance(argument, fx.Node) else argument


def _is_a(value: Any, wanted: type) -> bool:
    if wanted is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return isinstance(value, wanted) and isinstance(value, bool) == (wanted is bool)


# --- a place where a rule applies, or might ------------------------------------------------------


class _Refused(Exception):
    """Ends `when` at its first unmet requirement, where nobody asked for all of them."""


class Match:
    """What a rule found. `m.x` is the fake tensor bound to hole x, `m.eps` a bound literal."""

    def __init__(self, rule: Rule, pattern: Pattern, state: State, holes: dict[str, fx.Node], soft: bool) -> None:
        self.rule, self._pattern, self._state, self._holes, self._soft = rule, pattern, state, holes, soft
        self.literals = state.literals
        self.outputs = tuple(state.nodes[o] for o in pattern.outputs)
        self.nodes = tuple(sorted({state.nodes[o] for o in pattern.ops}))
        self.refusals: list[Obstacle] = []

    def __getattr__(self, name: str) -> Any:
        values = self.__dict__
        if name in values.get("_holes", ()):
            return values["_holes"][name].meta["val"]
        if name in values.get("literals", ()):
            return values["literals"][name]
        rule = values["rule"]
        raise AttributeError(f"rule '{rule.name}' has no hole {name!r}; it has {', '.join(rule.holes)}")

    def node(self, hole: str) -> fx.Node:
        return self._holes[hole]

    @property
    def inputs(self) -> tuple[fx.Node, ...]:
        """Nodes bound to the tensor holes, in the order of the pattern's parameters."""
        return tuple(self._holes[name] for name in self.rule.tensors)

    def require(self, condition: Any, reason: str | Callable[[], str], *values: Any, hint: str = "") -> None:
        """Refuse here unless `condition` is true (a symbolic one: provably). The reason is for the model's author;
        `values` fill its {} only when somebody reads it."""
        if known(condition):
            return
        if not self._soft:
            raise _Refused
        text = reason() if callable(reason) else reason.format(*values) if values else reason
        self.refusals.append(Obstacle("when", text, self.outputs[-1].name, hint))

    def obstacles(self) -> Iterator[Obstacle]:
        """Everything but the structure that forbids the rewrite here."""
        surprises = bool(self._state.obstacles)
        for check in (_declared_inputs, _result_dtypes, _escapes, _barriers):
            for obstacle in check(self):
                surprises = True
                yield obstacle
        yield from self._unmet(surprises)
        if self.insertion_point() is None:
            yield _no_insertion_point(self)

    def _unmet(self, surprises: bool) -> Iterator[Obstacle]:
        """What `when` refuses. It may rely on what the rule declares, so it may break where that does not hold."""
        for predicate in self.rule.predicates:
            try:
                predicate(self)
            except _Refused:
                yield Obstacle("when", "")
            except TurbogrError:
                raise
            except Exception as error:
                if not self.refusals and not surprises:
                    where = self.outputs[-1]
                    raise PassError(
                        f"rule '{self.rule.name}' ({self.rule.site}): `when` raised {type(error).__name__}: {error}",
                        node=where.name, line=str(line_of(where) or ""),
                    ) from error  # fmt: skip
        yield from self.refusals

    def insertion_point(self) -> fx.Node | None:
        """The node to insert before: after the last input, not after the first user; None where there is none."""
        users = [u for o in self.outputs for u in o.users if u not in self.nodes]
        point = min([*users, max(self.outputs)])
        return point if max(self.inputs) < point else None


def _declared_inputs(m: Match) -> Iterator[Obstacle]:
    """What `inputs=` says about dtypes, ranks and sizes."""
    if m.rule.inputs is None:
        return
    seen: dict[str, tuple[Any, str, int]] = {}
    for name, spec in zip(m.rule.tensors, m.rule.inputs, strict=True):
        node, value = m.node(name), getattr(m, name)
        if value.dtype not in spec.dtypes:
            yield Obstacle(
                "dtype", f"`{name}` must be {spec.token}, %{node.name} is {dtype_text(value.dtype)}", node.name,
                f"cast it to {dtype_text(spec.dtypes[0])} before, or leave this place as it is",
            )  # fmt: skip
        if len(value.shape) < len(spec.dims) or (len(value.shape) > len(spec.dims) and not spec.open):
            yield Obstacle("shape", f"`{name}` must be {spec}, %{node.name} is {type_text(value)}", node.name)
            continue
        yield from _declared_sizes(name, spec, node, value, seen)


def _declared_sizes(
    name: str, spec: TensorSpec, node: fx.Node, value: torch.Tensor, seen: dict[str, tuple[Any, str, int]]
) -> Iterator[Obstacle]:
    offset = len(value.shape) - len(spec.dims)
    for i, dim in enumerate(spec.dims, offset):
        size = value.shape[i]
        if not dim.name:
            if not same_size(size, dim.size):
                yield Obstacle("shape", f"dim {i} of `{name}` must be {dim.size}, %{node.name} has {size}", node.name)
            continue
        other, where, at = seen.setdefault(dim.name, (size, name, i))
        if not same_size(size, other):
            yield Obstacle(
                "shape", f"{where}.shape[{at}] == {name}.shape[{i}] is not provable: {other} vs {size}", node.name,
                "give both the same size variable, or assert the equality with torch._check",
            )  # fmt: skip


def _result_dtypes(m: Match) -> Iterator[Obstacle]:
    """An int where the pattern has an equal float may change the dtype of the result."""
    for wanted, found in zip(m._pattern.outputs, m.outputs, strict=True):
        ours, theirs = wanted.meta["val"].dtype, found.meta["val"].dtype
        if ours != theirs:
            yield Obstacle("dtype", f"gives {dtype_text(theirs)}, the rule {dtype_text(ours)}", found.name)


def _escapes(m: Match) -> Iterator[Obstacle]:
    for node in m.nodes:
        others = [u for u in node.users if u not in m.nodes]
        is_output = node in m.outputs
        if node in m.inputs and (is_output or not m.rule.recompute):
            text = f"%{node.name} is computed by the pattern and also an input of it"
        elif others and not is_output and not m.rule.recompute:
            named = "returned" if others[0].op == "output" else f"used by %{others[0].name}"
            at = line_of(others[0])
            text = f"%{node.name} is also {named}" + (f" at {at.where}" if at else "")
        else:
            continue
        yield Obstacle(
            "escape", text, node.name,
            "drop that use; or let the rule return this value, or say recompute=True",
        )  # fmt: skip


def _barriers(m: Match) -> Iterator[Obstacle]:
    """What lies between the first and the last matched op, and may not be moved over."""
    first, last = m.nodes[0], m.nodes[-1]
    reads = {storage(n) for n in (*m.inputs, *m.nodes)}
    node = first.next
    while node is not last and first is not last:
        if node not in m.nodes:
            changes_mode = getattr(node.target, "__name__", "") in _MODE_CHANGES
            writes = any(storage(n) in reads for a in mutated_arguments(node) for n in _nodes_in(a))
            if changes_mode or writes:
                at = line_of(node)
                yield Obstacle(
                    "barrier",
                    f"{target_text(node)}{f' at {at.where}' if at else ''} lies between %{first.name} and %{last.name}",
                    node.name,
                    "move it before or after the whole expression",
                )
        node = node.next


def _nodes_in(argument: Any) -> list[fx.Node]:
    if isinstance(argument, (list, tuple)):
        return [n for a in argument for n in _nodes_in(a)]
    return [argument] if isinstance(argument, fx.Node) else []


def storage(node: fx.Node) -> fx.Node:
    """The node that owns the memory `node` shows a view of."""
    while (schema := getattr(node.target, "_schema", None)) is not None:
        aliased = [a.name for a in schema.arguments if a.alias_info is not None]
        if not aliased or not any(r.alias_info is not None for r in schema.returns):
            break
        base = arguments(node)[aliased[0]]
        if not isinstance(base, fx.Node):
            break
        node = base
    return node


def _no_insertion_point(m: Match) -> Obstacle:
    users = min(u for o in m.outputs for u in o.users if u not in m.nodes)
    late = max(m.inputs)
    return Obstacle(
        "insert", f"input %{late.name} is computed after %{users.name} already reads a result", late.name,
        "compute the inputs before the first result is used",
    )  # fmt: skip


# --- searching a graph ---------------------------------------------------------------------------


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
        """Half of the ops, and more than one op that merely happens to be of the right kind."""
        return 2 * self.matched >= self.total and (self.matched > 1 or self.matched == self.total)


class Search:
    """Matches and near misses of rules in one graph."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self._env = shape_env_of(graph)
        self._traced: dict[Any, Pattern | Obstacle] = {}

    def matches(self, rule: Rule) -> Iterator[Match]:
        """Every place where the rule applies, one after the other; the graph may change in between."""
        present = Counter(n.target for n in self.graph.nodes if n.op == "call_function")
        for spelling in rule.spellings:
            for pattern in spelling.patterns:
                if not pattern.required <= present.keys():
                    continue
                for node in self._found(pattern.sinks[0]):
                    # Rewrites made meanwhile may have taken the node away.
                    found = None if node._erased else self._first(rule, spelling, pattern, node)
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
                return [replace(s, obstacles=(*s.obstacles, _no_other_output(sink, s))) for s in states]
            states = _best(after for s, other in tries for after in matcher.match([(sink, other)], s))
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
                    exact = spelling.trace_on(values, which, literals)
                computes = all(o in exact.cones for o in exact.outputs)
                self._traced[key] = exact if computes else _does_nothing(nodes)
            except TurbogrError:
                raise
            except Exception as error:
                self._traced[key] = _does_not_fit(error, nodes)
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
            for pattern in spelling.patterns:
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
            yield _attempt(pattern, replace(state, obstacles=(*state.obstacles, _ends_early(anchor, at))), at)
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


# --- obstacles, in words for the model's author --------------------------------------------------


def _wanted_text(wanted: Any) -> str:
    if isinstance(wanted, fx.Node):
        return "a tensor" if wanted.op == "placeholder" else target_text(wanted)
    return value_text(wanted)


def _found_text(found: Any) -> str:
    if isinstance(found, fx.Node) and found.op == "call_function":
        return target_text(found)
    return f"input {value_text(found)}" if isinstance(found, fx.Node) else value_text(found)


def _wrong_op(wanted: Any, found: Any, user: fx.Node | None) -> Obstacle:
    node = found if isinstance(found, fx.Node) and found.op == "call_function" else user
    return Obstacle(
        "op", f"wants {_wanted_text(wanted)}, found {_found_text(found)}", node.name if node is not None else "",
        "spell it as the rule does, or give the rule this spelling as a variant",
    )  # fmt: skip


def _wrong_count(wanted: Any, found: Any, user: fx.Node) -> Obstacle:
    theirs = len(found) if isinstance(found, (list, tuple)) else 1
    return Obstacle("op", f"wants {len(wanted)} values, found {theirs}", user.name)


def _not_shared(wanted: fx.Node, bound: fx.Node, found: fx.Node) -> Obstacle:
    what = f"`{wanted.name}`" if wanted.op == "placeholder" else target_text(wanted)
    return Obstacle(
        "op", f"wants %{bound.name} again for {what}, found %{found.name}", found.name,
        "use the same value in both places",
    )  # fmt: skip


def _wrong_literal(wanted: Any, found: Any, user: fx.Node) -> Obstacle:
    return Obstacle(
        "literal", f"wants {value_text(literal_of(wanted))}, found {value_text(literal_of(found))}", user.name,
        "use the rule's value, or declare it a keyword-only parameter of the rule to accept any",
    )  # fmt: skip


def _not_a_literal(name: str, wanted: type, found: Any, user: fx.Node) -> Obstacle:
    return Obstacle("literal", f"`{name}` must be a constant {wanted.__name__}, found {value_text(found)}", user.name)


def _two_values(name: str, first: Any, second: Any, user: fx.Node) -> Obstacle:
    return Obstacle(
        "literal", f"`{name}` is {value_text(first)} and {value_text(second)}", user.name,
        "use one value in both places",
    )  # fmt: skip


def _wrong_shape(ours: torch.Tensor, theirs: torch.Tensor, found: fx.Node) -> Obstacle:
    return Obstacle("shape", f"wants {type_text(ours)}, found {type_text(theirs)}", found.name)


def _does_not_fit(error: Exception, nodes: list[fx.Node]) -> Obstacle:
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    _, guarded, guard = first.partition("guards are frozen: ")
    why = f"it would need {guard.removesuffix(' == True')}, which is not provable" if guarded else first
    shapes = ", ".join(f"%{n.name}: {type_text(n.meta['val'])}" for n in dict.fromkeys(nodes))
    return Obstacle("shape", f"the pattern does not fit {shapes}: {why}", nodes[0].name)


def _does_nothing(nodes: list[fx.Node]) -> Obstacle:
    shapes = ", ".join(f"%{n.name}: {type_text(n.meta['val'])}" for n in dict.fromkeys(nodes))
    return Obstacle("shape", f"on {shapes} the pattern returns its input", nodes[0].name)


def _no_other_output(sink: fx.Node, state: State) -> Obstacle:
    at = max(state.nodes.values())
    return Obstacle("op", f"wants {target_text(sink)} as a further result, found none", at.name)


def _ends_early(anchor: fx.Node, at: fx.Node) -> Obstacle:
    wanted = next(iter(anchor.users))
    users = ", ".join("the graph's output" if u.op == "output" else target_text(u) for u in at.users) or "nothing"
    return Obstacle(
        "op", f"wants {target_text(wanted)} on the result, found {users}", at.name,
        "spell it as the rule does, or give the rule this spelling as a variant",
    )  # fmt: skip
