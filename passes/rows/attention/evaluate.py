"""The value of a node at an index, as a table: one recursion from the weights of a PV product down to the QK product.

A view changes the index, a pointwise op is applied leaf by leaf, numbers are folded by the op itself. What does not
depend on scores and no rule reads is data, computed by the captured ops as in eager: not understanding costs speed,
never correctness. Refusals come from nodes that depend on scores, and name the term.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from ..calls import is_tensor, op, rank_of
from . import indexing, pointwise, softmax, sources
from .calls import Call, Rule, arguments, is_random, value
from .checks import Finite, OnBatch, Same, SizeAtMost, SizeOfScores, TwoValues
from .facts import Facts
from .formula import KEY, QUERY, Formula, Index, Sizes, size_of, written
from .indexing import broadcast, tidy
from .language import (
    KEYS,
    NO,
    YES,
    AtLeast,
    Data,
    Leaf,
    Number,
    Position,
    Product,
    Refused,
    Score,
    Sum,
    Test,
    Unknown,
    just,
    number,
    truth,
)
from .numbers import ASSUMES_PARAMETERS, added, exact_up_to, folded, scaled
from .speculate import pattern, two_values
from .table import Table, combine, of_atom, one

aten = torch.ops.aten

NODES: dict[str, Rule] = {**sources.RULES, **softmax.RULES}
_ALSO_POINTWISE = {*pointwise.RULES, "gelu", "log_sigmoid", "softplus", "logical_or", "logical_and", "logical_not",
                   "floor_divide", "square", "__and__", "__or__", "__xor__"}  # fmt: skip


def is_pointwise(node: fx.Node) -> bool:
    """Is an element made from the operands' elements at its own index?"""
    tagged = torch.Tag.pointwise in getattr(node.target, "tags", ())
    if not (tagged or op(node) in _ALSO_POINTWISE) or is_random(node) or not is_tensor(node):
        return False
    return all(rank_of(x) <= rank_of(node) for x in node.all_input_nodes if is_tensor(x))  # `max(x)` is no `max(x, y)`


class Evaluator:
    """One evaluation. `qk` is the product whose elements are the scores; None where there are none in the graph."""

    of_any_axes = False  # may any two axes be those of queries and keys?

    def __init__(self, graph: fx.Graph, qk: fx.Node | None, sizes: Sizes, facts: Facts, speculate: bool) -> None:
        self.qk, self.sizes, self.facts, self.speculate = qk, sizes, facts, speculate
        self.assumptions: list[str] = []
        self.checks: list[OnBatch] = []
        self.softmaxes: list[softmax.Softmax] = []
        self.score_index: Index | None = None
        self.after: set[fx.Node] = set()  # nodes that depend on scores
        self.drawn: set[fx.Node] = set()  # nodes that depend on random numbers
        self._first: dict[fx.Node, fx.Node] = {}
        self._memo: dict[tuple[fx.Node, Index], Table] = {}
        self._tables: dict[Any, int] = {}
        self._numbered: list[Table] = []
        self._number_values(graph)
        self.qk = self.first(qk) if qk is not None else None
        for node in graph.nodes if qk is not None else ():
            if self.first(node) is self.qk or any(n in self.after for n in node.all_input_nodes):
                self.after.add(node)

    def _number_values(self, graph: fx.Graph) -> None:
        """Calls that compute the same are one; random ones never are."""
        seen: dict[Any, fx.Node] = {}

        def plain(x: Any) -> Any:
            if isinstance(x, fx.Node):
                return "%", self._first.get(x, x)
            if isinstance(x, (list, tuple)):
                return tuple(map(plain, x))
            return tuple(sorted((k, plain(v)) for k, v in x.items())) if isinstance(x, dict) else repr(x)

        for node in graph.nodes:
            if is_random(node) or any(n in self.drawn for n in node.all_input_nodes):
                self.drawn.add(node)
            elif node.op == "call_function":
                self._first[node] = seen.setdefault((node.target, plain(node.args), plain(node.kwargs)), node)

    # --- what rules ask ----------------------------------------------------------------------------

    def first(self, node: fx.Node) -> fx.Node:
        """The node that stands for all that compute the same."""
        return self._first.get(node, node)

    def arguments(self, node: fx.Node, models: tuple[str, ...]) -> dict[str, Any]:
        return arguments(node, models)

    def gradients_reach(self, node: fx.Node) -> bool:
        return self.facts.gradients_reach(node)

    def assume(self, text: str) -> None:
        if text not in self.assumptions:
            self.assumptions.append(text)

    def require(self, check: OnBatch) -> None:
        if check not in self.checks:
            self.checks.append(check)

    def rely_on_term(self, term: Product, coef: float) -> None:
        """That a term is of the size of scores."""
        if any(isinstance(f, Data) and self.gradients_reach(f.node) for f in term):
            self.assume(ASSUMES_PARAMETERS)
        else:
            self.require(SizeOfScores(term, coef))

    def rely_on_factor(self, factor: Data) -> None:
        """That 0 times a factor is 0, and that a divisor divides."""
        if self.gradients_reach(factor.node):
            self.assume("factors made from parameters are finite" + (" and not zero" if factor.inverse else ""))
        else:
            self.require(Finite(factor.node, factor.inverse))

    def table_number(self, table: Table) -> int:
        if table.key not in self._tables:
            self._tables[table.key] = len(self._numbered)
            self._numbered.append(table)
        return self._tables[table.key]

    def table(self, at: int) -> Table:
        return self._numbered[at]

    # --- positions ---------------------------------------------------------------------------------

    def position(self, formula: Formula, dtype: torch.dtype) -> Leaf:
        """A formula as numbers of a dtype; Unknown where they are not exact in it."""
        if dtype == torch.bool:
            raise Unknown("positions as truth values")
        if not formula.coefs and isinstance(formula.const, int):
            fixed = number(formula.const, dtype)
            if fixed.value != formula.const:
                raise Unknown(f"{formula.const} in {dtype}")
            return fixed
        most = exact_up_to(dtype)
        least = -most if dtype.is_signed else 0
        if not self.sizes.within(formula, least, most):
            found = self.sizes.range(formula)
            if found is None or all(isinstance(s, int) for s in found):
                raise Unknown(f"positions that are not exact in {dtype}")
            if dtype != torch.int64:  # no tensor has as many elements as those count
                self.require(SizeAtMost(found[1], most))
                self.require(SizeAtMost(-found[0], -least))
        return Position(formula, dtype)

    def test(self, formula: Formula, yes: Any = YES, no: Any = NO) -> Table:
        """Is formula >= 0?"""
        known = self.sizes.always(formula)
        if known is not None:
            return one(yes if known else no)
        if not formula.coefs:
            raise Unknown("it depends on a size that is open")
        coefs, least = formula.coefs, -formula.const
        if all(isinstance(c, int) for _, c in coefs) and isinstance(least, int):
            step = math.gcd(*(int(c) for _, c in coefs))
            coefs, least = tuple((axis, c // step) for axis, c in coefs), -((-least) // step)
        if self.sizes.at_least(coefs[0][1]):
            return of_atom(AtLeast(coefs, least), yes, no)
        return of_atom(AtLeast(tuple((axis, -c) for axis, c in coefs), 1 - least), no, yes)

    def compare(self, name: str, formula: Formula) -> Table:
        """Is formula >= 0, > 0, == 0, …?"""
        match name:
            case "ge":
                return self.test(formula)
            case "gt":
                return self.test(formula - 1)
            case "le":
                return self.test(formula.times(-1))
            case "lt":
                return self.test(formula.times(-1) - 1)
        equal = combine(lambda a, b: truth(a.value and b.value), self.test(formula), self.test(formula.times(-1)))
        return equal if name == "eq" else combine(lambda a: truth(not a.value), equal)

    # --- the recursion -----------------------------------------------------------------------------

    def at(self, node: fx.Node, index: Index) -> Table:
        node = self.first(node)
        if not is_tensor(node):
            return self._size(node)
        index = tidy(node, index)
        if (node, index) not in self._memo:
            self._memo[node, index] = self._score(index) if node is self.qk else self._evaluated(node, index)
        return self._memo[node, index]

    def operand(self, node: fx.Node, index: Index) -> Table:
        """An operand that is broadcast to where `index` points."""
        return self.at(node, broadcast(node, index))

    def _size(self, node: fx.Node) -> Table:
        """A symbolic size is a position that is the same everywhere; a number made of sizes is data."""
        found = value(node)
        if isinstance(found, (int, torch.SymInt)) and not isinstance(found, bool):
            return one(self.position(Formula((), size_of(found)), torch.int64))
        if isinstance(found, (float, torch.SymFloat)):
            return one(just(Data(node, ()), torch.float64))
        raise Unknown("an operand that is no tensor")

    def _evaluated(self, node: fx.Node, index: Index) -> Table:
        try:
            return self._by_rule(node, index)
        except (Unknown, Refused) as why:
            if node not in self.after:
                return self.data(node, index)
            if isinstance(why, Refused):
                raise
            raise Refused(f"{op(node)} between the QK product and the PV product", why, node) from None

    def _by_rule(self, node: fx.Node, index: Index) -> Table:
        if node.op == "get_attr" and not _is_complex(node):
            return self._constant(node)
        if node.op != "call_function":
            raise Unknown("an input")
        if any(_is_complex(x) or _is_empty(x) for x in (node, *node.all_input_nodes)):
            raise Unknown("complex numbers, or none")
        source = indexing.step(self.sizes, node, index)
        if source is not None:
            return self.at(*source)
        rule = NODES.get(op(node))
        if rule is not None:
            models = rule.models
            args = {} if op(node) == "getitem" else arguments(node, models)
            found: Table = rule.apply(self, Call(node, index, args))
            return found
        if not is_pointwise(node):
            raise Unknown(op(node))
        return self._pointwise(node, index)

    def _constant(self, node: fx.Node) -> Table:
        tensor = getattr(node.graph.owning_module, str(node.target), None)
        if not isinstance(tensor, torch.Tensor) or tensor.numel() != 1 or tensor.requires_grad:
            raise Unknown("a constant tensor")
        return one(Number.of(tensor))

    def _pointwise(self, node: fx.Node, index: Index) -> Table:
        operands = node.all_input_nodes
        if not any(is_tensor(x) for x in operands) or not is_tensor(node):
            raise Unknown(op(node))
        tables = [self.operand(x, index) if is_tensor(x) else self._size(x) for x in operands]
        if op(node) == "div" and node in self.after:
            whole = softmax.written_out(self, node, operands, tables)
            if whole is not None:
                return whole

        def leaf(*leaves: Leaf) -> Any:
            call = Call(node, index, leaves=dict(zip(operands, leaves, strict=True)))
            if all(isinstance(x, Number) for x in leaves):
                return folded(call)
            return pointwise.evaluated(self, call)

        return combine(leaf, *tables)

    # --- what is not evaluated further -------------------------------------------------------------

    def data(self, node: fx.Node, index: Index) -> Table:
        """A tensor as it is, or as the pattern that it holds."""
        found = self._patterned(node, index)
        if found is not None:
            return found
        dtype = value(node).dtype
        if dtype == torch.bool:
            return of_atom(Test(node, index))
        return one(just(Data(node, index), dtype))

    def _patterned(self, node: fx.Node, index: Index) -> Table | None:
        constant = self.facts.is_constant(node)
        guessed = self.speculate and not self.gradients_reach(node) and node not in self.after | self.drawn
        if (not constant and not guessed) or _is_complex(node):
            return None
        seen = self.facts.example(node) if rank_of(node) else None
        if seen is None or seen.numel() == 0:
            return None
        found = pattern(self, seen, index)
        if found is not None:
            if not constant:
                self.require(Same(node, seen.clone()))
            return found
        values = two_values(seen) if not constant else None
        if values is None:
            return None
        self.require(TwoValues(node, values))
        leaves = [number(v, seen.dtype) for v in values]
        return of_atom(Test(node, index, "eq", values[0]), *leaves)

    def _score(self, index: Index) -> Table:
        """The QK product. Its element must be the pair's own: one dim is the query, one the key."""
        assert self.qk is not None
        queries = [d for d, i in enumerate(index) if i == Formula.axis(QUERY)]
        keys = [d for d, i in enumerate(index) if i in map(Formula.axis, KEYS)]
        others = [i for d, i in enumerate(index) if d not in queries + keys]
        one_query = len(queries) == 1 or (not queries and self.sizes[QUERY] == 1)
        if not one_query or len(keys) != 1 or any(i.axes & {QUERY, *KEYS} for i in others):
            raise Refused("scores of other pairs than the weights'", written(index), self.qk)
        where = tuple(Formula.axis(KEY) if d in keys else i for d, i in enumerate(index))
        if self.score_index not in (None, where):
            raise Refused("scores are read in two ways", written(index), self.qk)
        self.score_index = where
        score = just(Score(), value(self.qk).dtype)
        return self._added_by_product(self.qk, index, score) if op(self.qk) == "baddbmm" else one(score)

    def _added_by_product(self, node: fx.Node, index: Index, score: Sum) -> Table:
        """What a product adds to what it multiplies; beta = 0 ignores it, NaN included."""
        args = arguments(node, ("self", "batch1", "batch2", "beta", "alpha"))
        given, beta, dtype = args["self"], args["beta"], value(node).dtype
        times = scaled(aten.mul.Tensor, score, args["alpha"], dtype)
        if beta == 0:
            return one(times)

        def leaf(x: Leaf) -> Leaf:
            if isinstance(x, Position):
                x = just(Data(self.first(given), broadcast(given, index)), x.dtype)
            return added(aten.add.Tensor, times, scaled(aten.mul.Tensor, x, beta, dtype), dtype)

        return combine(leaf, self.operand(given, index))


def _is_complex(node: fx.Node) -> bool:
    """Numbers without an order: nothing here speaks of them."""
    return is_tensor(node) and bool(value(node).is_complex())


def _is_empty(node: fx.Node) -> bool:
    return is_tensor(node) and any(isinstance(s, int) and s == 0 for s in value(node).shape)
