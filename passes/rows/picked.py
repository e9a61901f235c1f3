"""Rows picked by what they hold, computed apart and put back: a mixture of experts that is written as a loop.

    for number, expert in enumerate(experts):
        rows = torch.where(choice == number)[0]
        out = out.index_add(0, rows, expert(x[rows]))

How many rows are picked only the step itself finds out, so they are no row set. But each row of the result is made from
its own row: what happens between picking and putting back is one op on rows. On packed rows it is written out again,
with fewer rows to pick from.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

import sympy
import torch
from torch import fx

from ... import _torch
from ...kernels.picked import BODIES
from .apart import Apart
from .calls import arg, is_tensor, op, piece_of, rank_of, shape, size, value_of
from .declaration import row_op
from .spaces import Space

if TYPE_CHECKING:
    from .analysis import RowAnalysis
    from .axes import Dims, Typing
    from .emit import Emitter
    from .program import RowSet
    from .rowwise import Rowwise

aten = torch.ops.aten
PICKED = torch.ops.turbogr.picked.default
_INTO = {"index_put": "values", "index_add": "source", "index_copy": "source"}  # where rows are put back, and which
_SIZED = ("reshape", "view", "_unsafe_view", "expand")
_NUMBERS = ("where", "nonzero_numpy")  # one list of numbers for each dim
_NAMES = count()
_ROWS = "picked_rows"


class Unknown(Exception):
    """Not rows that are picked, or not in a way that is understood."""


@dataclass(frozen=True)
class Picker:
    """What holds on rows that are picked, and how they are named afterwards."""

    mask: fx.Node
    dims: tuple[int, ...]  # of the mask, that run over rows
    made: fx.Node | None  # computes numbers of rows; None where the mask itself names them

    def names(self, index: Any) -> bool:
        """Does an index name the rows that are picked?"""
        if self.made is None:
            return index is self.mask
        found = _numbers(index)
        return found is not None and (found.made, found.dims) == (self.made, self.dims)


def _numbers(index: Any) -> Picker | None:
    """Numbers of rows at which a mask holds."""
    while op(index) == "_to_copy" or (op(index) in ("squeeze", "reshape", "view", "flatten") and rank_of(index) == 1):
        index = index.args[0]
    if op(index) == "nonzero" and rank_of(index.args[0]) == 1:
        return Picker(index.args[0], (0,), index)
    if op(index) == "select" and op(index.args[0]) == "nonzero" and index.args[1] in (1, -1):
        mask = index.args[0].args[0]
        return Picker(mask, (index.args[2] % rank_of(mask),), index.args[0])
    if op(index) == "getitem" and op(index.args[0]) in _NUMBERS and len(index.args[0].args) == 1:
        return Picker(index.args[0].args[0], (piece_of(index),), index.args[0])
    return None


def take_apart_picked(graph: fx.Graph, analysis: RowAnalysis) -> list[Apart]:
    """Places where picked rows are put back, as one op each."""
    found = []
    for node in list(graph.nodes):
        if op(node) in _INTO and node in analysis.demand.meanings.tainted:
            try:
                found.append(_as_one(Body(node, analysis)))
            except Unknown:
                continue
    return found


def _as_one(body: Body) -> Apart:
    node, name = body.end, f"body {next(_NAMES)}"
    module = body.module()
    with node.graph.inserting_before(node):
        made = node.graph.call_function(PICKED, (list(body.rows), list(body.others), name))
    made.meta["val"] = node.meta["val"]
    made.meta[_ROWS] = (module, tuple(body.rows.values()))
    BODIES[name] = module
    _drop_checks(body)
    node.replace_all_uses_with(made)
    for drawn in [n for n in body.nodes if op(n) == "dropout"]:  # whose numbers would be drawn though nobody wants them
        drawn.replace_all_uses_with(operand_of(drawn))
        node.graph.erase_node(drawn)
    return Picks(node, (made,), {node: made}, by_identity=True)


class Picks(Apart):
    """What is put together again is written out from the body."""

    def put_together(self) -> None:
        (made,) = self.parts
        rows, others, _ = made.args
        given: Any = [*rows, *others]  # type: ignore[misc]
        module: fx.GraphModule = made.meta[_ROWS][0]
        env = dict(zip(module.graph.find_nodes(op="placeholder"), given, strict=True))
        with made.graph.inserting_before(made):
            for step in module.graph.nodes:
                if step.op == "call_function":
                    env[step] = made.graph.node_copy(step, env.__getitem__)
        (output,) = module.graph.find_nodes(op="output")
        made.replace_all_uses_with(env[output.args[0]])
        made.graph.erase_node(made)


def _drop_checks(body: Body) -> None:
    """What torch asserts of the number of picked rows holds for every mask; asked of all rows, it would keep them."""
    sizes = [user for node in body.nodes for user in node.users if op(user) == "sym_size"]
    for condition in [user for node in dict.fromkeys(sizes) for user in node.users if user not in body.nodes]:
        checks = list(condition.users)
        if checks and all(op(c) == "_assert_scalar" for c in checks) and _always(condition, body):
            for each in (*checks, condition):
                each.graph.erase_node(each)


def _always(condition: fx.Node, body: Body) -> bool:
    number: Any = condition.args[1] if len(condition.args) == 2 else None
    number = number.meta.get("val") if isinstance(number, fx.Node) else number
    if not isinstance(number, (int, torch.SymInt)):
        return False
    name = getattr(condition.target, "__name__", "")
    return (name == "ge" and isinstance(number, int) and number == 0) or (
        name == "le" and size(number) == size(value_of(body.picker.mask).numel())
    )


class Body:
    """What lies between picking rows and putting them back.

    `rows` are values with rows, by the dims that run over them; the first is what rows are put back into. `others` have
    nothing to do with rows.
    """

    def __init__(self, end: fx.Node, analysis: RowAnalysis) -> None:
        self.end = end
        self.typing, self.rowwise = analysis.demand.typing, analysis.demand.rowwise
        index, self.values = self._put_back()
        self.picker = self._picker(index)
        leading = self.picker.dims if self.picker.made is None else (0,)
        self.rows: dict[fx.Node, tuple[int, ...]] = {}
        self.others: dict[fx.Node, None] = {}
        self._note(operand_of(end), leading)
        self._note(self.picker.mask, self.picker.dims)
        self.nodes = self._between()
        self._check()

    def _put_back(self) -> tuple[Any, Any]:
        end, values = self.end, arg(self.end, _INTO[op(self.end)])
        if op(end) == "index_put":
            indices = arg(end, "indices")
            index = indices[0] if len(indices) == 1 else None
        else:
            index = arg(end, "index") if arg(end, "dim") == 0 and arg(end, "alpha", 1) == 1 else None
        if not isinstance(index, fx.Node) or not is_tensor(values):
            raise Unknown
        return index, values

    def _picker(self, index: fx.Node) -> Picker:
        if value_of(index).dtype == torch.bool:
            return Picker(index, tuple(range(rank_of(index))), None)
        found = _numbers(index)
        if found is None:
            raise Unknown
        return found

    def _note(self, x: fx.Node, dims: tuple[int, ...]) -> None:
        if self.rows.setdefault(x, dims) != dims or x in self.others:
            raise Unknown

    def _between(self) -> list[fx.Node]:
        """Nodes that depend on which rows are picked, on the way to the end."""
        inside: dict[fx.Node, bool] = {}
        for node in self._behind():
            picks = node is self.picker.made or (self.picker.made is None and self._picks(node))
            inside[node] = picks or any(inside.get(x, False) for x in node.all_input_nodes)
        return [n for n in inside if inside[n]]

    def _behind(self) -> list[fx.Node]:
        """What the end is computed from, in order; not what rows are put back into, nor what rows are picked by."""
        seen, todo = set[fx.Node](), [x for x in self.end.all_input_nodes if x not in self.rows]
        while todo:
            node = todo.pop()
            if node in seen or node in self.rows:
                continue
            seen.add(node)
            todo += node.all_input_nodes
        return [n for n in self.end.graph.nodes if n in seen]

    def _picks(self, node: fx.Node) -> bool:
        return any(self.picker.names(i) for i in self._indices(node) if i is not None)

    @staticmethod
    def _indices(node: fx.Node) -> list[Any]:
        if op(node) == "index":
            return list(arg(node, "indices"))
        if op(node) == "index_select":
            return [*[None] * (arg(node, "dim") % rank_of(node.args[0])), arg(node, "index")]
        return []

    def _check(self) -> None:
        named = next((n for n in self.nodes if self._picks(n) or self._names_rows(n)), None)
        if named is None or self.values not in self.nodes:
            raise Unknown
        self.number = shape(named)[0]
        if not isinstance(self.number, sympy.Symbol) or self._dim(self.values) != 0:
            raise Unknown  # as many rows must come back as were picked
        inside = set(self.nodes)
        for node in self.nodes:
            if node is self.picker.made:
                continue
            if self._picks(node):
                self._check_entry(node, inside)
            elif not self._names_rows(node):
                self._check_inside(node, inside)

    def _dim(self, x: fx.Node) -> int:
        """The one dim that runs over picked rows."""
        found = [d for d, s in enumerate(shape(x)) if isinstance(s, sympy.Expr) and self.number in s.free_symbols]
        if len(found) != 1 or shape(x)[found[0]] != self.number:
            raise Unknown
        return found[0]

    def _picked(self, x: fx.Node) -> tuple[int, ...]:
        return tuple(self.typing.atoms(x)[self._dim(x)])

    def _check_entry(self, node: fx.Node, inside: set[fx.Node]) -> None:
        source, indices = operand_of(node), self._indices(node)
        places = [i for i, index in enumerate(indices) if self.picker.names(index)]
        if len(places) != 1 or source in inside or (self.picker.made is None and places != [0]):
            raise Unknown
        (at,) = places
        others = [x for i, x in enumerate(indices) if i != at and x is not None]
        if any(x not in inside or self._names_rows(x) for x in others):
            raise Unknown
        self._dim(node)
        self._note(source, self.picker.dims if self.picker.made is None else (at,))

    def _names_rows(self, node: fx.Node) -> bool:
        """Numbers of rows are other numbers where there are fewer rows: they may do nothing but pick, and put back."""
        if self.picker.made is None or not is_tensor(node):
            return False
        if op(node) == "nonzero":
            return True
        found = _numbers(node)
        return found is not None and found.made is self.picker.made and found.dims == self.picker.dims

    def _check_inside(self, node: fx.Node, inside: set[fx.Node]) -> None:
        if op(node) == "sym_size":  # how many rows are picked may say how long a value is, and nothing else
            if any(op(u) not in _SIZED for u in node.users if u in inside or u is self.end):
                raise Unknown
            return
        if op(node) == "getitem" and node.args[0] is self.picker.made:
            return  # the number of another dim
        drawn = node.is_impure() or _torch.is_random(node)
        alone = op(node) == "dropout" and all(u in inside or u is self.end for u in node.users)
        if not is_tensor(node) or (drawn and not alone):
            raise Unknown
        axes = {self._picked(x) for x in (node, *node.all_input_nodes) if x in inside and is_tensor(x)}
        if any(self.rowwise.why_mixed(node, Space(each)) is not None for each in axes):
            raise Unknown
        for x in node.all_input_nodes:
            if x in inside:
                if self._names_rows(x):
                    raise Unknown
            elif not is_tensor(x) or x in self.rows:
                raise Unknown
            else:
                self.others[x] = None

    # --- the same as a graph of its own ------------------------------------------------------------

    def module(self) -> fx.GraphModule:
        graph = fx.Graph()
        env: dict[fx.Node, fx.Node] = {}
        for number, x in enumerate([*self.rows, *self.others]):
            env[x] = graph.placeholder(f"given_{number}")
            env[x].meta["val"] = x.meta["val"]
        for node in (*self.nodes, self.end):
            env[node] = graph.node_copy(node, env.__getitem__)
        graph.output(env[self.end])
        return fx.GraphModule({}, graph)


def operand_of(node: fx.Node) -> fx.Node:
    found = node.args[0]
    if not isinstance(found, fx.Node):
        raise Unknown
    return found


# --- the op ---------------------------------------------------------------------------------------------


def _given(n: fx.Node) -> Iterator[tuple[fx.Node, tuple[int, ...]]]:
    rows: Any = n.args[0]
    return zip(rows, n.meta[_ROWS][1], strict=True)


def _axes(t: Typing, n: fx.Node) -> Dims:
    (into, dims), *rest = _given(n)
    result = list(t.dims(into))
    for x, its in rest:
        for mine, other in zip(dims, its, strict=True):
            result[mine] = t.join(result[mine], t.dims(x)[other])
    return result


def _mixes(r: Rowwise, n: fx.Node, s: Space) -> str | None:
    for x, dims in _given(n):
        atoms = r.typing.atoms(x)
        if not r.covers(x, s) or {a for d in dims for a in atoms[d]} != set(s.axes):
            return "rows that are picked among others"
    others: Any = n.args[1]
    return None if all(r.free(x, s) for x in others) else "picked rows with values of all rows"


def _packed(e: Emitter, n: fx.Node, chosen: RowSet) -> fx.Node:
    module, _ = n.meta[_ROWS]
    if e.parity and any(op(step) == "dropout" for step in module.graph.nodes):
        raise NotImplementedError("numbers drawn for picked rows are not those drawn for all")
    others: Any = n.args[1]
    given = [_laid_out(e, x, dims, chosen) for x, dims in _given(n)] + [e.dense(x) for x in others]
    env = dict(zip(module.graph.find_nodes(op="placeholder"), given, strict=True))
    result = given[0]
    for step in module.graph.nodes:
        if step.op == "call_function":
            args, kwargs = fx.map_arg((step.args, step.kwargs), env.__getitem__)
            result = env[step] = e.call(step.target, *args, **kwargs)
    return e.reshape(result, [-1, *e.kept_sizes(n, chosen.space.axes)])


def _laid_out(e: Emitter, x: fx.Node, dims: tuple[int, ...], chosen: RowSet) -> fx.Node:
    """Packed rows where the value has its rows."""
    rest = [s for d, s in enumerate(shape(x)) if d not in dims]
    rows = e.reshape(e.packed(x, chosen), [-1, *rest])
    if dims[0] == 0:
        return rows
    order = [*range(1, dims[0] + 1), 0, *range(dims[0] + 1, 1 + len(rest))]
    return e.call(aten.permute.default, rows, order)


row_op("turbogr::picked", models=("rows", "others", "body"), axes=_axes, mixes=_mixes, packed=_packed)
