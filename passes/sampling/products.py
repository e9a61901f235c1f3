"""Products of two tensors summed over one dim, however they are spelled, with a label on every dim."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ...graph.nodes import tensor
from ...graph.shapes import same_size
from ...rules.pattern import arguments
from ..common.cross_entropy import value_of

aten = torch.ops.aten
SUMMED = "sum"  # the label of the dim that is summed over
Labels = tuple[str, ...]  # one for each dim; '' for a dim of one, which is as good as none


@dataclass(frozen=True)
class Product:
    """result[...] = sum over one dim of first[...] * second[...]."""

    node: fx.Node
    nodes: tuple[fx.Node, ...]  # what computes it; the last is `node`
    operands: tuple[fx.Node, fx.Node]
    labels: tuple[Labels, Labels]
    result: Labels
    stores_pairs: bool = False  # the elementwise product is a tensor of its own
    eps: float = -1.0  # both operands are divided by max(norm, eps) first; not if negative

    def swapped(self) -> Product:
        (a, b), (p, q) = self.operands, self.labels
        return Product(self.node, self.nodes, (b, a), (q, p), self.result, self.stores_pairs, self.eps)


def product_of(node: fx.Node) -> Product | None:
    """None where the node is no such product."""
    read = _READERS.get(node.target)
    found = read(node) if read is not None and tensor(node) is not None else None
    if found is None or not all(SUMMED in labels for labels in found.labels):
        return None
    first, second = (value_of(x).shape[of.index(SUMMED)] for x, of in zip(found.operands, found.labels, strict=True))
    if not same_size(first, second):
        return None  # one number for a whole row
    return found if all(value_of(x).is_floating_point() for x in found.operands) else None


def _drop_ones(labels: Labels, x: fx.Node) -> Labels:
    return tuple("" if name != SUMMED and same_size(size, 1) else name for name, size in _zip(labels, value_of(x)))


def _zip(labels: Labels, value: torch.Tensor) -> Any:
    return zip(labels, value.shape, strict=True)


def _labelled(node: fx.Node, a: Any, b: Any, of_a: Labels, of_b: Labels, result: Labels) -> Product:
    return Product(node, (node,), (a, b), (_drop_ones(of_a, a), _drop_ones(of_b, b)), _drop_ones(result, node))


def _bmm(node: fx.Node) -> Product:
    a, b = node.args[:2]
    return _labelled(node, a, b, ("t", "i", SUMMED), ("t", SUMMED, "j"), ("t", "i", "j"))


def _mm(node: fx.Node) -> Product:
    a, b = node.args[:2]
    return _labelled(node, a, b, ("i", SUMMED), (SUMMED, "j"), ("i", "j"))


def _matmul(node: fx.Node) -> Product:
    a, b = node.args[:2]
    dims = value_of(a).dim(), value_of(b).dim()
    batch = [f"t{i}" for i in range(max(*dims, 2) - 2)]  # counted from the right: t0 is next to the matrix
    of_a = (*_last(batch, dims[0] - 2), "i", SUMMED) if dims[0] > 1 else (SUMMED,)
    of_b = (*_last(batch, dims[1] - 2), SUMMED, "j") if dims[1] > 1 else (SUMMED,)
    result = (*reversed(batch), *("i" for _ in range(dims[0] > 1)), *("j" for _ in range(dims[1] > 1)))
    return _labelled(node, a, b, of_a, of_b, result)


def _last(batch: list[str], count: int) -> Labels:
    return tuple(reversed(batch[: max(count, 0)]))


def _linear(node: fx.Node) -> Product | None:
    a = arguments(node)
    if a["bias"] is not None or value_of(a["weight"]).dim() != 2:
        return None
    rows = tuple(f"i{i}" for i in range(value_of(a["input"]).dim() - 1))
    return _labelled(node, a["input"], a["weight"], (*rows, SUMMED), ("j", SUMMED), (*rows, "j"))


def _einsum(node: fx.Node) -> Product | None:
    """Two operands without repeated letters, one letter summed over."""
    equation, operands = node.args[:2]
    assert isinstance(equation, str) and isinstance(operands, (list, tuple))
    inputs, arrow, result = equation.replace(" ", "").partition("->")
    letters = inputs.split(",")
    if len(letters) != 2 or not arrow or "." in equation or any(len(set(x)) != len(x) for x in (*letters, result)):
        return None
    summed = {*letters[0], *letters[1]} - set(result)
    if len(summed) != 1:
        return None
    named = [tuple(SUMMED if c in summed else c for c in x) for x in (*letters, result)]
    return _labelled(node, *operands, *named)


def _sum(node: fx.Node) -> Product | None:
    """(a * b).sum(dim)."""
    a = arguments(node)
    product, dims = a["self"], a["dim"]
    if product.target is not aten.mul.Tensor or not isinstance(dims, (list, tuple)) or len(dims) != 1:
        return None
    found = _pairs(node, product.args[0], product.args[1], dims[0], bool(a["keepdim"]))
    same_type = a["dtype"] is None or a["dtype"] == value_of(product).dtype
    if found is None or not same_type:
        return None
    return Product(node, (product, node), found.operands, found.labels, found.result, stores_pairs=True)


def _cosine(node: fx.Node) -> Product | None:
    a = arguments(node)
    found = _pairs(node, a["x1"], a["x2"], a["dim"], False)
    if found is None:
        return None
    return Product(node, (node,), found.operands, found.labels, found.result, stores_pairs=True, eps=float(a["eps"]))


def _pairs(node: fx.Node, a: Any, b: Any, dim: int, keepdim: bool) -> Product | None:
    """Operands that broadcast against each other, summed over one dim."""
    if tensor(a) is None or tensor(b) is None:
        return None
    rank = max(value_of(a).dim(), value_of(b).dim())
    names = [f"i{i}" for i in range(rank)]
    names[dim] = SUMMED
    of_a, of_b = (tuple(names[rank - value_of(x).dim() :]) for x in (a, b))
    kept = tuple("" if n == SUMMED else n for n in names if keepdim or n != SUMMED)
    return _labelled(node, a, b, of_a, of_b, kept)


_READERS: dict[Any, Callable[[fx.Node], Product | None]] = {
    aten.bmm.default: _bmm,
    aten.mm.default: _mm,
    aten.matmul.default: _matmul,
    aten.linear.default: _linear,
    aten.einsum.default: _einsum,
    aten.sum.dim_IntList: _sum,
    aten.cosine_similarity.default: _cosine,
}
