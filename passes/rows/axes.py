"""Which dims of which values run over the same thing.

Every dim is an ordered product of *axes*; a dim of size 1 is the empty product. Ops that line up two dims (addition,
contraction, a loss with its targets) make their axes one; reshapes split and regroup axes. Two dims of the same axes
are aligned index by index. Sizes alone say nothing; where an op lines up dims whose sizes are equal only in the batch
seen, that is assumed, and checked on every batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import fx

from .calls import Size, arg, differ, op, product, quotient, shape, size_seen
from .calls import dim_of_cat as dim_of_cat  # read here by others
from .calls import einsum_labels as einsum_labels
from .calls import reduced_dims as reduced_dims
from .calls import swapped as swapped
from .declaration import declared

Axis = int
Dim = list[Axis]
Dims = list[Dim]
T = TypeVar("T")


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

    def seen(self, size: Size) -> int | None:
        """A size as it was in the call seen."""
        return self._hint(size)

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
    """Dims of every value of a graph; of one that stands within another, in the axes of that, if inputs are given."""

    arg = staticmethod(arg)

    def __init__(self, graph: fx.Graph, axes: Axes | None = None, given: Mapping[fx.Node, Dims] | None = None) -> None:
        self.axes = axes or Axes(lambda value: size_seen(graph, value))
        self._given = given or {}
        self._dims: dict[fx.Node, Dims] = {}
        self._parts: dict[fx.Node, list[Dims | None]] = {}  # of ops with several results
        self.jagged: dict[fx.Node, tuple[Dim, Dim, Dim]] = {}  # offsets -> sequence, column and row dims
        self.untyped: set[fx.Node] = set()  # no rule: nothing is known about their dims
        self._offsets: dict[Any, fx.Node] = {}
        self.kept: dict[fx.Node, Dim] = {}  # mask -> the rows it keeps
        self._atoms: dict[fx.Node, Dims] = {}
        self.failures: dict[fx.Node, str] = {}  # of rules
        self.bodies: dict[fx.Node, Any] = {}  # of functions that bring their own gradient
        self._crossed: dict[fx.Node, Dims] = {}  # dims that an op lines up, and that are made of other axes
        for node in graph.nodes:
            self._at = node
            self._type(node)

    def offsets(self, node: fx.Node) -> fx.Node:
        """Offsets computed from the same lengths are the same."""
        if op(node) not in ("fbgemm::asynchronous_complete_cumsum", "cumsum") or len(node.args) != 1:
            return node
        return self._offsets.setdefault((node.target, node.args), node)

    def _type(self, node: fx.Node) -> None:
        value = node.meta.get("val")
        if isinstance(value, (list, tuple)):
            self._parts[node] = self._rule(node) or [None] * len(value)
            return
        if not isinstance(value, torch.Tensor):
            return
        dims = self._given.get(node) or self._rule(node)
        if dims is None or len(dims) != value.dim() or any(map(differ, map(self.size_of, dims), shape(node))):
            if node.op == "call_function":
                self.untyped.add(node)
            dims = [self.axes.fresh(s) for s in shape(node)]
        self._dims[node] = dims

    def _rule(self, node: fx.Node) -> Any:
        """Dims of the result, a list of them for an op with several results, or None."""
        if op(node) == "getitem":
            source, index = node.args
            parts = self._parts.get(source, []) if isinstance(source, fx.Node) else []
            return parts[index] if isinstance(index, int) and index < len(parts) else None
        found = declared(node)
        if found is None or found.axes is None:
            return None
        axes = found.axes
        return self.trying(node, lambda: axes(self, node), None)

    def trying(self, node: fx.Node, rule: Callable[[], T], otherwise: T) -> T:
        """What a part of a declaration says; where it fails, the op is one that nothing is known of."""
        if node in self.failures:
            return otherwise
        try:
            return rule()
        except Exception as error:
            self.failures[node] = f"{type(error).__name__}: {error}".splitlines()[0]
            return otherwise

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
        """One dim that all of them are; size-1 dims broadcast.

        Dims of one size may have axes that do not fit, or lie in another order: then the op crosses them.
        """
        real = [d for d in dims if d]
        for other in real[1:]:
            if not self.axes.unify_dims(real[0], other):
                self._crossed.setdefault(self._at, []).extend([real[0], other])
        return real[0] if real else []

    def crossed(self, node: fx.Node) -> set[Axis]:
        """Axes that lie elsewhere in one operand of an op than in another: its rows are not theirs."""
        return {a for dim in self._crossed.get(node, ()) for a in self.axes.atoms(dim)}

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
