"""Finding where a rule applies, and saying why where it almost does.

One algorithm does both. It walks pattern and graph together from the outputs down and carries a small beam of
states. Looking for matches, a state with an obstacle is dropped; explaining, obstacles are collected and the best
attempts are ranked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from .._torch import mutated_arguments
from ..errors import PassError, TurbogrError
from ..graph.provenance import line_of
from ..graph.shapes import TensorSpec, known, same_literal, same_shape, same_size
from ..graph.text import dtype_text, target_text, type_text
from ..pipeline.context import Obstacle
from .obstacles import not_a_literal, not_shared, two_values, wrong_count, wrong_literal, wrong_op, wrong_shape
from .pattern import Path, Pattern, arguments, holds_values, is_value, literal_of

if TYPE_CHECKING:
    from .rule import Rule

BEAM = 16

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


@dataclass(frozen=True)
class State:
    """A partial match."""

    nodes: dict[fx.Node, fx.Node] = field(default_factory=dict)  # pattern node → graph node
    literals: dict[str, Any] = field(default_factory=dict)
    obstacles: tuple[Obstacle, ...] = ()

    @property
    def rank(self) -> tuple[int, int]:
        return len(self.obstacles), -len(self.nodes)


def best(states: Iterable[State]) -> list[State]:
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
        return best(after for s in states for after in step(s))

    def _no(self, state: State, obstacle: Callable[[], Obstacle]) -> list[State]:
        """In strict mode the text is never made."""
        return [replace(state, obstacles=(*state.obstacles, obstacle()))] if self.soft else []

    def _value(self, state: State, wanted: Any, found: Any, user: fx.Node | None) -> list[State]:
        if not is_value(found):
            return self._no(state, lambda: wrong_op(wanted, found, user))
        if wanted in state.nodes:
            if state.nodes[wanted] is found:
                return [state]
            return self._no(state, lambda: not_shared(wanted, state.nodes[wanted], found))
        if wanted.op == "placeholder" and isinstance(found.meta.get("val"), (list, tuple)):
            return self._no(state, lambda: wrong_op(wanted, found, user))
        if wanted.op != "placeholder" and (found.op != wanted.op or found.target != wanted.target):
            return self._past(self._no(state, lambda: wrong_op(wanted, found, user)), wanted, found)
        state = replace(state, nodes={**state.nodes, wanted: found})
        return [state] if wanted.op == "placeholder" else self._arguments(state, wanted, found)

    def _past(self, states: list[State], wanted: fx.Node, found: fx.Node) -> list[State]:
        """Explaining, look behind an op that differs: where the same ops follow, it is the one thing in the way."""
        for w, f in zip(wanted.all_input_nodes, found.all_input_nodes, strict=False):
            if w.op == f.op == "call_function" and w.target == f.target:
                states = self._each(states, partial(self._value, wanted=w, found=f, user=found))
        return states

    def _arguments(self, state: State, wanted: fx.Node, found: fx.Node) -> list[State]:
        theirs = arguments(found)
        states = self._in_order(state, wanted, found, theirs)
        if wanted.target in COMMUTATIVE and theirs.get("alpha", 1) == 1:
            first, second, *rest = theirs
            swapped = {first: theirs[second], second: theirs[first], **{k: theirs[k] for k in rest}}
            states = best([*states, *self._in_order(state, wanted, found, swapped)])
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
                return self._no(state, lambda: wrong_count(wanted, found, user))
            states = [state]
            for i, (w, f) in enumerate(zip(wanted, found, strict=True)):
                states = self._each(states, partial(self._argument, wanted=w, found=f, at=(op, user, (*path, i))))
            return states
        if holds_values(found):
            return self._no(state, lambda: wrong_op(wanted, found, user))
        name = self.pattern.positions.get((op, path))
        if name is not None:
            return self._bind(state, name, found, user)
        # Which result of a tuple is taken is structure, not a number.
        if (self.pattern.strict or not hasattr(op.target, "_schema")) and not same_literal(
            literal_of(wanted), literal_of(found)
        ):
            return self._no(state, lambda: wrong_literal(wanted, found, user, state.literals))
        return [state]

    def _holds_literal(self, op: fx.Node, path: Path) -> bool:
        return any(n is op and p[: len(path)] == path for n, p in self.pattern.positions)

    def _result_shape(self, state: State, wanted: fx.Node, found: fx.Node) -> list[State]:
        ours, theirs = wanted.meta["val"], found.meta["val"]
        if same_shape(ours.shape, theirs.shape):
            return [state]
        return self._no(state, lambda: wrong_shape(ours, theirs, found))

    def _bind(self, state: State, name: str, found: Any, user: fx.Node) -> list[State]:
        found = literal_of(found)
        if self.types[name] is int and isinstance(found, float) and found.is_integer():
            found = int(found)  # the normal form writes whole numbers as floats where they meet floats
        if not _is_a(found, self.types[name]):
            return self._no(state, lambda: not_a_literal(name, self.types[name], found, user))
        if name in state.literals and not same_literal(state.literals[name], found):
            return self._no(state, lambda: two_values(name, state.literals[name], found, user))
        return [replace(state, literals={name: found, **state.literals})]


def _is_a(value: Any, wanted: type) -> bool:
    if wanted is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return isinstance(value, wanted) and isinstance(value, bool) == (wanted is bool)


# --- a place where a rule applies, or might ----------------------------------------------------------


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
