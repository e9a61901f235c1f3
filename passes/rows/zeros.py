"""What pads contain: for each value, predicates outside of which it is exactly zero.

A value that is zero outside of some rows need not be computed there: scattering those rows into zeros is the value.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from ...graph.nodes import tensor
from .axes import REDUCTIONS, Typing, dim_of_cat
from .meaning import MINUS_INFINITY, Band, Holds, Iota, Meanings, Predicate, Within
from .ops import COPIES, VIEWS, arg, dim_of, is_tensor, op, rank_of, tensors

Support = frozenset[Predicate | Within]
NOWHERE_KNOWN: Support = frozenset()

# f(0) == 0
_KEEPS_ZERO = {
    "neg", "relu", "silu", "gelu", "tanh", "abs", "erf", "dropout", "_to_copy", "to", "square", "sin", "sinh", "asinh",
    "leaky_relu", "elu", "softsign", "sign", "sgn", "trunc", "round", "floor", "ceil", "mish", "hardswish", "selu",
    "expm1", "log1p", "nan_to_num", "relu6", "celu",
}  # fmt: skip
_LINEAR_IN_ROWS = {"select", "slice", "narrow", "index_select", *VIEWS, *COPIES, *REDUCTIONS} - {
    "any", "all", "prod", "argmax", "argmin", "logsumexp", "std", "var"
}  # fmt: skip


class Zeros:
    def __init__(self, graph: fx.Graph, typing: Typing, meanings: Meanings) -> None:
        self.graph, self.typing, self.meanings = graph, typing, meanings
        self._declared: dict[fx.Node, Support] = {}
        self._support: dict[fx.Node, Support] = {}
        self.propagate()

    def propagate(self) -> None:
        for node in self.graph.nodes:
            if is_tensor(node):
                flat = self.typing.flat(node)
                once = {a for a in flat if flat.count(a) == 1}  # a tensor of pairs has rows twice
                lost = self._mixed_axes(node)
                found = self._rule(node) | self._kept_by(node) | self._declared.get(node, NOWHERE_KNOWN)
                self._support[node] = frozenset(p for p in found if self.axes(p) <= once and not self.axes(p) & lost)

    def support(self, node: Any) -> Support:
        """Predicates that all hold wherever the value is not zero."""
        return self._support.get(node, NOWHERE_KNOWN)

    def declare(self, node: fx.Node, support: Support) -> None:
        """Said by who knows more about an op than its operands tell; `propagate` tells the others."""
        self._declared[node] = support

    def axes(self, predicate: Predicate | Within) -> set[int]:
        if isinstance(predicate, Within):
            sequence, column, _ = self.typing.jagged[predicate.node]
            return {*self.typing.axes.atoms(sequence), *self.typing.axes.atoms(column)}
        return set(self.typing.flat(predicate.node))

    def _mixed_axes(self, n: fx.Node) -> set[int]:
        """Axes along which an element of the result is not made from the element at its own index."""
        if not op(n):
            return set()
        name, source = op(n), n.args[0] if n.args else None
        if n in self.typing.untyped:
            return set(self.typing.flat(n))
        if name in ("linear", "matmul", "mm") and is_tensor(source):
            return set(self.typing.atoms(source)[-1])  # type: ignore[arg-type]
        if name in ("slice", "narrow", "select", "index_select"):
            same = rank_of(n) == rank_of(source) and self.typing.atoms(n) == self.typing.atoms(source)  # type: ignore[arg-type]
            return set() if same else set(self.typing.atoms(source)[dim_of(n)])  # type: ignore[arg-type]
        if name in ("cat", "concat"):
            parts: Any = source
            at = dim_of_cat(n)
            whole = self.typing.atoms(n)[at]
            pieces = [self.typing.atoms(p)[at] for p in parts]
            return set() if all(p == whole[1:] for p in pieces) else {a for p in pieces for a in p}
        if name == "getitem" and op(source) in _SPLITS:
            cut: Any = source
            return set(self.typing.atoms(cut.args[0])[dim_of(cut)])
        return set()

    def factor(self, node: Any) -> Support:
        """Predicates outside of which a factor is zero."""
        found = self.support(node)
        if not is_tensor(node) or node in self.meanings.tainted:
            return found
        weight = self.weight(node) if self.meanings.two(node) is None else None
        return found | {Predicate(weight, 0, False)} if weight is not None else found

    def _kept_by(self, node: fx.Node) -> Support:
        """A mask is zero where it is zero."""
        two = self.meanings.two(node)
        kept = two.with_yes(lambda yes, no: no == 0) if two is not None else None
        return (
            frozenset(k.predicate for k in kept.literals if isinstance(k, Holds)) if kept is not None else NOWHERE_KNOWN
        )

    def weight(self, node: Any) -> fx.Node | None:
        """The data behind a factor that may be zero on whole rows: an input, or integers made from inputs."""
        if not is_tensor(node) or not self.meanings.describes_rows(node):
            return None
        root = self.meanings.root(node)
        while op(root) in ("_to_copy", "to") and is_tensor(root.args[0]):
            root = self.meanings.root(root.args[0])  # type: ignore[arg-type]
        value = tensor(root)
        assert value is not None
        if isinstance(self.meanings.of(root), Iota):
            return None  # a position, which happens to be zero once
        if not value.dtype.is_floating_point:
            return root
        # A floating-point input is a weight of rows, and not a feature, where it is zero here and there.
        seen = self.meanings.example(root) if root.op == "placeholder" else None
        return root if seen is not None and bool((seen == 0).any()) and bool((seen != 0).any()) else None

    def _rule(self, n: fx.Node) -> Support:
        name = op(n)
        if not name:
            return NOWHERE_KNOWN
        if name in ("mul", "multiply"):
            return self.factor(n.args[0]) | self.factor(n.args[1])
        if name in ("div", "true_divide"):
            return self.support(n.args[0]) if self._never_zero(n.args[1]) else NOWHERE_KNOWN
        if name in ("cross_entropy_loss", "nll_loss", "nll_loss_nd") and rank_of(n):
            target: Any = n.args[1]
            ignored = self.meanings.describes_rows(target) and not tensor(target).dtype.is_floating_point  # type: ignore[union-attr]
            root = Predicate(self.meanings.root(target), arg(n, "ignore_index"), False)
            return frozenset([root]) if ignored else NOWHERE_KNOWN
        if name in ("gt", "ne"):
            return self.support(n.args[0]) if self.meanings.constant(n.args[1]) == 0 else NOWHERE_KNOWN
        if name in ("add", "sub") and all(is_tensor(a) for a in n.args[:2]):
            return self.support(n.args[0]) & self.support(n.args[1])
        if name == "pow":
            return self.support(n.args[0]) if isinstance(n.args[1], (int, float)) and n.args[1] > 0 else NOWHERE_KNOWN
        if name in ("clamp", "clip"):
            low, high = arg(n, "min"), arg(n, "max")
            through = all(b is None or isinstance(b, (int, float)) for b in (low, high))
            inside = through and (low is None or low <= 0) and (high is None or high >= 0)
            return self.support(n.args[0]) if inside else NOWHERE_KNOWN
        if name in ("where", "masked_fill"):
            return self._filled(n)
        if name in ("linear", "matmul", "mm"):
            bare = name != "linear" or len(n.args) < 3 or n.args[2] is None
            return self.support(n.args[0]) if bare else NOWHERE_KNOWN
        if name in ("cat", "stack", "concat"):
            parts: Any = n.args[0]
            return frozenset.intersection(*[self.support(p) for p in parts])
        if name == "fbgemm::jagged_to_padded_dense":
            return (
                frozenset([Within(self.typing.offsets(arg(n, "offsets")[0]))])
                if not arg(n, "padding_value")
                else NOWHERE_KNOWN
            )
        if name == "getitem":
            source = n.args[0]
            return self.support(tensors(source)[0]) if op(source) in _SPLITS else NOWHERE_KNOWN  # type: ignore[arg-type]
        return self.support(n.args[0]) if name in _KEEPS_ZERO or name in _LINEAR_IN_ROWS else NOWHERE_KNOWN

    def _filled(self, n: fx.Node) -> Support:
        """where(mask, x, 0), masked_fill(x, mask, 0)."""
        if op(n) == "where":
            mask, value, other = n.args[:3]
            wanted = True
            if self.meanings.constant(value) == 0:
                value, other, wanted = other, value, False
        else:
            value, mask, other = n.args[:3]
            wanted = False
        if self.meanings.constant(other) != 0:
            return NOWHERE_KNOWN
        two = self.meanings.two(mask)
        kept = two.with_yes(lambda yes, no: bool(yes) is wanted and bool(no) is not wanted) if two is not None else None
        held = {k.predicate for k in kept.literals if isinstance(k, Holds)} if kept is not None else set()
        return self.support(value) | held

    def _never_zero(self, value: Any) -> bool:
        while op(value) in VIEWS | COPIES:
            value = value.args[0]
        if not isinstance(value, fx.Node):
            return isinstance(value, (int, float)) and value != 0
        constant = self.meanings.constant(value)
        if constant is not None:
            return constant != 0
        if op(value) in ("clamp", "clamp_min", "clip"):
            return isinstance(arg(value, "min"), (int, float)) and arg(value, "min") > 0
        return op(value) in ("exp", "sigmoid", "softplus") or (
            op(value) == "add"
            and isinstance(value.args[1], float)
            and value.args[1] > 0
            and op(value.args[0]) in _NEVER_NEGATIVE
        )

    def floor(self, node: Any) -> Support:
        """Predicates outside of which a score is minus infinity: a softmax is zero there."""
        scale = 1.0
        while op(node) in COPIES or op(node) in ("_to_copy", "to") or self._scales(node):
            if self._scales(node):
                factor = float(self.meanings.constant(node.args[1]))
                scale *= 1 / factor if op(node) == "div" else factor
            node = node.args[0]
        literals, rest = self._floor_of(node, scale)
        if literals is None or any(isinstance(k, Band) for k in literals):
            return NOWHERE_KNOWN
        return frozenset(k.predicate for k in literals) | self.floor(rest)

    def _scales(self, node: Any) -> bool:
        """A product with, or quotient by, a positive number."""
        if op(node) not in ("mul", "div") or not is_tensor(node.args[0]):
            return False
        factor = self.meanings.constant(node.args[1])
        return factor is not None and factor > 0

    def _floor_of(self, node: Any, scale: float) -> tuple[Any, Any]:
        """Literals under which one op leaves a score alone, and the score."""
        if op(node) == "add":
            for mask, other in ((node.args[0], node.args[1]), (node.args[1], node.args[0])):
                two = self.meanings.two(mask)
                if two is not None and two.admits() is not None and min(two.yes, two.no) * scale <= MINUS_INFINITY:
                    return two.admits(), other
        if op(node) not in ("where", "masked_fill") or len(node.args) < 3:
            return None, None
        mask, rest, filler = node.args if op(node) == "where" else (node.args[1], node.args[0], node.args[2])
        wanted = op(node) == "where"
        if wanted and self.meanings.constant(rest) is not None:
            rest, filler, wanted = filler, rest, False
        value, two = self.meanings.constant(filler), self.meanings.two(mask)
        if value is None or value * scale > MINUS_INFINITY or two is None:
            return None, None
        kept = two.with_yes(lambda yes, no: bool(yes) is wanted and bool(no) is not wanted)
        return (kept.literals, rest) if kept is not None else (None, None)


_SPLITS = {"split", "split_with_sizes", "chunk", "unbind", "tensor_split"}
_NEVER_NEGATIVE = {"linalg_norm", "linalg_vector_norm", "norm", "abs", "square", "relu", "exp", "sigmoid", "sqrt"}
