"""Values of a graph as tables over the axes of its typing: attention's evaluation, without an attention.

The index of each dim is the flattening of the axes that it is made of, so that a test of data names the axes it runs
over, and two masks that are written differently over the same rows have the same atoms. An axis that a value has twice
(a row as query, and as key) gets a mark the second time: the two have different indices.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ...graph.nodes import tensor
from .attention import softmax
from .attention.calls import is_random
from .attention.checks import OnBatch, SizeAtMost
from .attention.evaluate import Evaluator
from .attention.formula import Formula, Index, Sizes, size_of
from .attention.indexing import COPIES, SPLITTING, broadcast, flattened, tidy
from .attention.language import Atom, NeedsSplit, Number, Position, Refused, Sum, Test, Unknown, number
from .attention.speculate import pattern, two_values
from .attention.table import Table, of_atom, one
from .calls import is_tensor, op
from .known import Known
from .meaning import Speculation

AGAIN = "'"  # marks an axis that a value has had before
_LONGEST = 2**31 - 1  # no dim has as many elements
# Of a sum of data these make a test, or leave it alone; what others make of one is data again.
_READ_SUMS = {"_to_copy", "to", "type_as", "copy", "where", "masked_fill", "detach", *COPIES,
              "eq", "ne", "lt", "le", "gt", "ge"}  # fmt: skip


@dataclass(frozen=True)
class Named:
    """A boolean tensor, and in which cases it is true."""

    atoms: tuple[Atom, ...]
    true: frozenset[tuple[bool, ...]]
    node: fx.Node
    index: Index
    rests: frozenset[Speculation]


class Reader(Evaluator):
    """Tables of a graph's values; `speculate`: with patterns that were seen in inputs."""

    of_any_axes = True

    def __init__(self, known: Known, speculate: bool) -> None:
        self.typing, self.tainted = known.typing, known.tainted
        self._opaque: set[fx.Node] = set()
        self._now: set[Speculation] = set()  # what is being evaluated rests on
        self._rests: dict[Any, frozenset[Speculation]] = {}
        self._triangles: dict[fx.Node, bool] = {}
        self._named: dict[Any, Named] = {}
        super().__init__(known.graph, None, Sizes({}, known.env), known, speculate)

    # --- indices -----------------------------------------------------------------------------------

    def names(self, node: fx.Node) -> list[list[str]]:
        """The axes of each dim, by name."""
        seen: dict[int, int] = {}
        out: list[list[str]] = []
        for dim in self.typing.atoms(node):
            out.append([])
            for axis in dim:
                name = str(axis) + AGAIN * seen.get(axis, 0)
                seen[axis] = seen.get(axis, 0) + 1
                self.sizes.of.setdefault(name, size_of(self.typing.axes.size(axis)))
                out[-1].append(name)
        return out

    def own(self, node: fx.Node) -> Index:
        """The index of a node at its own dims."""
        dims = [flattened(tuple(map(Formula.axis, d)), [self.sizes[a] for a in d]) for d in self.names(node)]
        return tidy(node, tuple(dims))

    def is_own(self, node: fx.Node, index: Index) -> bool:
        """Does an index read each row of a node at that very row, whichever of two equal axes it runs over?"""
        names = {axis: axis.rstrip(AGAIN) for i in index for axis in i.axes}
        return len(set(names.values())) == len(names) and tuple(i.renamed(names) for i in index) == self.own(node)

    # --- the recursion -----------------------------------------------------------------------------

    def table_of(self, node: fx.Node) -> tuple[Table, frozenset[Speculation]]:
        """At its own dims, and what that rests on."""
        index = self.own(node)
        return self.at(node, index), self._rests[self.first(node), index]

    def at(self, node: fx.Node, index: Index) -> Table:
        if not is_tensor(node):
            return super().at(node, index)
        node = self.first(node)
        index = tidy(node, index)
        if (node, index) not in self._memo:
            outer, self._now = self._now, set()
            try:
                self._memo[node, index] = self._evaluated(node, index)
                self._rests[node, index] = frozenset(self._now)
            finally:
                self._now = outer
            self._name(node, index)
        self._now |= self._rests[node, index]
        return self._memo[node, index]

    def _evaluated(self, node: fx.Node, index: Index) -> Table:
        if node not in self._opaque:
            try:
                found = self._by_rule(node, index)
                if node not in self.tainted or all(isinstance(x, (Number, Position)) for x in found.leaves):
                    return found
                self._opaque.add(node)  # what is made of it is no mask
            except (Unknown, Refused, NeedsSplit):
                pass
        self._now.clear()
        return self.data(node, index)

    def _by_rule(self, node: fx.Node, index: Index) -> Table:
        part = op(node) == "getitem" and op(node.args[0]) in SPLITTING
        if op(node) in softmax.RULES and not part:
            raise Unknown(op(node))
        return super()._by_rule(node, index)

    def _pointwise(self, node: fx.Node, index: Index) -> Table:
        if op(node) not in _READ_SUMS:
            tables = [self.at(x, broadcast(x, index)) for x in node.all_input_nodes if is_tensor(x)]
            if any(isinstance(leaf, Sum) for t in tables for leaf in t.leaves):
                raise Unknown("arithmetic of data")
        return super()._pointwise(node, index)

    def _number_values(self, graph: fx.Graph) -> None:
        """Nodes that compute the same over the same axes are one: two aranges may run along different things."""
        seen: dict[Any, fx.Node] = {}

        def plain(x: Any) -> Any:
            if isinstance(x, fx.Node):
                return "%", self._first.get(x, x)
            if isinstance(x, (list, tuple)):
                return tuple(map(plain, x))
            return repr(x)

        for node in graph.nodes:
            if is_random(node) or any(n in self.drawn for n in node.all_input_nodes):
                self.drawn.add(node)
            elif node.op == "call_function":
                atoms = tuple(map(tuple, self.typing.atoms(node))) if is_tensor(node) else ()
                key = node.target, plain(node.args), tuple((k, plain(v)) for k, v in node.kwargs.items()), atoms
                self._first[node] = seen.setdefault(key, node)

    # --- what nothing is left to check for ---------------------------------------------------------

    def assume(self, text: str) -> None:
        raise Unknown(text)

    def require(self, check: OnBatch) -> None:
        if not isinstance(check, SizeAtMost) or check.most < _LONGEST:
            raise Unknown(str(check))

    # --- names -------------------------------------------------------------------------------------

    def describes_rows(self, node: fx.Node) -> bool:
        """Known before the graph runs, and no axis twice."""
        flat = self.typing.flat(node)
        return node not in self.tainted and bool(flat) and len(set(flat)) == len(flat)

    def _name(self, node: fx.Node, index: Index) -> None:
        """A boolean tensor of rows may stand for what it says."""
        value = tensor(node)
        if value is None or value.dtype != torch.bool or not self.describes_rows(node) or not self.is_own(node, index):
            return
        table = self._memo[node, index]
        if table.atoms and not any(isinstance(a, Test) and self.is_triangle(a.node) for a in table.atoms):
            true = frozenset(bits for bits, leaf in table.rows.items() if leaf.value)
            found = Named(table.atoms, true, node, index, self._rests[node, index])
            self._named.setdefault((table.atoms, true), found)

    def named(self, atoms: Collection[Atom]) -> list[Named]:
        """Boolean tensors that say something of these atoms, and of no others; those with fewest first."""
        found = [n for n in self._named.values() if all(a in atoms for a in n.atoms)]
        return sorted(found, key=lambda n: len(n.atoms))

    # --- patterns ----------------------------------------------------------------------------------

    def _patterned(self, node: fx.Node, index: Index) -> Table | None:
        constant = self.facts.is_constant(node)
        guessed = self.speculate and node not in self.tainted and node not in self.drawn
        if not constant and not guessed:
            return None
        seen = self.facts.example(node) if index else None
        if seen is None or seen.numel() == 0:
            return None
        if constant or node.op == "placeholder":
            found = pattern(self, seen, index) or _counted(self, seen, index)
            if found is not None:
                if not constant:
                    self._now.add(Speculation(node, "same", seen.clone()))
                return found
        values = two_values(seen) if not constant and self._may_be_mask(node) else None
        if values is None:
            return None
        self._now.add(Speculation(node, "values", values))
        return of_atom(Test(node, index, "eq", values[0]), *(number(v, seen.dtype) for v in values))

    def _may_be_mask(self, node: fx.Node) -> bool:
        """Whole numbers are one where they are given, and not where they are counted or looked up."""
        value = tensor(node)
        looked_up = any(op(u) in ("embedding", "index") and u.args[0] is not node for u in node.users)
        given = node.op == "placeholder" and not looked_up
        return self.describes_rows(node) and (given or (value is not None and value.is_floating_point()))

    def is_triangle(self, node: fx.Node) -> bool:
        """An input that was seen to hold a triangle says more than that it is data."""
        if node not in self._triangles:
            seen = self.facts.example(node) if node.op == "placeholder" else None
            found = pattern(self, seen, self.own(node)) if seen is not None and seen.numel() else None
            self._triangles[node] = found is not None
        return self._triangles[node]


def _counted(ev: Reader, seen: torch.Tensor, index: Index) -> Table | None:
    """Positions."""
    if (
        seen.dtype == torch.bool
        or seen.is_floating_point()
        or seen.is_complex()
        or not seen.shape[-1] == seen.numel() > 1
    ):
        return None
    start = int(seen.flatten()[0])
    if not torch.equal(seen.flatten().long(), torch.arange(start, start + seen.numel())):
        return None
    return one(ev.position(index[-1] + start, seen.dtype))
