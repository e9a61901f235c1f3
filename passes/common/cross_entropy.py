"""Reading a cross-entropy: which product its logits come from, and where its losses are added up."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from ... import kernels as _kernels  # noqa: F401  (defines the ops)
from ...graph.nodes import tensor
from ...graph.shapes import same_shape, same_size
from ...rules.pattern import arguments

aten, ops = torch.ops.aten, torch.ops.turbogr
HALF = (torch.float16, torch.bfloat16)
NONE, MEAN = 0, 1  # as aten numbers reductions
SIZE = aten.sym_size.int
NEVER = -(2**62)  # an ignore_index that no target has


class Refused(Exception):
    """Why a loss stays as it is."""

    def __init__(self, id: str, text: str, node: fx.Node | None = None, hint: str = "") -> None:
        super().__init__(text)
        self.id, self.text, self.node, self.hint = id, text, node, hint


def _require(condition: bool, id: str, text: str, node: fx.Node | None = None, hint: str = "") -> None:
    if not condition:
        raise Refused(id, text, node, hint)


def value_of(node: Any) -> torch.Tensor:
    value = tensor(node)
    assert value is not None
    return value


# --- the loss ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Loss:
    """A cross-entropy, however it is spelled."""

    node: fx.Node  # computes it, in the shape of `target` or reduced
    nodes: tuple[fx.Node, ...]  # that and the ops before it, up to the logits
    logits: fx.Node
    axis: int  # of classes
    target: fx.Node
    reduction: int = NONE
    ignore_index: int = NEVER
    smoothing: float = 0.0
    sign: float = 1.0

    @property
    def sizes(self) -> tuple[Any, Any]:
        """Rows and classes."""
        shape = value_of(self.logits).shape
        return math.prod(s for i, s in enumerate(shape) if i != self.axis), shape[self.axis]


def _cross_entropy(node: fx.Node) -> Loss:
    a = arguments(node)
    return _of_classes(node, a["self"], (node,), a, float(a["label_smoothing"]))


def _nll(node: fx.Node) -> Loss | None:
    a = arguments(node)
    source = a["self"]
    if source.target is not aten.log_softmax.int:
        return None
    logits, axis = _log_softmax(source)
    if axis != _class_axis(logits):
        return None
    return _of_classes(node, logits, (source, node), a, 0.0)


def _of_classes(
    node: fx.Node, logits: fx.Node, nodes: tuple[fx.Node, ...], a: dict[str, Any], smoothing: float
) -> Loss:
    target = a["target"]
    _require(a["weight"] is None, "loss-weighted", "classes have weights of their own, which the kernel does not know")
    _require(
        not value_of(target).is_floating_point(),
        "loss-soft",
        "targets are probabilities, which the kernel does not know",
    )
    _require(value_of(target).dtype == torch.int64, "loss-target", f"targets are {value_of(target).dtype}, not int64")
    return Loss(node, nodes, logits, _class_axis(logits), target, a["reduction"], a["ignore_index"], smoothing)


def _class_axis(logits: fx.Node) -> int:
    return 1 if value_of(logits).dim() > 1 else 0


def _picked(node: fx.Node) -> Loss | None:
    """log_softmax(logits).gather(-1, target.unsqueeze(-1)): the losses with a minus."""
    source, axis, index = node.args[:3]
    assert isinstance(source, fx.Node) and isinstance(index, fx.Node)
    if source.target is not aten.log_softmax.int:
        return None
    logits, softmax_axis = _log_softmax(source)
    value = value_of(logits)
    if not axis == softmax_axis == value.dim() - 1 or not same_shape(value_of(index).shape, (*value.shape[:-1], 1)):
        return None
    return Loss(node, (source, node), logits, softmax_axis, index, sign=-1.0)


def _log_softmax(node: fx.Node) -> tuple[fx.Node, int]:
    a = arguments(node)
    logits = a["self"]
    given, asked = value_of(logits).dtype, value_of(node).dtype
    _require(
        given == asked or (given in HALF and asked == torch.float32), "loss-cast", f"log_softmax is in {asked}", node
    )
    _used_once(node)
    return logits, a["dim"]


READERS: dict[Any, Callable[[fx.Node], Loss | None]] = {
    aten.cross_entropy_loss.default: _cross_entropy,
    aten.nll_loss_nd.default: _nll,
    aten.gather.default: _picked,
}


# --- from the logits back to the product -------------------------------------------------------------


@dataclass
class Logits:
    """scale · x @ weight.T + biases, where `moves` are what happens to rows of x first."""

    x: fx.Node
    weight: fx.Node
    turned: bool  # weight is (D, V)
    biases: list[tuple[fx.Node, float]]
    scale: float
    moves: list[fx.Node]  # ops on logits that do the same to x; the first to run is the last
    nodes: list[fx.Node] = field(default_factory=list)


def logits_of(loss: Loss) -> Logits:
    return _Walk(loss).find()


def _used_once(node: fx.Node) -> None:
    readers = [u for u in node.users if u.target is not SIZE]
    if len(readers) > 1:
        named = ", ".join("the caller" if u.op == "output" else f"%{u.name}" for u in readers)
        raise Refused("logits-used-elsewhere", f"%{node.name} is read by {named}, so it has to be stored", node)


class _Walk:
    """Goes from the loss towards the product and remembers what it passes."""

    def __init__(self, loss: Loss) -> None:
        self.at, self.axis, self.classes = loss.logits, loss.axis, value_of(loss.logits).shape[loss.axis]
        self.scale = 1.0
        self.moves: list[fx.Node] = []
        self.nodes: list[fx.Node] = []
        self.biases: list[tuple[fx.Node, float]] = []
        self.factors: list[fx.Node] = []

    def find(self) -> Logits:
        while True:
            _used_once(self.at)
            if not self.last() and any(u.target is SIZE for u in self.at.users):
                raise self.refuse("is asked for a size")
            self.nodes.append(self.at)
            target = self.at.target
            if target in _PRODUCTS:
                return self._product()
            if target not in _STEPS:
                made = self.at if self.at.op == "call_function" else None
                what = str(target).removesuffix(".default") if made else "outside"
                raise Refused("logits-no-product", f"logits come from {what}, not from a product with one weight", made)
            self.at = _STEPS[target](self)

    @property
    def source(self) -> fx.Node:
        found = self.at.args[0]
        assert isinstance(found, fx.Node)
        return found

    def last(self) -> bool:
        """Are classes the last dim here?"""
        return self.axis == value_of(self.at).dim() - 1

    def refuse(self, what: str) -> Refused:
        return Refused("logits-changed", f"%{self.at.name} {what}", self.at)

    # Each step returns the node to look at next.

    def same(self) -> fx.Node:
        return self.source

    def cast(self) -> fx.Node:
        given, made = value_of(self.source).dtype, value_of(self.at).dtype
        if given != made and not (given in HALF and made == torch.float32):
            raise self.refuse(f"converts logits from {given} to {made}")
        return self.source

    def reshape(self) -> fx.Node:
        if not self.last() or not same_size(value_of(self.source).shape[-1], self.classes):
            raise self.refuse("takes the classes of a row apart")
        self.moves.append(self.at)
        self.axis = value_of(self.source).dim() - 1
        return self.source

    def rows(self) -> fx.Node:
        """Picks or arranges rows: x can be picked from instead."""
        if not self.last() or not _spares_last(self.at) or not same_size(value_of(self.source).shape[-1], self.classes):
            raise self.refuse("picks classes")
        if self.at.meta.get("unbacked_bindings"):
            raise self.refuse("picks as many rows as the data says; pick them before the product")
        self.moves.append(self.at)
        self.axis = value_of(self.source).dim() - 1
        return self.source

    def turn(self) -> fx.Node:
        order = _order(self.at)
        if self.last() and order[-1] == len(order) - 1:
            return self.rows()
        rest = [d for i, d in enumerate(order) if i != self.axis]
        if rest != sorted(rest):
            raise self.refuse("changes the order of rows")
        self.axis = order[self.axis]
        return self.source

    def multiply(self) -> fx.Node:
        first, second = self.at.args[:2]
        if isinstance(second, (int, float)):
            self.scale *= second
            return self.source
        if self.at.target is aten.mul.Tensor and not self._over_classes(second):
            first, second = second, first
        return self._by_tensor(first, second)

    def divide(self) -> fx.Node:
        first, second = self.at.args[:2]
        if isinstance(second, (int, float)) and second != 0:
            self.scale /= second
            return self.source
        return self._by_tensor(first, second)

    def _by_tensor(self, logits: Any, factor: Any) -> fx.Node:
        """A temperature that is learned, or one for each row: as well of x as of logits."""
        if not isinstance(logits, fx.Node) or not self._over_classes(factor) or not self._like(logits):
            raise self.refuse("multiplies logits by more than one number for a row")
        self._has_room("multiplies logits of float16 by a tensor, for which their rows may have no room")
        self.moves.append(self.at)
        self.factors.append(factor)
        return logits

    def _over_classes(self, factor: Any) -> bool:
        """One number for all classes of a row."""
        value = tensor(factor)
        if value is None:
            return False
        return value.dim() == 0 or (self.last() and same_size(value.shape[-1], 1))

    def _like(self, logits: fx.Node) -> bool:
        ours, theirs = value_of(self.at), value_of(logits)
        return ours.dtype == theirs.dtype and same_shape(ours.shape, theirs.shape)

    def add(self) -> fx.Node:
        a = arguments(self.at)
        logits, bias = a["self"], a["other"]
        if tensor(logits) is None or tensor(bias) is None or a["alpha"] != 1:
            raise self.refuse("adds something else than one number for each class")
        if not self._like(logits):
            logits, bias = bias, logits
        if not self._like(logits):
            raise self.refuse("adds something else than one number for each class")
        self._add_bias(bias)
        return logits

    def _has_room(self, otherwise: str) -> None:
        """Of what is multiplied in the place of logits: these may be small, or large, where it is not."""
        if value_of(self.at).dtype == torch.float16:
            raise self.refuse(otherwise)

    def _add_bias(self, bias: fx.Node) -> None:
        value = value_of(bias)
        is_bias = value.dim() > 0 and same_size(value.shape[-1], self.classes) and self.last()
        if not is_bias or not all(same_size(s, 1) for s in value.shape[:-1]):
            raise self.refuse("adds something else than one number for each class")
        if value.dtype != value_of(self.at).dtype:
            raise self.refuse(f"adds a bias of type {value.dtype}")
        if self.factors:
            raise self.refuse("adds a bias that is then multiplied by a tensor")
        if self.scale != 1.0:
            self._has_room("adds a bias to logits of float16, which may have no room for it once it is multiplied")
        self.biases.append((bias, self.scale))

    def _product(self) -> Logits:
        x, weight, turned, bias = _PRODUCTS[self.at.target](self)
        _require(self.last(), "logits-no-product", f"classes are not the last dim of %{self.at.name}", self.at)
        _require(
            value_of(weight).dim() == 2,
            "logits-no-product",
            f"%{weight.name} holds a weight for each sequence",
            self.at,
        )
        if bias is not None:
            self._add_bias(bias)
        factors = (f for f in self.factors if value_of(f).dim() > 0 and value_of(f).is_floating_point())
        types = {value_of(t).dtype for t in (x, weight, *(b for b, _ in self.biases), *factors)}
        _require(len(types) == 1, "loss-types", f"the product mixes {', '.join(sorted(map(str, types)))}", self.at)
        while turned and weight.target is aten.transpose.int:
            weight, turned = weight.args[0], False
        return Logits(x, weight, turned, self.biases, self.scale, self.moves, self.nodes)


def _spares_last(node: fx.Node) -> bool:
    """Does an op that picks or arranges rows leave the last dim alone?"""
    source = value_of(node.args[0])
    if node.target is aten.index.Tensor:
        indices: Any = node.args[1]
        masks = [value_of(i).dim() for i in indices if i is not None and not value_of(i).dtype.is_signed]
        reach = len(indices) - len(masks) + sum(masks)
        return reach < source.dim() or indices[-1] is None
    if node.target is ops.gather_rows.default:
        return source.dim() > 1
    if node.target in (aten.permute.default, aten.transpose.int):
        return _order(node)[-1] == source.dim() - 1
    dim = node.args[1]
    limit = source.dim() if node.target is aten.unsqueeze.default else source.dim() - 1
    return isinstance(dim, int) and dim < limit


def _order(node: fx.Node) -> list[int]:
    """Dim i of the result is dim order[i] of the argument."""
    order, dims = list(range(value_of(node).dim())), arguments(node)
    if node.target is aten.permute.default:
        return [order[d] for d in dims["dims"]]
    a, b = order[dims["dim0"]], order[dims["dim1"]]
    order[a], order[b] = b, a
    return order


_STEPS: dict[Any, Callable[[_Walk], fx.Node]] = {
    aten.clone.default: _Walk.same,
    aten.contiguous.default: _Walk.same,
    aten._to_copy.default: _Walk.cast,
    aten.to.dtype: _Walk.cast,
    aten.reshape.default: _Walk.reshape,
    aten.slice.Tensor: _Walk.rows,
    aten.select.int: _Walk.rows,
    aten.squeeze.dim: _Walk.rows,
    aten.unsqueeze.default: _Walk.rows,
    aten.index_select.default: _Walk.rows,
    aten.index.Tensor: _Walk.rows,
    ops.gather_rows.default: _Walk.rows,
    aten.transpose.int: _Walk.turn,
    aten.permute.default: _Walk.turn,
    aten.mul.Tensor: _Walk.multiply,
    aten.div.Tensor: _Walk.divide,
    aten.add.Tensor: _Walk.add,
}

Product = tuple[Any, Any, bool, Any]  # x, weight, whether that is (D, V), bias


def _linear(walk: _Walk) -> Product:
    x, weight, *bias = walk.at.args
    return x, weight, False, bias[0] if bias else None


def _matmul(walk: _Walk) -> Product:
    x, weight = walk.at.args
    return x, weight, True, None


def _addmm(walk: _Walk) -> Product:
    a = arguments(walk.at)
    if a["alpha"] != 1 or a["beta"] != 1:
        raise walk.refuse("is a product with factors of its own")
    return a["mat1"], a["mat2"], True, a["self"]


def _einsum(walk: _Walk) -> Product:
    """'bnd,vd->bnv' and its like: all but one letter of x stay, in their order, and the weight's other one follows."""
    equation, operands = walk.at.args[:2]
    assert isinstance(equation, str) and isinstance(operands, (list, tuple))
    inputs, _, result = equation.replace(" ", "").partition("->")
    letters = inputs.split(",")
    for x, w in ((0, 1), (1, 0)) if len(letters) == 2 else ():
        rows, d = letters[x][:-1], letters[x][-1:]
        v = letters[w].replace(d, "")
        plain = d and len(letters[w]) == 2 and len(v) == 1 and len({*rows, d, v}) == len(rows) + 2
        width = value_of(operands[w]).shape[letters[w].index(d)] if plain else 0
        if plain and result == rows + v and same_size(value_of(operands[x]).shape[-1], width):
            return operands[x], operands[w], letters[w][0] == d, None
    raise Refused("logits-no-product", f"logits come from einsum '{equation}'", walk.at)


_PRODUCTS: dict[Any, Callable[[_Walk], Product]] = {
    aten.linear.default: _linear,
    aten.matmul.default: _matmul,
    aten.mm.default: _matmul,
    aten.addmm.default: _addmm,
    aten.einsum.default: _einsum,
}


# --- from the loss on to where losses are added up ---------------------------------------------------


@dataclass(frozen=True)
class Total:
    """A sum or mean over all losses."""

    node: fx.Node
    share: fx.Node | None = None  # of each row, in the shape of the losses
    mean: bool = False  # over all rows that are not ignored
    over_all: bool = False  # divide by the number of rows, ignored or not, in the end
    sign: float = 1.0


_MEANS = (aten.mean.default, aten.mean.dim)
_SUMS = (aten.sum.default, aten.sum.dim_IntList, *_MEANS)


def total_of(loss: Loss) -> Total | None:
    """None where somebody wants the loss of each row."""
    if loss.reduction != NONE:
        return Total(loss.node, mean=loss.reduction == MEAN)
    at, sign = loss.node, loss.sign
    share: Any = None
    while len(at.users) == 1:
        (user,) = at.users
        if user.target in (aten.reshape.default, aten.squeeze.dim, aten.unsqueeze.default):
            pass
        elif user.target is aten.neg.default:
            sign = -sign
        elif user.target is aten.mul.Tensor and share is None:
            first, second = user.args[:2]
            share = second if first is at else first
            if first is second or not isinstance(share, fx.Node) or not _is_share(share, at, user):
                return None
        elif user.target in _SUMS and value_of(user).dim() == 0 and value_of(user).dtype == value_of(at).dtype:
            return _signed(Total(user, share, over_all=user.target in _MEANS, sign=sign))
        else:
            return None
        at = user
    return None


def _signed(total: Total) -> Total:
    """-mean(log-probabilities) is a mean of losses."""
    negated = [u for u in total.node.users if u.target is aten.neg.default]
    if total.sign > 0 or len(negated) != len(total.node.users) or len(negated) != 1:
        return total
    return replace(total, node=negated[0], sign=1.0)


def _is_share(share: fx.Node, losses: fx.Node, product: fx.Node) -> bool:
    value = value_of(share)
    return same_shape(value.shape, value_of(losses).shape) and value_of(product).dtype == value_of(losses).dtype
