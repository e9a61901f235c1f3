"""An `autograd.Function` for packed rows: its forward and its backward, packed each."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import fx

from ....capture.functions import Bodies
from ....errors import PassError
from ..bodies import Body, Function, described, row_letters
from ..calls import is_tensor, op, operand, reduced_dims, shape, value_of
from ..declaration import declared
from ..demand import DemandAnalysis
from ..program import RowSet
from ..rowwise import Rowwise
from .values import Values

aten = torch.ops.aten


def function(e: Values, n: fx.Node, chosen: RowSet) -> Any:
    """The call on packed rows: its result, or a list of its results."""
    found: Function = e.typing.bodies[n]
    count = e.count(chosen)
    forward, backward = (_Within(body, chosen).packed_body(count) for body in (found.forward, found.backward))
    made = Bodies(forward, backward, found.bodies.unwatched).function()

    def given(x: Any, inside: fx.Node) -> Any:
        if not is_tensor(x):
            return x
        return e.packed(x, chosen) if found.forward.has_rows(inside, chosen.space) else e.dense(x)

    call = e.call(made.op, *map(given, n.args, found.forward.inputs))
    several = len(made.op._schema.returns) > 1
    results = [e.call(operator.getitem, call, i) for i in range(made.results)] if several else [call]
    return results[0] if is_tensor(n) else results


@dataclass
class _Known:
    """What is asked of the analysis of a graph by rules of ops."""

    graph: fx.Graph
    typing: Any
    rowwise: Rowwise
    decisions: dict[fx.Node, Any] = field(default_factory=dict)


class _Within(Values):
    """Emits into a body whose inputs are packed rows already."""

    def __init__(self, body: Body, chosen: RowSet) -> None:
        rowwise = Rowwise(body.typing, lambda _: chosen.space)
        super().__init__(body.graph, cast(DemandAnalysis, _Known(body.graph, body.typing, rowwise)))
        self.body, self.chosen = body, chosen
        self.symbols = body.sizes(chosen.space)
        self._summed: dict[fx.Node, fx.Node] = {}

    def packed_body(self, count: Any) -> fx.GraphModule:
        """The body on so many rows."""
        before = list(self.graph.nodes)
        for node in before:
            if node.op == "placeholder" and self.has_rows(node):
                self.live(node, self.chosen, node)
            elif node.op == "call_function" and is_tensor(node):
                self.at = node
                with self.graph.inserting_before(node):
                    self._visit(node)
        made = self._copied(count)
        for node in reversed(list(self.graph.nodes)):
            if node not in before:
                self.graph.erase_node(node)
        return made

    def has_rows(self, node: Any) -> bool:
        return self.body.has_rows(node, self.chosen.space)

    def _visit(self, node: fx.Node) -> None:
        if self.has_rows(node):
            self.live(node, self.chosen, self._on_rows(node))
        elif any(map(self.has_rows, node.all_input_nodes)):
            self._summed[node] = self._sum(node) if op(node) == "sum" else self._product(node)

    def _on_rows(self, node: fx.Node) -> fx.Node:
        if op(node) == "getitem":
            return self.piece(node, self.chosen)
        found = declared(node)
        assert found is not None and found.packed is not None, node
        packed: Any = found.packed  # rules are written for the emitter, which this becomes
        return packed(self, node, self.chosen)

    def _sum(self, node: fx.Node) -> fx.Node:
        x, gone = operand(node), reduced_dims(node)
        others = [self.position(x, d, self.chosen) for d, _ in self.kept(x, self.chosen.space.axes) if d in gone]
        value = self.call(aten.sum.dim_IntList, self.packed(x, self.chosen), [0, *others], dtype=value_of(node).dtype)
        return self.reshape(value, shape(node))

    def _product(self, node: fx.Node) -> fx.Node:
        letters = row_letters(self.body, node, self.chosen.space)
        assert letters is not None, node
        operands, out = letters
        labels = ["T" + "".join(x.label[d] for d, _ in self.kept(x.node, self.chosen.space.axes)) for x in operands]
        values = [self.packed(x.node, self.chosen) for x in operands]
        return self.call(aten.einsum.default, f"{','.join(labels)}->{out}", values)

    def _copied(self, count: Any) -> fx.GraphModule:
        """The packed graph alone."""
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        graph.graph_copy(self.graph, copies)
        for old, new in self._summed.items():
            copies[old].replace_all_uses_with(copies[new])
        packed = {x: self.packed(x, self.chosen) for x in self.homes}
        graph.output(fx.map_arg(self.body.output, lambda x: copies[packed.get(x, self._summed.get(x, x))]))
        graph.eliminate_dead_code()
        graph.lint()
        described(graph, self.mode, {copies[x]: self._fake(x, count) for x in self.body.inputs})
        return fx.GraphModule(torch.nn.Module(), graph)

    def _fake(self, given: fx.Node, count: Any) -> Any:
        if not self.has_rows(given):
            return given.meta["val"]
        sizes, value = self.kept_sizes(given, self.chosen.space.axes), value_of(given)
        with self.mode, torch.no_grad():
            return torch.empty([count, *map(self.fake_size, sizes)], dtype=value.dtype, device=value.device)

    # --- what rules ask for ------------------------------------------------------------------------

    def count_of(self, chosen: RowSet) -> Any:
        return self.call(aten.sym_size.int, next(x for x in self.body.inputs if self.has_rows(x)), 0)

    def dense(self, node: fx.Node) -> fx.Node:
        if self.has_rows(node):
            raise PassError(f"%{node} is read with all of its rows")
        return node

    def note_lookup(self, *given: Any, **more: Any) -> None:
        """What is looked up within a function is not known before it runs."""

    def _symbol(self, symbol: Any) -> fx.Node:
        index, dim = self.symbols[symbol]
        node = self.placeholders[index]
        if dim is None:
            return node
        at = self.position(node, dim, self.chosen) if self.has_rows(node) else dim
        return self.call(aten.sym_size.int, node, at)
