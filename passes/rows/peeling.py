"""Attention, recognised by what it computes and not by how it is written.

Everything between the QK product and the PV product is collected and classified: scale, masks, biases, activation,
dropout. What cannot be classified refuses with a sentence for the model's author.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ...graph.nodes import tensor
from .axes import Axis, Typing, einsum_labels
from .meaning import MINUS_INFINITY, Band, Holds, Literal, Meanings, Predicate, Two
from .ops import COPIES, VIEWS, arg, is_tensor, op, rank_of, shape
from .sets import UNBOUNDED
from .spaces import Space


class Refused(Exception):
    """Not an attention that can be packed."""

    def __init__(self, text: str, node: fx.Node, hint: str = "") -> None:
        super().__init__(text)
        self.text, self.node, self.hint = text, node, hint


@dataclass(frozen=True)
class Pairs:
    """A tensor that is read per pair of query and key."""

    node: fx.Node
    query: int | None  # its dims that run over queries and keys
    key: int | None
    multiplier: float = 1.0  # of a bias
    keeps: str = "true"  # of a mask: where it is 'true', 'false', or 'additive': above minus infinity


@dataclass
class Attention:
    node: fx.Node
    query: fx.Node
    key: fx.Node
    value: fx.Node
    queries: Space
    keys: Space
    heads: tuple[Axis, ...]
    depth: tuple[Axis, ...]
    value_depth: tuple[Axis, ...]
    activation: str = ""
    scale: float = 1.0
    post_scale: float = 1.0
    dropout: float = 0.0
    least: int = -UNBOUNDED  # distance from key to query, in columns
    most: int = UNBOUNDED
    predicates: frozenset[Predicate] = frozenset()  # keys that count
    query_predicates: frozenset[Predicate] = frozenset()  # other queries give zero
    required: frozenset[Predicate] = frozenset()  # queries that matter must hold these: eager averages otherwise
    divisors: list[fx.Node] = field(default_factory=list)  # sizes that the weights are divided by
    masks: list[Pairs] = field(default_factory=list)
    biases: list[Pairs] = field(default_factory=list)
    zero_when_blind: bool = False  # a query without visible key gives zero in eager too
    finite_fill: bool = False  # what removes a score is a large number, not infinity
    cleans_nan: bool = False  # weights that are not a number become zero
    masked_again: list[tuple[Any, fx.Node, fx.Node, int | None, int]] = field(default_factory=list)
    chain: list[fx.Node] = field(default_factory=list)  # from the PV product back to the QK product

    @property
    def self_attention(self) -> bool:
        return self.queries == self.keys

    @property
    def bounded(self) -> bool:
        """Does distance alone bound which keys are seen?"""
        return self.least > -UNBOUNDED or self.most < UNBOUNDED


@dataclass
class Recognizer:
    typing: Typing
    meanings: Meanings
    space_of: Callable[[Any], Space | None]

    def recognize(self, node: fx.Node) -> Attention | None:
        """The attention whose result is `node`; None where it is none, `Refused` where it almost is."""
        if op(node) == "scaled_dot_product_attention":
            return self._fused(node)
        found = self._product(node)
        if found is None:
            return None
        weights, value, query_dim, key_dim = found
        keys = self.space_of(value)
        atoms = self.typing.atoms(weights)
        if keys is None or not keys.column or tuple(atoms[key_dim]) != keys.column:
            return None
        flat = [a for i, d in enumerate(atoms) for a in d if i not in (query_dim, key_dim)]
        if not set(keys.sequence) <= set(flat) or weights not in self.meanings.tainted:
            return None
        if not self._from_product(weights):
            return None
        column = tuple(atoms[query_dim]) if query_dim is not None else ()
        heads = tuple(a for a in flat if a not in keys.sequence)
        value_depth = tuple(a for a in self.typing.flat(value) if a not in (*keys.axes, *heads))
        a = Attention(node, value, value, value, Space(keys.sequence, column), keys, heads, (), value_depth)
        self._walk(a, weights, query_dim, key_dim)
        return a

    def _product(self, node: fx.Node) -> tuple[fx.Node, fx.Node, int | None, int] | None:
        """(weights, values, query dim, key dim) of a product that contracts the last dim of pair weights."""
        if op(node) in ("matmul", "bmm") and all(rank_of(x) > 2 for x in node.args[:2]):
            weights, value = node.args[:2]
            return weights, value, rank_of(weights) - 2, rank_of(weights) - 1  # type: ignore[return-value]
        if op(node) != "einsum" or len(node.args[1]) != 2 or einsum_labels(node) is None:  # type: ignore[arg-type]
            return None
        (left, right), out = einsum_labels(node)  # type: ignore[misc]
        for p, v, weights, value in ((left, right, *node.args[1]), (right, left, *node.args[1][::-1])):  # type: ignore[misc,index]
            contracted = [c for c in p if c in v and c not in out]
            queries = [c for c in p if c in out and c not in v]
            if len(contracted) == 1 and len(queries) <= 1 and self._from_product(weights):
                return weights, value, p.index(queries[0]) if queries else None, p.index(contracted[0])
        return None

    def _from_product(self, node: fx.Node, depth: int = 24) -> bool:
        """Do pair weights descend from a product, through what may lie between QK and PV?"""
        todo, seen = [node], {node}
        while todo and len(seen) < 4 * depth:
            x = todo.pop()
            if op(x) in ("matmul", "bmm", "baddbmm", "einsum"):
                return True
            if op(x) in _BETWEEN or op(x) in VIEWS | COPIES:
                new = [n for n in x.all_input_nodes if is_tensor(n) and n not in seen and rank_of(n) > 1]
                seen.update(new)
                todo += new
        return False

    # --- the walk from PV back to QK ---------------------------------------------------------------

    def _walk(self, a: Attention, x: fx.Node, query: int | None, key: int) -> None:
        multiplier = 1.0
        while True:
            a.chain.append(x)
            name = op(x)
            if name == "detach":
                raise Refused("gradients stop between the QK product and the PV product", x)
            if name in COPIES or name in ("_to_copy", "to"):
                x = x.args[0]  # type: ignore[assignment]
            elif name in VIEWS:
                x, query, key = self._through_view(a, x, query, key)
            elif name == "dropout":
                if arg(x, "train") and arg(x, "p"):
                    if a.activation or a.dropout:
                        raise Refused("dropout of scores before the activation", x)
                    a.dropout = float(arg(x, "p"))
                x = x.args[0]  # type: ignore[assignment]
            elif name == "nan_to_num" and not a.activation and not arg(x, "nan"):
                a.cleans_nan = True
                x = x.args[0]  # type: ignore[assignment]
            elif name in ("softmax", "_softmax", "_safe_softmax", "silu"):
                if a.activation:
                    raise Refused("two activations between QK and PV", x)
                if name != "silu" and arg(x, "dim") % rank_of(x) != key:
                    raise Refused("softmax runs over another dim than the keys", x)
                a.activation = "silu" if name == "silu" else "softmax"
                a.zero_when_blind = a.zero_when_blind or name == "_safe_softmax"
                a.post_scale, multiplier = multiplier, 1.0
                x = x.args[0]  # type: ignore[assignment]
            elif name in ("mul", "div", "multiply") and self.meanings.constant(x.args[1]) is not None:
                factor = float(self.meanings.constant(x.args[1]))
                multiplier = multiplier / factor if name == "div" else multiplier * factor
                x = x.args[0]  # type: ignore[assignment]
            elif name == "div" and not a.activation and _is_size(x.args[1]):
                a.divisors.append(x.args[1])  # type: ignore[arg-type]
                x = x.args[0]  # type: ignore[assignment]
            elif name in ("mul", "multiply"):
                score, mask = self._sides(x)
                self._mask_after(a, mask, x, query, key)
                x = score
            elif name == "add":
                if not a.activation:
                    raise Refused("addition to attention weights after the activation", x)
                score, added = self._sides(x)
                self._added(a, added, x, query, key, multiplier * float(arg(x, "alpha", 1)))
                x = score
            elif name in ("masked_fill", "where"):
                x = self._filled(a, x, query, key)
            elif name in ("matmul", "bmm", "baddbmm", "einsum"):
                self._query_and_key(a, x, query, key, multiplier)
                self._finish(a)
                return
            else:
                raise Refused(f"{name or x.op} between the QK product and the PV product", x)

    def _through_view(self, a: Attention, x: fx.Node, query: int | None, key: int) -> tuple[fx.Node, int | None, int]:
        source = x.args[0]
        assert isinstance(source, fx.Node)
        to = self.meanings.view(x)
        places = {to(i): i for i in range(rank_of(source))}
        if key not in places or (query is not None and query not in places):
            if query is not None and shape(x)[query] == 1 and key in places:
                return source, None, places[key]
            raise Refused("a view of attention weights that mixes queries and keys", x)
        return source, None if query is None else places[query], places[key]

    def _sides(self, x: fx.Node) -> tuple[fx.Node, fx.Node]:
        """The operand on the way to the QK product, and the other one."""
        left, right = x.args[:2]
        if not isinstance(right, fx.Node) or not isinstance(left, fx.Node):
            raise Refused(f"{op(x)} of scores with something that is no tensor", x)
        mine = [n for n in (left, right) if n in self.meanings.tainted and self._from_product(n)]
        if not mine:
            raise Refused("no QK product behind the attention weights", x)
        return (left, right) if mine[0] is left else (right, left)

    def _mask_after(self, a: Attention, mask: fx.Node, x: fx.Node, query: int | None, key: int) -> None:
        """A product with a mask: after SiLU, or of rows of queries."""
        two = self.meanings.two(mask)
        literals = two.keeps() if two is not None else None
        if a.activation == "softmax" or a.activation == "silu":
            raise Refused("scores are multiplied with a tensor before the activation", x)
        offset = rank_of(x) - rank_of(mask)
        pure = literals is not None and all(self._is_query_literal(a, k, offset, x, query) for k in literals)
        before = self._activation_behind(x)
        if pure:
            assert literals is not None
            a.query_predicates |= {k.predicate for k in literals if isinstance(k, Holds)}
        elif before == "softmax":
            a.masked_again.append((literals, mask, x, query, key))
        elif literals is None or not self._absorb(a, literals, offset, x, query, key):
            self._pair_mask(a, mask, x, query, key, "true")

    def _finish(self, a: Attention) -> None:
        """Masks after the softmax may only repeat what was masked before it."""
        a.zero_when_blind = a.zero_when_blind or (a.cleans_nan and not a.finite_fill)
        for literals, mask, x, query, key in a.masked_again:
            again = Attention(a.node, a.query, a.key, a.value, a.queries, a.keys, a.heads, a.depth, a.value_depth)
            known = literals is not None and self._absorb(again, literals, rank_of(x) - rank_of(mask), x, query, key)
            repeats = again.least <= a.least and again.most >= a.most and again.predicates <= a.predicates
            same = any(m.node is mask and m.keeps == "true" for m in a.masks)
            if not (known and repeats) and not same:
                raise Refused("attention weights are masked after the softmax: the pads have been counted in its sum",
                              x, "mask the scores before the softmax")  # fmt: skip
            a.query_predicates |= again.query_predicates
            whole = (again.least, again.most, again.predicates) == (a.least, a.most, a.predicates)
            a.zero_when_blind = a.zero_when_blind or (known and whole and not a.masks) or same

    def _activation_behind(self, x: fx.Node) -> str:
        todo, seen = [x], {x}
        while todo:
            n = todo.pop()
            if op(n) in ("softmax", "_softmax", "_safe_softmax"):
                return "softmax"
            if op(n) == "silu":
                return "silu"
            if op(n) in _BETWEEN or op(n) in VIEWS | COPIES:
                new = [k for k in n.all_input_nodes if is_tensor(k) and k not in seen and k in self.meanings.tainted]
                seen.update(new)
                todo += new
        return ""

    def _is_query_literal(self, a: Attention, k: Literal, offset: int, x: fx.Node, query: int | None) -> bool:
        if not isinstance(k, Holds) or query is None:
            return False
        atoms = self.typing.atoms(x)
        return any(d + offset == query for d in k.dims) and all(
            d + offset == query or set(atoms[d + offset]) <= {*a.keys.sequence, *a.heads} for d in k.dims
        )

    def _added(self, a: Attention, added: fx.Node, x: fx.Node, query: int | None, key: int, multiplier: float) -> None:
        summed = op(added) == "add" and arg(added, "alpha", 1) == 1 and all(is_tensor(p) for p in added.args[:2])
        if summed and self.meanings.two(added) is None:  # a mask and a bias, say
            for part in added.args[:2]:
                self._added(a, part, x, query, key, multiplier)  # type: ignore[arg-type]
            return
        two = self.meanings.two(added)
        literals = two.admits() if two is not None and multiplier > 0 else None
        offset = rank_of(x) - rank_of(added)
        if literals is not None:
            assert two is not None
            a.finite_fill = a.finite_fill or -math.inf not in (two.yes, two.no)
            if not self._absorb(a, literals, offset, x, query, key):
                self._pair_mask(a, added, x, query, key, "additive")
            return
        mask, rest = self._filled_bias(added)
        if mask is not None and multiplier > 0:
            a.finite_fill = True
            self._added(a, rest, x, query, key, multiplier)
            self._keep(a, mask, x, query, key)
            return
        if multiplier > 0 and self.meanings.mask_of_pairs(added, "additive"):
            a.finite_fill = True
            self._pair_mask(a, added, x, query, key, "additive")
            return
        q, k = _aligned(added, x, query), _aligned(added, x, key)
        a.biases.append(Pairs(added, q, k, multiplier))

    def _filled_bias(self, added: fx.Node) -> tuple[fx.Node | None, Any]:
        """(mask, bias) of where(mask, bias, minus infinity)."""
        while op(added) in COPIES:
            added = added.args[0]  # type: ignore[assignment]
        if op(added) != "where" or len(added.args) < 3 or not all(is_tensor(p) for p in added.args[:2]):
            return None, None
        filler = self.meanings.constant(added.args[2])
        known = filler is not None and filler <= MINUS_INFINITY
        return (added.args[0], added.args[1]) if known else (None, None)  # type: ignore[return-value]

    def _keep(self, a: Attention, mask: fx.Node, x: fx.Node, query: int | None, key: int) -> None:
        """Scores count where a boolean mask is true."""
        two = self.meanings.two(mask)
        literals = two.keeps() if two is not None else None
        if literals is None or not self._absorb(a, literals, rank_of(x) - rank_of(mask), x, query, key):
            self._pair_mask(a, mask, x, query, key, "true")

    def _filled(self, a: Attention, x: fx.Node, query: int | None, key: int) -> fx.Node:
        """masked_fill or where: scores or weights kept where a mask says so."""
        if op(x) == "where":
            mask, yes, no = x.args[:3]
            kept = self.meanings.constant(no) is not None
            score, value = (yes, no) if kept else (no, yes)
        else:
            score, mask, value = x.args[:3]
            kept = False
        filler = self.meanings.constant(value)
        wanted = a.activation == "softmax" and filler is not None and filler <= MINUS_INFINITY
        wanted = wanted or (not a.activation and filler == 0)
        if not wanted or not isinstance(score, fx.Node) or not isinstance(mask, fx.Node):
            raise Refused("scores are filled with something other than minus infinity", x)
        a.finite_fill = a.finite_fill or (bool(a.activation) and filler != -math.inf)
        two = self.meanings.two(mask)
        if two is not None and not kept:
            two = Two(two.literals, not two.yes, not two.no)
        literals = two.keeps() if two is not None else None
        offset = rank_of(x) - rank_of(mask)
        if not a.activation and self._activation_behind(x) == "softmax":
            if literals is None or not all(self._is_query_literal(a, k, offset, x, query) for k in literals):
                raise Refused("attention weights are masked after the softmax", x, "mask the scores before the softmax")
            a.query_predicates |= {k.predicate for k in literals if isinstance(k, Holds)}
        elif literals is None or not self._absorb(a, literals, offset, x, query, key):
            self._pair_mask(a, mask, x, query, key, "true" if kept else "false")
        return score

    def _absorb(
        self, a: Attention, literals: frozenset[Literal], offset: int, x: fx.Node, query: int | None, key: int
    ) -> bool:
        """Take the literals of a mask as they are; False where one of them needs the mask itself."""
        atoms = self.typing.atoms(x)
        least, most, predicates = a.least, a.most, set(a.predicates)
        hidden: set[Predicate] = set()  # of queries
        for literal in literals:
            if isinstance(literal, Band):
                i, j = literal.i + offset, literal.j + offset
                if not isinstance(literal.least, int) or {i, j} != {query, key}:
                    return False
                if i == query:
                    least = max(least, literal.least)
                else:
                    most = min(most, -literal.least)
                continue
            rows = [d + offset for d in literal.dims]
            if self._is_query_literal(a, literal, offset, x, query):
                hidden.add(literal.predicate)
                continue
            if any(d != key and not set(atoms[d]) <= {*a.keys.sequence, *a.heads} for d in rows):
                return False
            if not set(self.typing.flat(literal.predicate.node)) <= set(a.keys.axes):
                return False
            predicates.add(literal.predicate)
        a.least, a.most, a.predicates = least, most, frozenset(predicates)
        self._hide(a, hidden)
        return True

    def _hide(self, a: Attention, queries: set[Predicate]) -> None:
        """Masked queries give zero, or in a softmax an average over everything, which must not matter."""
        if a.activation == "softmax" and not a.zero_when_blind:
            a.required |= queries
        else:
            a.query_predicates |= queries

    def _pair_mask(self, a: Attention, mask: fx.Node, x: fx.Node, query: int | None, key: int, keeps: str) -> None:
        value = tensor(mask)
        assert value is not None
        binary = value.dtype == torch.bool or keeps == "additive" or self.meanings.two(mask) is not None
        if mask in self.meanings.tainted or not (binary or self.meanings.mask_of_pairs(mask, "binary")):
            raise Refused("a mask of pairs that is not made from the batch alone", x)
        a.masks.append(Pairs(mask, _aligned(mask, x, query), _aligned(mask, x, key), keeps=keeps))

    # --- the QK product ----------------------------------------------------------------------------

    def _query_and_key(self, a: Attention, x: fx.Node, query: int | None, key: int, multiplier: float) -> None:
        if not a.activation:
            raise Refused("no activation between the QK product and the PV product", x)
        a.scale = multiplier
        if op(x) == "baddbmm":
            added, left, right = x.args[:3]
            a.scale = multiplier * float(arg(x, "alpha", 1))
            self._added(a, added, x, query, key, multiplier * float(arg(x, "beta", 1)))  # type: ignore[arg-type]
        elif op(x) == "einsum":
            labels = einsum_labels(x)
            if labels is None or len(x.args[1]) != 2:  # type: ignore[arg-type]
                raise Refused("an einsum with more than two operands or '...'", x)
            (p, r), out = labels
            left, right = x.args[1]  # type: ignore[misc,str-unpack]
            if out[key] in p and (query is None or out[query] in r):
                left, right, p, r = right, left, r, p
            if out[key] not in r or out[key] in p or (query is not None and (out[query] not in p or out[query] in r)):
                raise Refused("the product of scores is not one of queries and keys", x)
            return self._set(a, left, right, [c for c in p if c in r and c not in out], p, x)
        else:
            left, right = x.args[:2]
        rank = rank_of(x)
        if key == rank - 1:
            self._set(a, left, right, None, "", x)
        elif query in (rank - 1, None) and key == rank - 2:
            self._set(a, right, left, None, "", x)
        else:
            raise Refused("the product of scores is not one of queries and keys", x)

    def _set(self, a: Attention, query: Any, key: Any, contracted: list[str] | None, labels: str, x: fx.Node) -> None:
        depth: tuple[Axis, ...]
        if contracted is None:
            left = x.args[1 if op(x) == "baddbmm" else 0]
            depth = tuple(self.typing.atoms(left)[-1])  # type: ignore[arg-type]
        else:
            depth = tuple(z for c in contracted for z in self.typing.atoms(query)[labels.index(c)])
        if self.space_of(key) != a.keys:
            raise Refused("keys and values have different rows", x)
        a.query, a.key, a.depth = query, key, depth

    # --- torch's own --------------------------------------------------------------------------------

    def _fused(self, node: fx.Node) -> Attention | None:
        query, key, value = node.args[:3]
        keys = self.space_of(value)
        rank = rank_of(query)
        atoms = self.typing.atoms(query)  # type: ignore[arg-type]
        if keys is None or self.space_of(key) != keys or tuple(self.typing.atoms(value)[-2]) != keys.column:  # type: ignore[arg-type]
            return None
        flat = [z for d in atoms[:-2] for z in d]
        if not set(keys.sequence) <= set(flat):
            return None
        a = Attention(
            node, query, key, value, Space(keys.sequence, tuple(atoms[-2])), keys,  # type: ignore[arg-type]
            tuple(z for z in flat if z not in keys.sequence), tuple(atoms[-1]), tuple(self.typing.atoms(value)[-1]),  # type: ignore[arg-type]
            activation="softmax", dropout=float(arg(node, "dropout_p") or 0), zero_when_blind=True, chain=[node],
        )  # fmt: skip
        depth = shape(query)[-1]
        scale = arg(node, "scale")
        if scale is None and not isinstance(depth, int):
            raise Refused("the depth of heads is not a number", node)
        a.scale = float(scale) if scale is not None else float(depth) ** -0.5
        if arg(node, "is_causal"):
            a.least = 0
        mask = arg(node, "attn_mask")
        if mask is not None:
            self._fused_mask(a, mask, rank)
        return a

    def _fused_mask(self, a: Attention, mask: fx.Node, rank: int) -> None:
        """The mask lies along the dims of the scores, which this op never shows."""
        two = self.meanings.two(mask)
        boolean = tensor(mask).dtype == torch.bool  # type: ignore[union-attr]
        literals = (two.keeps() if boolean else two.admits()) if two is not None else None
        if not boolean and (two is None or -math.inf not in (two.yes, two.no)):
            a.zero_when_blind = False  # a query whose keys all get the same finite number averages over them
        offset = rank - rank_of(mask)
        query, key = rank - 2 - offset, rank - 1 - offset
        if literals is not None and self._absorb_fused(a, literals, query, key):
            return
        places = (query if query >= 0 and shape(mask)[query] != 1 else None), (key if shape(mask)[key] != 1 else None)
        additive = not boolean and (literals is not None or self.meanings.mask_of_pairs(mask, "additive"))
        summed = op(mask) == "add" and arg(mask, "alpha", 1) == 1 and all(is_tensor(p) for p in mask.args[:2])
        kept, rest = self._filled_bias(mask) if not additive and not boolean else (None, None)
        if kept is not None:
            self._fused_mask(a, kept, rank)
            self._fused_mask(a, rest, rank)  # type: ignore[arg-type]
            a.zero_when_blind = False
            return
        if summed and not additive:  # a mask and a bias, say
            for part in mask.args[:2]:
                self._fused_mask(a, part, rank)  # type: ignore[arg-type]
            return
        if boolean or additive:
            if mask in self.meanings.tainted:
                raise Refused("a mask of pairs that is not made from the batch alone", a.node)
            a.masks.append(Pairs(mask, *places, keeps="true" if boolean else "additive"))
        else:
            a.biases.append(Pairs(mask, *places))

    def _absorb_fused(self, a: Attention, literals: frozenset[Literal], query: int, key: int) -> bool:
        least, most, predicates = a.least, a.most, set(a.predicates)
        hidden: set[Predicate] = set()
        for literal in literals:
            if isinstance(literal, Band):
                if not isinstance(literal.least, int) or {literal.i, literal.j} != {query, key}:
                    return False
                if literal.i == query:
                    least = max(least, literal.least)
                else:
                    most = min(most, -literal.least)
            elif query in literal.dims and key not in literal.dims:
                hidden.add(literal.predicate)
            elif query in literal.dims or not set(self.typing.flat(literal.predicate.node)) <= set(a.keys.axes):
                return False
            else:
                predicates.add(literal.predicate)
        a.least, a.most, a.predicates = least, most, frozenset(predicates)
        self._hide(a, hidden)
        return True


_BETWEEN = {"mul", "multiply", "div", "add", "sub", "where", "masked_fill", "softmax", "_softmax", "_safe_softmax",
            "silu", "dropout", "_to_copy", "to", "nan_to_num"}  # fmt: skip


def _is_size(value: Any) -> bool:
    return isinstance(value, fx.Node) and isinstance(value.meta.get("val"), (torch.SymInt, torch.SymFloat))


def _aligned(operand: fx.Node, x: fx.Node, dim: int | None) -> int | None:
    """The operand's own dim that runs along a dim of the result; None where it does not vary along it."""
    if dim is None:
        return None
    own = dim - (rank_of(x) - rank_of(operand))
    return own if own >= 0 and shape(operand)[own] != 1 else None
