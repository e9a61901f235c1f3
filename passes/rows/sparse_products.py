"""Rows times a matrix from the batch that is zero for most of them: one-hot rows that pick, weights of some places.

    hidden = torch.bmm(places, rows)    # places: (sequences, picked, columns), made before the step

Rows in whose place the whole matrix is zero have no part in the product. Written as

    hidden = torch.bmm(places, rows * (places != 0).any(-2)[..., None])

it says so: value and gradients are the same, also where rows are not finite. Whether a matrix is of that kind the batch
seen tells; a later one that is not costs rows, and is right all the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, fx

from ...graph.nodes import tensor
from .apart import Apart, apart_as
from .calls import live, op, operand, rank_of
from .spaces import Space

if TYPE_CHECKING:
    from .analysis import RowAnalysis

_PRODUCTS = ("bmm", "matmul")


def take_apart_sparse_products(graph: fx.Graph, analysis: RowAnalysis) -> list[Apart]:
    """Products at which rows end, and that read only those which a matrix of the batch does not leave out."""
    found = [_apart_if_sparse(node, analysis) for node in live(graph) if op(node) in _PRODUCTS]
    return [apart for apart in found if apart is not None]


def _apart_if_sparse(node: fx.Node, analysis: RowAnalysis) -> Apart | None:
    demand, (left, right) = analysis.demand, (operand(node), operand(node, 1))
    if node in demand.decisions or rank_of(left) != rank_of(right) or rank_of(left) < 3:
        return None
    if _contracts(right, -2, analysis) and _leaves_out(left, -2, analysis):
        return apart_as(node, _by_left)
    if _contracts(left, -1, analysis) and _leaves_out(right, -1, analysis):
        return apart_as(node, _by_right)
    return None


def _contracts(rows: fx.Node, dim: int, analysis: RowAnalysis) -> bool:
    """Are these rows, summed up by sequence?"""
    demand = analysis.demand
    space: Space | None = demand.space_of(rows)
    if rows not in demand.meanings.tainted or space is None or not space.column:
        return False
    return tuple(demand.typing.atoms(rows)[dim]) == space.column


def _leaves_out(weights: fx.Node, picked: int, analysis: RowAnalysis) -> bool:
    """Is it a matrix of the batch with places that are zero for all that is picked?"""
    meanings, value = analysis.demand.meanings, tensor(weights)
    if weights in meanings.tainted or value is None or not value.dtype.is_floating_point:
        return False
    seen = meanings.example(weights)
    if seen is None:
        return False
    used = (seen != 0).any(picked)
    return bool(used.any()) and not bool(used.all())


def _by_left(weights: Tensor, rows: Tensor) -> Tensor:
    return weights @ (rows * (weights != 0).any(-2).unsqueeze(-1))


def _by_right(rows: Tensor, weights: Tensor) -> Tensor:
    return (rows * (weights != 0).any(-1).unsqueeze(-2)) @ weights
