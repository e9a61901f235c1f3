"""Which dims of which values run over the same thing.

Every dim is an ordered product of *axes*; a dim of size 1 is the empty product. Ops that line up two dims (addition,
contraction, a loss with its targets) make their axes one; reshapes split and regroup axes. Two dims of the same axes
are aligned index by index. Nothing is ever concluded from equal sizes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from ...graph.nodes import tensor
from .ops import (  # fmt: skip
    SPLITS,
    Size,
    arg,
    dim_of,
    dims_of,
    is_pointwise,
    is_tensor,
    op,
    product,
    quotient,
    rank_of,
    shape,
    size,
    size_seen,
    tensors,
)

Axis = int
Dim = list[Axis]
Dims = list[Dim]


class Axes:
    """Union-find over axes; an axis may be split into a product of smaller ones."""

    def __init__(self, hint: Callable[[Size], int | None] = lambda _: None) -> None:
        self._hint = hint
        self.assumed_equal: set[tuple[Size, Size]] = set()  # sizes that two lined-up dims share in the batch seen
        self._parent: list[Axis] = []
        self._size: list[Size] = []
        self._parts: dict[Axis, list[Axis]] = {}

    def new(self, size: Size) -> Axis:
        self._parent.append(len(self._parent))
        self._size.append(size)
        return len(self._parent) - 1

    def fresh(self, size: Size) -> Dim:
        return [] if size == 1 else [self.new(size)]

    def size(self, axis: Axis) -> Size:
        return self._size[self.find(axis)]

    def find(self, axis: Axis) -> Axis:
        while self._parent[axis] != axis:
            self._parent[axis] = self._parent[self._parent[axis]]
            axis = self._parent[axis]
        return axis

    def atoms(self, dim: Iterable[Axis]) -> Dim:
        """The dim as axes that are not split further."""
        out, todo = [], list(dim)[::-1]
        while todo:
            axis = self.find(todo.pop())
            if axis in self._parts:
                todo.extend(reversed(self._parts[axis]))
            else:
                out.append(axis)
        return out

    def same(self, a: Size, b: Size) -> bool:
        """Are two sizes equal? Where that is not provable, they are assumed to be if they were in the call seen."""
        if quotient(a, b) == 1:
            return True
        if self._hint(a) is None or self._hint(a) != self._hint(b) or (isinstance(a, int) and isinstance(b, int)):
            return False
        self.assumed_equal.add((a, b))
        return True

    def split(self, axis: Axis, sizes: Sequence[Size]) -> Dim:
        parts = [self.new(s) for s in sizes]
        self._parts[self.find(axis)] = parts
        return parts

    def unify(self, a: Axis, b: Axis) -> None:
        a, b = self.find(a), self.find(b)
        if a == b:
            return
        ours, theirs = self._parts.pop(a, None), self._parts.pop(b, None)
        self._parent[b] = a
        if ours or theirs:
            self._parts[a] = ours or theirs or []
        if ours and theirs:
            self.unify_dims(ours, theirs)

    def unify_dims(self, a: Iterable[Axis], b: Iterable[Axis]) -> bool:
        """Line up two products; False where their factors do not fit (then nothing is concluded from the rest)."""
        left, right = deque(self.atoms(a)), deque(self.atoms(b))
        while left and right:
            x, y = self._pop(left), self._pop(right)
            if x == y:
                continue
            whole = quotient(self.size(x), self.size(y))
            if whole == 1:
                self.unify(x, y)
            elif whole is not None:
                first, rest = self.split(x, (self.size(y), whole))
                self.unify(first, y)
                left.appendleft(rest)
            elif (whole := quotient(self.size(y), self.size(x))) is not None:
                first, rest = self.split(y, (self.size(x), whole))
                self.unify(x, first)
                right.appendleft(rest)
            elif self.same(self.size(x), self.size(y)):
                self.unify(x, y)
            else:
                return False
        return not left and not right

    def _pop(self, queue: deque[Axis]) -> Axis:
        while True:
            axis = self.find(queue.popleft())
            if axis not in self._parts:
                return axis
            queue.extendleft(reversed(self._parts[axis]))

    def regroup(self, dims: Dims, sizes: Sequence[Size]) -> Dims | None:
        """Dims of a reshape; None where its factors do not fit."""
        queue = deque(self.atoms(a for d in dims for a in d))
        out: Dims = []
        for left in sizes:
            current: Dim = []
            while left != 1:
                if not queue:
                    return None
                axis = self._pop(queue)
                whole = quotient(left, self.size(axis))
                if whole is not None:
                    current.append(axis)
                    left = whole
                elif (rest := quotient(self.size(axis), left)) is not None:
                    first, second = self.split(axis, (left, rest))
                    current.append(first)
                    queue.appendleft(second)
                    left = 1
                else:
                    return None
            out.append(current)
        return None if queue else out


class Typing:
    """Dims of every value of a graph."""

    def __init__(self, graph: fx.Graph) -> None:
        self.axes = Axes(lambda value: size_seen(graph, value))
        self._dims: dict[fx.Node, Dims] = {}
        self._parts: dict[fx.Node, list[Dims | None]] = {}  # of ops with several results
        self.jagged: dict[fx.Node, tuple[Dim, Dim, Dim]] = {}  # offsets -> sequence, column and row dims
        self.untyped: set[fx.Node] = set()  # no rule: nothing is known about their dims
        self._offsets: dict[Any, fx.Node] = {}
        self.kept: dict[fx.Node, Dim] = {}  # mask -> the rows it keeps
        self._atoms: dict[fx.Node, Dims] = {}
        for node in graph.nodes:
            self._type(node)

    def offsets(self, node: fx.Node) -> fx.Node:
        """Offsets computed from the same lengths are the same."""
        if op(node) not in ("fbgemm::asynchronous_complete_cumsum", "cumsum") or len(node.args) != 1:
            return node
        return self._offsets.setdefault((node.target, node.args), node)

    def _type(self, node: fx.Node) -> None:
        value = node.meta.get("val")
        if isinstance(value, (list, tuple)):
            rule = _SEVERAL.get(op(node))
            self._parts[node] = rule(self, node) if rule else [None] * len(value)
            return
        if not isinstance(value, torch.Tensor):
            return
        dims = self._rule(node)
        if dims is None or len(dims) != value.dim():
            if node.op == "call_function":
                self.untyped.add(node)
            dims = [self.axes.fresh(s) for s in shape(node)]
        self._dims[node] = dims

    def _rule(self, node: fx.Node) -> Dims | None:
        if node.op != "call_function":
            return None
        name = op(node)
        if name == "getitem":
            parts, index = self._parts.get(node.args[0], []), node.args[1]  # type: ignore[arg-type]
            return parts[index] if isinstance(index, int) and index < len(parts) else None
        if name in _RULES:
            return _RULES[name](self, node)
        return self.broadcast(tensors(node), rank_of(node)) if is_pointwise(node) else None

    # --- asked by rules and by everyone later ------------------------------------------------------

    def dims(self, node: Any) -> Dims:
        return self._dims[node]

    def atoms(self, node: fx.Node) -> Dims:
        """Dims in axes that are not split further; final once the whole graph is typed."""
        if node not in self._atoms:
            self._atoms[node] = [self.axes.atoms(d) for d in self._dims[node]]
        return self._atoms[node]

    def flat(self, node: fx.Node) -> list[Axis]:
        return [a for d in self.atoms(node) for a in d]

    def size_of(self, axes: Iterable[Axis]) -> Size:
        return product(self.axes.size(a) for a in axes)

    def join(self, *dims: Dim) -> Dim:
        """One dim that all of them are; size-1 dims broadcast."""
        real = [d for d in dims if d]
        for other in real[1:]:
            self.axes.unify_dims(real[0], other)
        return real[0] if real else []

    def broadcast(self, nodes: Iterable[fx.Node], rank: int) -> Dims:
        out: Dims = [[] for _ in range(rank)]
        for node in nodes:
            for i, dim in enumerate(reversed(self.dims(node))):
                out[rank - 1 - i] = self.join(out[rank - 1 - i], dim)
        return out

    def product(self, x: Dims, y: Dims) -> Dims:
        """Matrix product."""
        self.join(x[-1], y[-2])
        rank = max(len(x), len(y)) - 2
        left: Dims = [[] for _ in range(rank - len(x) + 2)] + x[:-2]
        right: Dims = [[] for _ in range(rank - len(y) + 2)] + y[:-2]
        return [self.join(p, q) for p, q in zip(left, right, strict=True)] + [x[-2], y[-1]]


# --- one rule per op ---------------------------------------------------------------------------------

Rule = Callable[[Typing, fx.Node], "Dims | None"]
_RULES: dict[str, Rule] = {}
_SEVERAL: dict[str, Callable[[Typing, fx.Node], list[Dims | None]]] = {}


def typed(*names: str) -> Callable[[Rule], Rule]:
    def add(rule: Rule) -> Rule:
        _RULES.update(dict.fromkeys(names, rule))
        return rule

    return add


@typed("layer_norm", "softmax", "_softmax", "_safe_softmax", "log_softmax", "tril", "triu", "cumsum", "rms_norm",
       "index_put", "index_add", "index_copy", "scatter", "scatter_add", "cumprod", "batch_norm", "instance_norm",
       "normalize")  # fmt: skip
def _same(t: Typing, n: fx.Node) -> Dims:
    return list(t.dims(n.args[0]))


@typed("flip", "roll")
def _moved(t: Typing, n: fx.Node) -> Dims:
    moved = dims_of(n, "dims")
    return [t.axes.fresh(s) if moved is None or i in moved else d
            for i, (d, s) in enumerate(zip(t.dims(n.args[0]), shape(n), strict=True))]  # fmt: skip


@typed("reshape", "view", "flatten", "unflatten", "_unsafe_view", "view_as", "reshape_as")
def _reshape(t: Typing, n: fx.Node) -> Dims | None:
    return t.axes.regroup(t.dims(n.args[0]), shape(n))


@typed("unsqueeze")
def _unsqueeze(t: Typing, n: fx.Node) -> Dims:
    dims = list(t.dims(n.args[0]))
    dims.insert(arg(n, "dim") % rank_of(n), [])
    return dims


@typed("squeeze")
def _squeeze(t: Typing, n: fx.Node) -> Dims:
    sizes = shape(n.args[0])
    chosen = (dims_of(n) if arg(n, "dim") is not None else None) or list(range(len(sizes)))
    return [d for i, d in enumerate(t.dims(n.args[0])) if not (i in chosen and sizes[i] == 1)]


@typed("permute")
def _permute(t: Typing, n: fx.Node) -> Dims:
    return [t.dims(n.args[0])[i] for i in arg(n, "dims")]


@typed("transpose", "t", "swapaxes", "numpy_T")
def _transpose(t: Typing, n: fx.Node) -> Dims:
    dims = list(t.dims(n.args[0]))
    if len(dims) > 1:
        i, j = swapped(n)
        dims[i], dims[j] = dims[j], dims[i]
    return dims


def swapped(n: fx.Node) -> tuple[int, int]:
    """Dims that a transpose exchanges."""
    if op(n) in ("t", "numpy_T"):
        return 0, 1
    rank = rank_of(n)
    return n.args[1] % rank, n.args[2] % rank  # type: ignore[operator,return-value]


@typed("expand", "broadcast_to", "expand_as")
def _expand(t: Typing, n: fx.Node) -> Dims:
    new, old = shape(n), shape(n.args[0])
    source: Dims = [[] for _ in range(len(new) - len(old))] + t.dims(n.args[0])
    return [d if d or s == 1 else t.axes.fresh(s) for d, s in zip(source, new, strict=True)]


@typed("repeat", "tile")
def _repeat(t: Typing, n: fx.Node) -> Dims:
    new, old = shape(n), shape(n.args[0])
    missing = len(new) - len(old)
    out: Dims = []
    for d, before, after in zip([[]] * missing + t.dims(n.args[0]), [1] * missing + old, new, strict=True):
        times = quotient(after, before)
        out.append([*t.axes.fresh(times), *d] if times is not None else t.axes.fresh(after))
    return out


@typed("repeat_interleave")
def _repeat_interleave(t: Typing, n: fx.Node) -> Dims | None:
    if not isinstance(arg(n, "repeats"), int) or arg(n, "dim") is None:
        return None
    dims = list(t.dims(n.args[0]))
    dims[dim_of(n)] = [*dims[dim_of(n)], *t.axes.fresh(arg(n, "repeats"))]
    return dims


@typed("select")
def _select(t: Typing, n: fx.Node) -> Dims:
    return [d for i, d in enumerate(t.dims(n.args[0])) if i != dim_of(n)]


@typed("slice", "narrow", "constant_pad_nd", "pad")
def _resized(t: Typing, n: fx.Node) -> Dims:
    old, new = shape(n.args[0]), shape(n)
    same = [quotient(a, b) == 1 for a, b in zip(old, new, strict=True)]
    if op(n) in ("constant_pad_nd", "pad"):
        same = [not any(p) for p in padding(n)]  # a negative and a positive pad may leave the size alone
    return [d if kept else t.axes.fresh(s) for d, kept, s in zip(t.dims(n.args[0]), same, new, strict=True)]


def padding(n: fx.Node) -> list[tuple[Any, Any]]:
    """(before, after) of each dim."""
    rank = rank_of(n)
    flat = list(arg(n, "pad"))
    pairs = [(flat[i], flat[i + 1]) for i in range(0, len(flat), 2)]
    return [(0, 0)] * (rank - len(pairs)) + pairs[::-1]


@typed("cat", "concat")
def _cat(t: Typing, n: fx.Node) -> Dims:
    parts, at = n.args[0], dim_of_cat(n)
    out: Dims = []
    for i in range(rank_of(n)):
        dims = [t.dims(p)[i] for p in parts]  # type: ignore[union-attr]
        if i != at:
            out.append(t.join(*dims))
        elif len({tuple(t.axes.atoms(d)) for d in dims}) == 1 and dims[0]:
            out.append([*t.axes.fresh(len(dims)), *dims[0]])  # equal parts one after the other: a stack, flattened
        else:
            out.append(t.axes.fresh(shape(n)[i]))
    return out


def dim_of_cat(n: fx.Node) -> int:
    return arg(n, "dim", 0) % rank_of(n)


@typed("stack")
def _stack(t: Typing, n: fx.Node) -> Dims:
    out = t.broadcast(n.args[0], rank_of(n) - 1)  # type: ignore[arg-type]
    out.insert(dim_of_cat(n), t.axes.fresh(len(n.args[0])))  # type: ignore[arg-type]
    return out


@typed("linear")
def _linear(t: Typing, n: fx.Node) -> Dims:
    x, w = t.dims(n.args[0]), t.dims(n.args[1])
    t.join(x[-1], w[-1])
    return [*x[:-1], *w[:-1]]


@typed("matmul", "mm", "bmm")
def _matmul(t: Typing, n: fx.Node) -> Dims | None:
    x, y = t.dims(n.args[0]), t.dims(n.args[1])
    if len(x) > 1 and len(y) > 1:
        return t.product(x, y)
    if len(y) == 1:
        t.join(x[-1], y[0])
        return x[:-1]
    t.join(x[0], y[-2])
    return [*y[:-2], y[-1]]


@typed("baddbmm", "addmm")
def _add_product(t: Typing, n: fx.Node) -> Dims:
    out = t.product(t.dims(n.args[1]), t.dims(n.args[2]))
    added = t.dims(n.args[0])
    return [t.join(p, q) for p, q in zip(out, [[]] * (len(out) - len(added)) + added, strict=True)]


@typed("einsum")
def _einsum(t: Typing, n: fx.Node) -> Dims | None:
    labels = einsum_labels(n)
    if labels is None:
        return None
    inputs, out = labels
    known: dict[str, Dim] = {}
    for label, operand in zip(inputs, n.args[1], strict=True):  # type: ignore[arg-type]
        for letter, dim in zip(label, t.dims(operand), strict=True):
            known[letter] = t.join(known.get(letter, []), dim)
    return [known[letter] for letter in out]


def einsum_labels(n: fx.Node) -> tuple[list[str], str] | None:
    """Labels of the operands and of the result; None where a letter is repeated within an operand."""
    equation = str(n.args[0]).replace(" ", "")
    left, arrow, out = equation.partition("->")
    inputs = left.split(",")
    operands: Any = n.args[1]
    free = [c for c in "ABCDEFGHIJKLMNOPQRS" if c not in equation]
    widest = max(rank_of(x) - len(label.replace("...", "")) for label, x in zip(inputs, operands, strict=True))
    for k, (label, x) in enumerate(zip(inputs, operands, strict=True)):
        count = rank_of(x) - len(label.replace("...", ""))
        inputs[k] = label.replace("...", "".join(free[widest - count : widest]))
    out = out.replace("...", "".join(free[:widest]))
    if any(len(set(label)) != len(label) for label in inputs):
        return None
    if not arrow:
        letters = "".join(inputs)
        out = "".join(sorted(c for c in set(letters) if letters.count(c) == 1))
    return inputs, out


@typed("scaled_dot_product_attention")
def _attention(t: Typing, n: fx.Node) -> Dims:
    q, k, v = (t.dims(a) for a in n.args[:3])
    for i in range(len(q) - 2):
        if not arg(n, "enable_gqa") or i != len(q) - 3:
            t.join(q[i], k[i], v[i])
    t.join(q[-1], k[-1])
    t.join(k[-2], v[-2])
    if is_tensor(arg(n, "attn_mask")):
        for m, s in zip(reversed(t.dims(arg(n, "attn_mask"))), reversed([*q[:-1], k[-2]]), strict=False):
            t.join(s, m)
    return [*q[:-1], v[-1]]


@typed("embedding")
def _embedding(t: Typing, n: fx.Node) -> Dims:
    return [*t.dims(n.args[1]), t.dims(n.args[0])[1]]


@typed("turbogr::sharded_lookup")
def _sharded_lookup(t: Typing, n: fx.Node) -> Dims:
    return [*t.dims(n.args[2]), t.axes.fresh(shape(n)[-1])]


@typed("one_hot")
def _one_hot(t: Typing, n: fx.Node) -> Dims:
    return [*t.dims(n.args[0]), t.axes.fresh(shape(n)[-1])]


REDUCTIONS = {"sum", "mean", "amax", "amin", "any", "all", "prod", "logsumexp", "linalg_norm", "linalg_vector_norm",
              "norm", "std", "var", "argmax", "argmin"}  # fmt: skip


@typed(*sorted(REDUCTIONS))
def _reduced(t: Typing, n: fx.Node) -> Dims:
    gone = reduced_dims(n)
    keep = bool(arg(n, "keepdim", False))
    return [[] if i in gone else d for i, d in enumerate(t.dims(n.args[0])) if keep or i not in gone]


def reduced_dims(n: fx.Node) -> list[int]:
    dims = dims_of(n)
    return list(range(rank_of(n.args[0]))) if dims is None else dims


@typed("gather", "take_along_dim")
def _gather(t: Typing, n: fx.Node) -> Dims:
    at = dim_of(n)
    x, index = t.dims(n.args[0]), t.dims(arg(n, "index") or arg(n, "indices"))
    old, new = shape(n.args[0]), shape(n)
    out: Dims = []
    for i, (d, k) in enumerate(zip(x, index, strict=True)):
        aligned = i != at and t.axes.same(old[i], new[i])  # gather may also read a corner of the tensor
        out.append(t.join(d, k) if aligned else k)
    return out


@typed("index_select")
def _index_select(t: Typing, n: fx.Node) -> Dims:
    mask = picking_mask(n)
    if mask is not None:
        return _picked(t, n.args[0], mask)  # type: ignore[arg-type]
    dims = list(t.dims(n.args[0]))
    dims[dim_of(n)] = (t.dims(arg(n, "index")) or [[]])[0]
    return dims


@typed("index")
def _index(t: Typing, n: fx.Node) -> Dims | None:
    x, indices = n.args[0], n.args[1]
    mask = picking_mask(n)
    if mask is not None:
        return _picked(t, x, mask)  # type: ignore[arg-type]
    if not all(is_tensor(i) and tensor(i).dtype != torch.bool for i in indices):  # type: ignore[union-attr]
        return None
    for k, index in enumerate(indices):  # type: ignore[arg-type]
        if counts_from_zero(index) and quotient(shape(x)[k], product(shape(index))) == 1:
            t.join(t.dims(x)[k], [a for d in t.dims(index) for a in d])  # x[arange(n)] is x
    rank = max(rank_of(i) for i in indices)  # type: ignore[union-attr]
    return [*t.broadcast(indices, rank), *t.dims(x)[len(indices) :]]  # type: ignore[arg-type]


def counts_from_zero(n: Any) -> bool:
    """An arange from 0, possibly reshaped."""
    while op(n) in ("unsqueeze", "reshape", "clone", "_to_copy") or (op(n) == "add" and n.args[1] == 0):
        n = n.args[0]
    return op(n) == "arange" and arg(n, "start", 0) in (0, None) and arg(n, "step", 1) in (1, None)


def picking_mask(n: fx.Node) -> fx.Node | None:
    """The mask m when a node is x[m], x[nonzero(m)] or the like: it keeps the rows where m holds, in order."""
    if op(n) == "index_select":
        return _coordinates_of(arg(n, "index"), 0) if arg(n, "dim") == 0 else None
    indices: Any = n.args[1]
    if op(n) != "index" or not all(is_tensor(i) for i in indices):
        return None
    if len(indices) == 1 and tensor(indices[0]).dtype == torch.bool:  # type: ignore[union-attr]
        return indices[0]
    masks = [_coordinates_of(i, k) for k, i in enumerate(indices)]
    mask = masks[0] if masks and all(m is masks[0] for m in masks) else None
    return mask if mask is not None and rank_of(mask) == len(indices) else None


def _coordinates_of(index: Any, k: int) -> fx.Node | None:
    """The mask whose k-th nonzero coordinates an index is."""
    while op(index) in ("clone", "_to_copy", "squeeze", "reshape"):
        index = index.args[0]
    if op(index) == "nonzero" and rank_of(index.args[0]) == 1:
        return index.args[0]
    if op(index) == "getitem" and index.args[1] == k:
        source = index.args[0]
        if op(source) in ("nonzero_numpy", "where"):
            return source.args[0]
        if op(source) == "unbind" and arg(source, "dim") in (1, -1) and op(source.args[0]) == "nonzero":
            return source.args[0].args[0]
    if op(index) == "select" and arg(index, "dim") in (1, -1) and arg(index, "index") == k:
        return index.args[0].args[0] if op(index.args[0]) == "nonzero" else None
    return None


def _picked(t: Typing, x: fx.Node, mask: fx.Node) -> Dims:
    """Rows that a mask keeps."""
    for mine, its in zip(t.dims(x), t.dims(mask), strict=False):
        t.join(mine, its)
    if mask not in t.kept:
        t.kept[mask] = [t.axes.new(sympy.Symbol(f"kept_{len(t.kept)}", integer=True, nonnegative=True))]
    return [t.kept[mask], *t.dims(x)[rank_of(mask) :]]


@typed("cross_entropy_loss", "nll_loss", "nll_loss_nd")
def _cross_entropy(t: Typing, n: fx.Node) -> Dims | None:
    scores, target = t.dims(n.args[0]), t.dims(n.args[1])
    rows = [d for i, d in enumerate(scores) if i != (1 if len(scores) > 1 else 0)]
    if tensor(n.args[1]).dtype.is_floating_point:  # type: ignore[union-attr]
        for a, b in zip(scores, target, strict=True):  # shares of the classes
            t.join(a, b)
        return rows if rank_of(n) else []
    for a, b in zip(rows, target, strict=True):
        t.join(a, b)
    return list(target) if rank_of(n) else []


LOSSES = {"binary_cross_entropy_with_logits", "binary_cross_entropy", "mse_loss", "l1_loss", "smooth_l1_loss",
          "huber_loss", "kl_div", "soft_margin_loss"}  # fmt: skip


@typed(*sorted(LOSSES))
def _loss(t: Typing, n: fx.Node) -> Dims:
    out = t.broadcast(tensors(n), max(rank_of(x) for x in tensors(n)))
    return out if rank_of(n) else []


@typed("conv1d")
def _conv1d(t: Typing, n: fx.Node) -> Dims | None:
    x, w = t.dims(n.args[0]), t.dims(n.args[1])
    if arg(n, "groups") != 1:
        return None
    t.join(x[-2], w[1])
    last = x[-1] if is_pointwise_convolution(n) else t.axes.fresh(shape(n)[-1])
    return [*x[:-2], w[0], last]


def is_pointwise_convolution(n: fx.Node) -> bool:
    one = all(v in (1, [1]) for v in (arg(n, "stride"), arg(n, "groups")))
    return shape(n.args[1])[2] == 1 and one and arg(n, "padding") in (0, [0], "valid", "same")


@typed("fbgemm::jagged_to_padded_dense")
def _padded(t: Typing, n: fx.Node) -> Dims | None:
    offsets = t.offsets(arg(n, "offsets")[0])
    new, rows = shape(n), t.dims(n.args[0])
    if offsets in t.jagged:
        sequence, column, row = t.jagged[offsets]
        t.join(row, rows[0])
        if quotient(t.size_of(t.axes.atoms(column)), new[1]) != 1:
            column = t.axes.fresh(new[1])  # padded to another length than elsewhere
    else:
        sequence, column = t.axes.fresh(new[0]), t.axes.fresh(new[1])
        t.jagged[offsets] = (sequence, column, rows[0])
    return [sequence, column, *rows[1:]]


def _to_jagged(t: Typing, n: fx.Node) -> list[Dims | None]:
    """Two results: the rows, and the offsets again."""
    offsets = t.offsets(n.args[1][0])  # type: ignore[index,arg-type]
    x = t.dims(n.args[0])
    if offsets in t.jagged:
        sequence, column, row = t.jagged[offsets]
        t.join(sequence, x[0])
        if quotient(t.size_of(t.axes.atoms(column)), t.size_of(t.axes.atoms(x[1]))) == 1:
            t.join(column, x[1])
    else:
        row = [t.axes.new(size(n.meta["val"][0].shape[0]))]
        t.jagged[offsets] = (x[0], x[1], row)
    return [[row, *x[2:]], None]


_SEVERAL["fbgemm::dense_to_jagged"] = _to_jagged


def _split(t: Typing, n: fx.Node) -> list[Dims | None]:
    x, at = t.dims(n.args[0]), dim_of(n)
    if op(n) == "unbind":
        return [[d for i, d in enumerate(x) if i != at] for _ in n.meta["val"]]
    out: list[Dims | None] = []
    block = blocks(t, n)
    for part in n.meta["val"]:
        inner = block if block is not None else t.axes.fresh(size(part.shape[at]))
        out.append([inner if i == at else d for i, d in enumerate(x)])
    return out


def blocks(t: Typing, n: fx.Node) -> Dim | None:
    """The inner axes of a dim that a split cuts between equal blocks: the reverse of a flattened stack."""
    atoms = t.axes.atoms(t.dims(n.args[0])[dim_of(n)])
    parts = [size(p.shape[dim_of(n)]) for p in n.meta["val"]]
    fits = len(atoms) > 1 and t.axes.size(atoms[0]) == len(parts)
    return atoms[1:] if fits and all(quotient(t.size_of(atoms[1:]), p) == 1 for p in parts) else None


for _name in SPLITS:
    _SEVERAL[_name] = _split


def _along_dim(t: Typing, n: fx.Node) -> list[Dims | None]:
    keep = bool(arg(n, "keepdim", False))
    dims: Dims = [[] if i == dim_of(n) else d for i, d in enumerate(t.dims(n.args[0])) if keep or i != dim_of(n)]
    return [dims, list(dims)]


for _name in ("max", "min", "median", "mode"):
    _SEVERAL[_name] = _along_dim
