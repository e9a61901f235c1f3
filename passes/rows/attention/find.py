"""Which products may be the PV product of an attention, and which products behind them may be its scores."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from ..calls import is_tensor, op, rank_of
from .products import PRODUCTS, Contraction, contraction

ACTIVATIONS = {"softmax", "_softmax", "_safe_softmax", "silu", "sigmoid", "relu", "exp", "gelu"}
FUSED = "scaled_dot_product_attention"
_ENDS = {*PRODUCTS, FUSED, "linear", "addmm", "embedding", "layer_norm"}
_FARTHEST = 400  # nodes between a PV product and its QK product


@dataclass(frozen=True)
class Candidate:
    """Weights of a product, the dims that run over queries (None: one query) and keys, and a product of scores."""

    product: Contraction
    weights: fx.Node
    query: int | None
    key: int
    qk: fx.Node


def candidates(node: fx.Node) -> Iterator[Candidate]:
    """Ways to read a product as the PV product of an attention.

    Several products may feed one score; any of them can be the scores, the others are biases then, with gradients.
    """
    product = contraction(node) if op(node) != "baddbmm" else None  # that adds something to the result
    if product is None or len(product.contracted) != 1:
        return
    (inner,) = product.contracted
    for weights, labels, values, others in product.sides():
        if op(weights) in PRODUCTS or (rank_of(values) == 2 and rank_of(weights) > 2):
            continue  # a layer: its hidden units are no keys, and its matrix no values
        scores, between = _behind(weights)
        mine = [qk for qk in scores if _activated(qk, weights, between)]
        key = labels.index(inner)
        free = [d for d, c in enumerate(labels) if c in product.out_labels and c not in others]
        queries: list[int | None] = [*sorted(free, key=lambda d: abs(d - key))]
        for query in queries or [None]:
            for qk in mine:
                yield Candidate(product, weights, query, key, qk)


def is_candidate(node: fx.Node) -> bool:
    return op(node) == FUSED or next(candidates(node), None) is not None


def _behind(weights: fx.Node) -> tuple[list[fx.Node], set[fx.Node]]:
    """Products behind weights with none in between, and what lies in between."""
    todo, seen, found = [weights], {weights}, []
    while todo and len(seen) < _FARTHEST:
        node = todo.pop()
        if op(node) in _ENDS:
            found += [node] if op(node) in PRODUCTS else []
            continue
        new = [n for n in node.all_input_nodes if n not in seen and (is_tensor(n) or op(n))]
        seen.update(new)
        todo += new
    return found, seen


def _activated(qk: fx.Node, weights: fx.Node, between: set[fx.Node]) -> bool:
    """Is there an activation on the way from scores to weights?"""
    after, todo = set(), [qk]
    while todo:
        for user in todo.pop().users:
            if user in between and user not in after:
                after.add(user)
                todo.append(user)
    return weights in after and any(op(n) in ACTIVATIONS for n in after)
