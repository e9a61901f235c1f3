"""A softmax over the rows of a sequence whose scores are masked: the rows outside of which it is exactly zero.

The scores are evaluated as those of an attention are, with one query: what a mask is worth is decided at the softmax.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx

from ...graph.nodes import tensor
from .attention.checks import OnBatch
from .attention.evaluate import Evaluator, is_pointwise
from .attention.formula import KEY, QUERY, Formula, Sizes
from .attention.language import NeedsSplit, Refused, Unknown, truth
from .attention.numbers import cast
from .attention.softmax import weights
from .attention.table import Table, combine, reduced
from .axes import Typing
from .calls import COPIES, VIEWS, arg, einsum_labels, op, operand, operands, rank_of, shape, tensors
from .meaning import Predicate
from .sets import Shown
from .spaces import Space
from .telling import Telling
from .zeros import Support, Zeros

SOFTMAXES = ("softmax", "_softmax", "_safe_softmax")


@dataclass(frozen=True)
class MaskedSoftmax:
    """Where a softmax over the columns of a space is not zero."""

    node: fx.Node
    predicates: frozenset[Predicate]  # hold of every visible row
    exactly: bool  # and of no other
    visible: Shown  # (sequences, other dims, columns)
    checks: tuple[OnBatch, ...]

    @property
    def is_safe(self) -> bool:
        """Without a visible row, eager gives zero too."""
        return op(self.node) == "_safe_softmax"


def masked_softmax(node: fx.Node, space: Space, telling: Telling) -> MaskedSoftmax | None:
    """None where nothing tells which rows are hidden."""
    if op(node) not in SOFTMAXES or tuple(telling.typing.atoms(node)[arg(node, "dim") % rank_of(node)]) != space.column:
        return None
    best: MaskedSoftmax | None = None
    for base in _scores(node, telling):
        for speculate in (False, True):
            try:
                found = _evaluated(node, base, space, telling, speculate)
            except (Refused, Unknown, NeedsSplit):
                continue
            if found is not None and (best is None or len(found.predicates) > len(best.predicates)):
                best = found
    return best


def _scores(node: fx.Node, telling: Telling) -> Iterator[fx.Node]:
    """Values that may be the scores before they are masked, the deepest first."""
    chain, at = [], node
    while len(mine := [x for x in tensors(at) if x in telling.meanings.tainted]) == 1:
        at = mine[0]
        chain.append(at)
        if not (is_pointwise(at) or op(at) in VIEWS | COPIES):
            break
    yield from reversed(chain)


def _evaluated(node: fx.Node, base: fx.Node, space: Space, telling: Telling, speculate: bool) -> MaskedSoftmax | None:
    typing, at = telling.typing, arg(node, "dim") % rank_of(node)
    names = [KEY if d == at else f"b{d}" for d in range(rank_of(node))]
    sizes = Sizes({QUERY: 1, **dict(zip(names, shape(node), strict=True))}, telling.known.env)
    ev = Evaluator(telling.known.graph, base, sizes, telling.known, speculate)
    index = tuple(Formula.axis(n) if s != 1 else Formula() for n, s in zip(names, shape(node), strict=True))
    value = tensor(node)
    assert value is not None
    argument = combine(lambda leaf: cast(ev, leaf, value.dtype), ev.at(tensors(node)[0], index))
    weights(ev, node, argument, value.dtype, op(node) == "_safe_softmax")
    soft = ev.softmaxes[-1]
    if not soft.hides:
        return None
    visible = reduced(Table(argument.atoms, {bits: truth(bits in soft.bias) for bits in argument.rows}))
    if any(n in telling.meanings.tainted for n in (a.node for a in visible.atoms if hasattr(a, "node"))):
        return None
    rows = {name: tuple(axes) for name, axes in zip(names, typing.atoms(node), strict=True)}
    told, exactly = telling.of(visible, visible, KEY, rows, sizes)
    # What hides a row for some features alone (a triangle, where queries are features) hides no row.
    predicates = frozenset(p for p in told if set(typing.flat(p.node)) <= set(space.axes))
    exactly = exactly and predicates == told
    if not predicates:
        return None
    dims = _dims(names, typing, node, space)
    if dims is None:
        return None
    return MaskedSoftmax(node, predicates, exactly, Shown.of(visible, dims, sizes), tuple(ev.checks))


def _dims(names: list[str], typing: Typing, node: fx.Node, space: Space) -> tuple[tuple[str, ...], ...] | None:
    """Axes that run over sequences, over anything else, and over columns."""
    pairs = list(zip(names, typing.atoms(node), strict=True))
    sequences = tuple(n for n, axes in pairs if axes and set(axes) <= set(space.sequence))
    if [a for n, axes in pairs if n in sequences for a in axes] != list(space.sequence):
        return None
    return sequences, tuple(n for n in names if n not in (*sequences, KEY)), (KEY,)


# --- products ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pooled:
    """A product that contracts the columns of two values, one of which is zero on pads."""

    space: Space
    left: fx.Node
    right: fx.Node
    equation: tuple[str, str, str]  # letters of the operands and of the result
    support: Support


def pooling_product(n: fx.Node, typing: Typing, zeros: Zeros, space_of: Callable[[Any], Space | None]) -> Pooled | None:
    """A product that contracts columns where one of its operands is zero on pads."""
    labels = _labels(n)
    if labels is None:
        return None
    left, right, (p, v, out) = labels
    for x in (left, right):
        space = space_of(x)
        support = zeros.inside(zeros.factor(left) | zeros.factor(right), space.axes) if space else frozenset()
        if space is None or not space.column or not support:
            continue
        mine, others = dict(zip(p, typing.atoms(left), strict=True)), dict(zip(v, typing.atoms(right), strict=True))
        letters = mine | others
        gone = [c for c in dict.fromkeys(p + v) if c not in out]
        if len(gone) != 1 or tuple(letters[gone[0]]) != space.column or gone[0] not in p or gone[0] not in v:
            continue
        unlike = (left, right) if space_of(left) != space_of(right) else ()
        # Data may say more than which rows these are: places of a row among those that are picked, for one.
        both = all(space_of(o) == space or o not in zeros.meanings.tainted for o in unlike)
        # Heads may lie in the dim of sequences, of both.
        aligned = all(not set(d) & set(space.axes) or mine.get(c) == others.get(c) for c, d in letters.items())
        if both and aligned:
            return Pooled(space, left, right, (p, v, out), support)
    return None


def _labels(n: fx.Node) -> tuple[fx.Node, fx.Node, tuple[str, str, str]] | None:
    """A product as an einsum."""
    if op(n) == "einsum":
        labels = einsum_labels(n)
        if labels is None or len(labels[0]) != 2:
            return None
        (p, v), out = labels
        left, right = operands(n, 1)
        return left, right, (p, v, out)
    left, right = operand(n), operand(n, 1)
    if rank_of(left) != rank_of(right) or rank_of(left) < 3:
        return None
    batch = "abcdefgh"[: rank_of(left) - 2]
    return left, right, (f"{batch}xy", f"{batch}yz", f"{batch}xz")
