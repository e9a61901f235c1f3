"""What an `autograd.Function` is made of, as if its forward and its backward stood in the graph around it.

Dims of the bodies are axes of that graph. The function works row by row where each op of both bodies does, and the
gradient of a row is zero where that of its result is; what sums over rows, for the gradient of a weight, must add up
nothing but such zeros where rows are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from ... import _torch
from ...capture.functions import Bodies, bodies_of, is_zero
from ...capture.normal import normalize
from ...graph.phases import Phase
from ...graph.shapes import expression
from .axes import Typing
from .by_sequence import Operand, by_letters
from .calls import REPEATS, VIEWS, is_tensor, op, operand, rank_of, shape
from .rowwise import Rowwise
from .spaces import Space

aten = torch.ops.aten
_SIZES = {"sym_size", "sym_numel"}


@dataclass(frozen=True)
class Body:
    """One of the two, described in the sizes of the graph around it."""

    graph: fx.Graph
    typing: Typing
    inputs: list[fx.Node]
    output: Any  # nodes, and what is none

    @property
    def steps(self) -> list[fx.Node]:
        return [n for n in self.graph.nodes if n.op == "call_function"]

    def has_rows(self, node: Any, space: Space) -> bool:
        return is_tensor(node) and any(a in space.axes for a in self.typing.flat(node))

    def sizes(self, space: Space) -> dict[sympy.Symbol, tuple[int, int | None]]:
        """Inputs, and dims beside rows, from which sizes can be read."""
        found: dict[sympy.Symbol, tuple[int, int | None]] = {}
        for index, node in enumerate(self.inputs):
            if isinstance(node.meta["val"], torch.SymInt):
                found[expression(node.meta["val"])] = index, None
            dims = zip(self.typing.atoms(node), shape(node), strict=True) if is_tensor(node) else ()
            for dim, (atoms, size) in enumerate(dims):
                if isinstance(size, sympy.Symbol) and not set(atoms) & set(space.axes):
                    found.setdefault(size, (index, dim))
        return found


@dataclass(frozen=True)
class Function:
    """A call of a function: bodies with dims."""

    bodies: Bodies
    forward: Body  # its output: (what is returned, what is saved)
    backward: Body

    @property
    def results(self) -> list[fx.Node]:
        returned: Any = self.forward.output[0]
        return [returned] if isinstance(returned, fx.Node) else list(returned)

    @property
    def gradients(self) -> list[Any]:
        """Of the arguments."""
        return list(self.backward.output)


def function_of(t: Typing, n: fx.Node) -> Function | None:
    """The bodies of a call, their dims in the axes of the graph it stands in."""
    found = bodies_of(n.target)
    mode = _torch.fake_mode_of(n.graph)
    if found is None or mode is None or n.kwargs:
        return None
    try:
        forward = _body(found.forward, mode, t, n.args, t)
        returned, saved = forward.output
        results = [returned] if isinstance(returned, fx.Node) else list(returned)
        backward = _body(found.backward, mode, t, [*results, *saved], forward.typing)
    except Exception:  # bodies that want to know more of a size than the graph around them does
        return None
    for argument, gradient in zip(n.args, backward.output, strict=False):
        if is_tensor(gradient) and is_tensor(argument) and rank_of(gradient) == rank_of(argument):
            for mine, own in zip(backward.typing.dims(gradient), t.dims(argument), strict=True):
                t.join(mine, own)
    return Function(found, forward, backward)


def _body(module: fx.GraphModule, mode: Any, t: Typing, given: Sequence[Any], typed: Typing) -> Body:
    """A body whose inputs are values that are typed already."""
    graph = fx.Graph()
    output = graph.graph_copy(module.graph, {})
    graph.output(output)
    inputs = graph.find_nodes(op="placeholder")
    pairs = list(zip(inputs, given, strict=True))
    described(graph, mode, {node: x.meta["val"] if isinstance(x, fx.Node) else x for node, x in pairs})
    normalize(graph, Phase.PRE_GRAD)
    for node in graph.find_nodes(op="call_function", target=aten.mm.default):
        node.target = aten.matmul.default
    graph.eliminate_dead_code()
    typing = Typing(graph, t.axes, {node: typed.dims(x) for node, x in pairs if is_tensor(x)})
    (end,) = graph.find_nodes(op="output")
    return Body(graph, typing, inputs, end.args[0])


def described(graph: fx.Graph, mode: Any, values: Mapping[fx.Node, Any]) -> None:
    """Fake values for all nodes, from those of the inputs."""
    with _torch.trying(mode.shape_env), mode, torch.no_grad(), _torch.without_autocast():
        for node in graph.nodes:
            if node.op == "placeholder":
                node.meta = {"val": values[node]}
            elif node.op == "call_function":
                args, kwargs = fx.map_arg((node.args, node.kwargs), lambda x: x.meta["val"])
                node.meta = {"val": node.target(*args, **kwargs)}


# --- row by row? -------------------------------------------------------------------------------------


def why_mixed(f: Function, space: Space) -> str | None:
    """Why rows are mixed, or None."""
    if sum(i not in f.bodies.unwatched for i in range(len(f.results))) > 1:
        return "an autograd.Function with several results that have gradients"
    for body in (f.forward, f.backward):
        why = next(_troubles(body, space, f), None)
        if why is not None:
            return f"{why}, in an autograd.Function"
    if not all(f.forward.has_rows(x, space) for x in f.results):
        return "an autograd.Function whose result has other rows"
    for argument, gradient in zip(f.forward.inputs, f.gradients, strict=False):
        if is_tensor(gradient) and f.forward.has_rows(argument, space) != f.backward.has_rows(gradient, space):
            return "an autograd.Function whose gradient has other rows"
    zero = quiet(f, space)
    if any(f.backward.has_rows(x, space) and x not in zero for x in f.gradients):
        return "an autograd.Function that has a gradient where that of its result is zero"
    return None


def quiet(f: Function, space: Space) -> set[fx.Node]:
    """Values of the backward whose rows are zero where the gradients of the results are."""
    zero = set(f.backward.inputs[: len(f.results)])
    for node in f.backward.steps:
        if (not is_tensor(node) or f.backward.has_rows(node, space)) and is_zero(node, zero):
            zero.add(node)
    return zero


def _troubles(body: Body, space: Space, f: Function) -> Iterator[str]:
    check, known = Rowwise(body.typing, lambda _: space), body.sizes(space)
    for node in (*body.inputs, *body.steps):
        if body.has_rows(node, space):
            if not check.covers(node, space):
                yield "a value with other rows"
            if not _free_symbols(body, node, space) <= known.keys():
                yield "features whose number cannot be read"
    for node in body.steps:
        source = operand(node) if op(node) == "getitem" else node  # an op with several results is asked at each of them
        rows = [x for x in source.all_input_nodes if body.has_rows(x, space)]
        if _torch.is_impure(node) or _torch.is_random(node):
            yield "random numbers or effects"
        elif not is_tensor(node):
            if rows and op(node) in _SIZES and any(op(u) not in VIEWS for u in node.users):
                yield "a number of rows"
        elif body.has_rows(node, space):
            made = not rows and op(node) not in REPEATS
            why = f"{op(node)} makes rows" if made else check.why_mixed(node, space)
            if why is not None:
                yield why
        elif rows and not (body is f.backward and _adds_zeros(f, node, space)):
            yield f"{op(source)} over rows"


def _free_symbols(body: Body, node: fx.Node, space: Space) -> set[sympy.Basic]:
    """Of sizes beside rows."""
    beside = [a for a in body.typing.flat(node) if a not in space.axes]
    return {symbol for a in beside for symbol in sympy.sympify(body.typing.axes.size(a)).free_symbols}


def _adds_zeros(f: Function, node: fx.Node, space: Space) -> bool:
    """Does it sum over rows, which add nothing where the gradients of the results are zero?"""
    zero = quiet(f, space)
    if op(node) == "sum":
        return operand(node) in zero
    return row_letters(f.backward, node, space) is not None and any(x in zero for x in node.all_input_nodes)


def row_letters(body: Body, node: fx.Node, space: Space) -> tuple[list[Operand], str] | None:
    """A product that contracts all rows, and nothing together with them, by letters."""
    letters = by_letters(node)
    if letters is None or len(letters[0]) != 2:
        return None
    found: list[dict[str, list[int]]] = []
    for x in letters[0]:
        dims = dict(zip(x.label, body.typing.atoms(x.node), strict=True))
        mine = {c: d for c, d in dims.items() if any(a in space.axes for a in d)}
        if not body.has_rows(x.node, space) or any(a not in space.axes for d in mine.values() for a in d):
            return None
        found.append(mine)
    contracted = not any(c in letters[1] for c in found[0])
    return (letters[0], "".join(letters[1])) if found[0] == found[1] and contracted else None
