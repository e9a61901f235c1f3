"""Products over keys whose weights are no scores: given by the batch, by positions, by times, or learned.

    out[q] = sum over keys of weights[q, k] · values[k]

The normal form is that of an attention without queries and keys, whose biases are its weights. Weights that the batch
gives hide the pairs for which they are zero; of those that gradients reach nothing is hidden but what a mask hides, for
the gradient of a weight that happens to be zero is not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx

from ..calls import op
from .bias import checks_of, classified
from .calls import shape
from .evaluate import Evaluator
from .facts import Facts
from .formula import KEY, QUERY, WIDTH, ZERO, Formula, Size
from .indexing import tidy
from .language import Data, NeedsSplit, Number, Refused, Sum, Test, Unknown, is_zero
from .normal import HIDDEN, Blindness, NormalForm
from .products import Contraction, Labels, contraction, placed
from .recognise import SPLITS, Axes
from .table import combine, of_atom


@dataclass(frozen=True)
class Weighing:
    """A way to read a product: which side holds weights, and which of its dims are queries and keys."""

    product: Contraction
    weights: fx.Node
    labels: Labels
    values: fx.Node
    others: Labels
    query: int
    key: int

    @property
    def contracted(self) -> int:
        """The dim of values that runs over keys."""
        return self.others.index(self.labels[self.key])


def weighings(node: fx.Node) -> Iterator[Weighing]:
    product = contraction(node) if op(node) != "baddbmm" else None  # that adds something to the result
    if product is None or len(product.contracted) != 1:
        return
    (inner,) = product.contracted
    for weights, labels, values, others in product.sides():
        key = labels.index(inner)
        free = [d for d, c in enumerate(labels) if c in product.out_labels and c not in others]
        for query in sorted(free, key=lambda d: abs(d - key)):
            yield Weighing(product, weights, labels, values, others, query, key)


def weighed(found: Weighing, facts: Facts) -> NormalForm:
    """Its normal form; Refused where a kernel cannot say it."""
    splits: dict[str, Size] = {}
    for _ in range(SPLITS):
        try:
            return _Weighed(found, splits, facts).solved()
        except NeedsSplit as split:
            splits[split.axis] = split.inner
        except Unknown as unknown:
            raise Refused("too much to tell apart", unknown, found.product.node) from None
    raise Refused("a view that cuts across dims", splits, found.product.node)


class _Weighed(Axes):
    def __init__(self, found: Weighing, splits: dict[str, Size], facts: Facts) -> None:
        super().__init__(found.product.node, splits, facts)
        self.found = found

    def solved(self) -> NormalForm:
        found, product = self.found, self.found.product
        roles = {found.query: QUERY, found.key: KEY}
        index = tuple(self.dim(roles.get(d, f"b{d}"), s) for d, s in enumerate(shape(found.weights)))
        if 1 in (self.sizes[QUERY], self.sizes[KEY]):
            raise Refused("one query or key only", "", self.node)
        places = dict(zip(found.labels, index, strict=True))
        for d, c in enumerate(found.others):
            if c in places and places[c] != ZERO:
                continue
            if self.facts.is_sequence(found.values, d):
                places[c] = self.dim(f"s{d}", shape(found.values)[d])
            else:
                axis = WIDTH if d == len(found.others) - 1 else f"{WIDTH}{d}"
                self.sizes.of[axis] = shape(found.values)[d]
                places[c] = Formula.axis(axis)
        value = self.operand(found.values, placed(found.values, found.others, places))
        ev = Evaluator(self.node.graph, None, self.sizes, self.facts, False)
        cases = combine(self._case, ev.at(found.weights, index))
        sums = {bits: leaf for bits, leaf in cases.rows.items() if leaf is not HIDDEN}
        if not sums:
            raise Refused("all weights are zero", "", self.node)
        biases = classified(sums, cases, self.sizes, self.facts)
        data = [f for leaf in sums.values() for f in leaf.factors]
        tests = [a for a in cases.atoms if isinstance(a, Test)]
        read = [(x.node, x.index) for x in (value, *data, *tests)]
        checks = (*ev.checks, *(c for bias in biases for c in checks_of(bias)))
        return NormalForm(
            self.node, None, None, value, tidy(self.node, tuple(places[c] for c in product.out_labels)),
            tuple(self.names), self.sizes, self.sequences(read), "linear", 1.0, cases, biases=tuple(biases),
            blind=Blindness.ZERO, assumptions=tuple(ev.assumptions), checks=checks,
        )  # fmt: skip

    def _case(self, leaf: Any) -> Any:
        """The weight of a pair; hidden where it is zero."""
        if is_zero(leaf):
            return HIDDEN
        if isinstance(leaf, Number):
            return Sum((), float(leaf.value), leaf.dtype)
        if not isinstance(leaf, Sum) or not all(isinstance(f, Data) for f in leaf.factors):
            raise Refused("weights that are no sum of tensors", leaf, self.node)
        given = leaf.single
        if not isinstance(given, Data) or given.inverse or self.facts.gradients_reach(given.node):
            return leaf
        return of_atom(Test(given.node, given.index, "eq", 0.0), HIDDEN, leaf)
