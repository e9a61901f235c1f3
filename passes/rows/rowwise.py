"""Which ops compute each row of their result from the same row of their operands.

`why_mixed` answers with a reason, for the model's author, where an op mixes rows. Ops without a rule mix rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ...graph.nodes import tensor
from .axes import LOSSES, REDUCTIONS, Typing, blocks, dim_of_cat, einsum_labels, is_pointwise_convolution, reduced_dims
from .ops import SPLITS, VIEWS, arg, dim_of, is_pointwise, is_tensor, op, rank_of, shape, tensors
from .spaces import Space

Check = Callable[["Rowwise", fx.Node, Space], "str | None"]
_CHECKS: dict[str, Check] = {}


def rowwise(*names: str) -> Callable[[Check], Check]:
    def add(check: Check) -> Check:
        _CHECKS.update(dict.fromkeys(names, check))
        return check

    return add


def known_ops() -> set[str]:
    return set(_CHECKS)


@dataclass
class Rowwise:
    typing: Typing
    space_of: Callable[[Any], Space | None]

    def why_mixed(self, node: fx.Node, space: Space) -> str | None:
        """None when row r of the result needs row r of its operands only."""
        name = op(node)
        if name == "getitem":
            source = node.args[0]
            if op(source) in _CHECKS and isinstance(source, fx.Node):
                return _CHECKS[op(source)](self, source, space)
            return f"no row rule for {op(source) or 'this value'}"
        if name in _CHECKS:
            return _CHECKS[name](self, node, space)
        if is_pointwise(node):
            return self._aligned(node, space)
        return f"no row rule for {name}" if name else "an input"

    def _aligned(self, node: fx.Node, space: Space) -> str | None:
        """Operands must run along the rows of the result, or not at all."""
        out = self.typing.atoms(node)
        for x in tensors(node):
            for mine, theirs in zip(reversed(self.typing.atoms(x)), reversed(out), strict=False):
                if mine and mine != theirs and any(a in space.axes for a in (*mine, *theirs)):
                    return f"%{x} is not aligned with the rows"
        return None

    def on_rows(self, node: Any, dim: int, space: Space) -> bool:
        return any(a in space.axes for a in self.typing.atoms(node)[dim % max(rank_of(node), 1)])

    def free(self, node: Any, space: Space) -> bool:
        """Has the value nothing to do with the rows?"""
        return not is_tensor(node) or not any(a in space.axes for a in self.typing.flat(node))

    def covers(self, node: Any, space: Space) -> bool:
        """Is each row axis of the value there once?"""
        flat = self.typing.flat(node)
        return all(flat.count(a) == 1 for a in space.axes)


@rowwise(*sorted(VIEWS), "repeat_interleave")
def _view(r: Rowwise, n: fx.Node, s: Space) -> str | None:
    flat = r.typing.flat(n.args[0])  # type: ignore[arg-type]
    if any(flat.count(a) > 1 for a in s.axes):
        return "a view of a tensor of pairs"
    if n in r.typing.untyped:
        return f"{op(n)} cuts across rows"
    if op(n) in ("repeat", "tile", "repeat_interleave"):
        inside = [d for d in r.typing.atoms(n) if len(d) > 1 and any(a in s.axes for a in d)]
        return "repeats rows" if inside and not r.covers(n.args[0], s) else None
    return None


@rowwise("layer_norm", "rms_norm")
def _norm(r: Rowwise, n: fx.Node, s: Space) -> str | None:
    count = len(arg(n, "normalized_shape"))
    return "normalises over rows" if any(r.on_rows(n.args[0], -1 - i, s) for i in range(count)) else None


@rowwise("softmax", "log_softmax", "_softmax", "_safe_softmax", "cumsum", "cumprod", "select", "slice", "narrow",
         "max", "min", "topk", "sort", "argsort", "logcumsumexp", "index_select")  # fmt: skip
def _along(r: Rowwise, n: fx.Node, s: Space) -> str | None:
    if n.target in (torch.ops.aten.max.default, torch.ops.aten.min.default, torch.ops.aten.max.other,
                    torch.ops.aten.min.other):  # fmt: skip
        return f"{op(n)} over rows"
    if op(n) in ("slice", "narrow") and r.typing.atoms(n) == r.typing.atoms(n.args[0]):  # type: ignore[arg-type]
        return None
    if not r.covers(n.args[0], s):
        return f"{op(n)}: rows of the result are not rows of %{n.args[0]}"
    if op(n) == "index_select" and not r.free(arg(n, "index"), s):
        return "selected by rows"
    at = arg(n, "dim")
    if r.on_rows(n.args[0], -1 if at is None else at, s):
        return f"{op(n)} runs over rows"
    return None


@rowwise(*sorted(REDUCTIONS))
def _reduction(r: Rowwise, n: fx.Node, s: Space) -> str | None:
    return f"{op(n)} over rows" if any(r.on_rows(n.args[0], d, s) for d in reduced_dims(n)) else None


@rowwise("cat", "concat", "stack")
def _cat(r: Rowwise, n: fx.Node, s: Space) -> str | None:
    at = dim_of_cat(n)
    atoms = r.typing.atoms(n)[at]
    if any(a in s.axes for a in atoms):
        same = op(n) != "stack" and all(r.typing.atoms(p)[at] == atoms[1:] for p in n.args[0])  # type: ignore[arg-type,union-attr]
        if not same or atoms[0] in s.axes:
            return f"{op(n)} along rows"
    parts: Any = n.args[0]
    return None if all(r.covers(p, s) for p in parts) else f"{op(n)} of values with other rows"


@rowwise("linear")
def _linear(r: Rowwise, n: fx.Node, s: Space) -> str | None:
    return None if not r.on_rows(n.args[0], -1, s) and all(r.free(x, s) for x in n.args[1:]) else "linear over rows"


@rowwise("matmul", "mm", "bmm", "addmm")
def _matmul(r: Rowwise, n: fx.Node, s: Space) -> str | None:
    x, y = n.args[-2:]
    if op(n) == "addmm":
        x, y = n.args[1:3]
        if not r.free(n.args[0], s) and not r.covers(n.args[0], s):
            return "addmm of a value with other rows"
    if r.on_rows(x, -1, s):
        return "a product over rows"
    if rank_of(y) <= 2 and r.free(y, s):
        return None if r.covers(x, s) else "a product of values with other rows"
    batch = r.typing.atoms(n)[:-2]
    rows = [a for d in batch for a in d if a in s.axes]
    same = rank_of(x) == rank_of(y) == rank_of(n) and sorted(rows) == sorted(s.axes)
    if not same or not r.covers(x, s) or not r.covers(y, s):
        return "a product of values with other rows"
    return None if r.typing.atoms(x)[:-2] == r.typing.atoms(y)[:-2] == batch else "a product of values with other rows"  # type: ignore[arg-type]


@rowwise("einsum")
def _einsum(r: Rowwise, n: fx.Node, s: Space) -> str | None:
    labels = einsum_labels(n)
    if labels is None:
        return "an einsum with '...' or a repeated letter"
    inputs, out = labels
    letters = {c: r.typing.atoms(n)[i] for i, c in enumerate(out)}
    for label, x in zip(inputs, n.args[1], strict=True):  # type: ignore[arg-type]
        for c, atoms in zip(label, r.typing.atoms(x), strict=True):
            if any(a in s.axes for a in atoms) and (c not in letters or not set(atoms) <= set(s.axes)):
                return "an einsum over rows"
    return None


@rowwise("embedding")
def _embedding(r: Rowwise, n: fx.Node, s: Space) -> str | None:
    if arg(n, "scale_grad_by_freq"):
        return "scale_grad_by_freq counts the pads too"
    return None if r.free(n.args[0], s) else "a table indexed by rows"


@rowwise("turbogr::sharded_lookup")
def _sharded_lookup(r: Rowwise, n: fx.Node, s: Space) -> str | None:
    """Also a collective: all ranks take part with the rows that they have, however many these are."""
    return None if r.free(n.args[0], s) and r.free(n.args[1], s) else "a table indexed by rows"


@rowwise("one_hot")
def _one_hot(r: Rowwise, n: fx.Node, s: Space) -> str | None:
    return None if arg(n, "num_classes") != -1 else "the number of classes depends on the data"


@rowwise("gather", "take_along_dim")
def _gather(r: Rowwise, n: fx.Node, s: Space) -> str | None:
    index = arg(n, "index") or arg(n, "indices")
    if r.on_rows(n.args[0], dim_of(n), s) or not r.covers(n.args[0], s) or not r.covers(index, s):
        return "gathers rows"
    same = all(r.typing.axes.same(a, b) for i, (a, b) in enumerate(zip(shape(n.args[0]), shape(index), strict=True))
               if i != dim_of(n))  # fmt: skip
    return None if same else "gathers from a corner of the tensor"


@rowwise("index")
def _index(r: Rowwise, n: fx.Node, s: Space) -> str | None:
    indices: Any = n.args[1]
    if not r.free(n.args[0], s):
        return "picks rows"
    plain = all(is_tensor(i) and tensor(i).dtype != torch.bool for i in indices)  # type: ignore[union-attr]
    return None if plain else "picks by a mask"


@rowwise("conv1d")
def _conv1d(r: Rowwise, n: fx.Node, s: Space) -> str | None:
    if not is_pointwise_convolution(n):
        return "a convolution over neighbouring rows"
    return "convolves over rows" if r.on_rows(n.args[0], -2, s) else None


@rowwise("cross_entropy_loss", "nll_loss", "nll_loss_nd")
def _cross_entropy(r: Rowwise, n: fx.Node, s: Space) -> str | None:
    if rank_of(n) == 0:
        return "a mean or sum over rows"
    return None if r.covers(n.args[0], s) and r.covers(n.args[1], s) else "a loss of values with other rows"


@rowwise(*sorted(LOSSES))
def _loss(r: Rowwise, n: fx.Node, s: Space) -> str | None:
    return "a mean or sum over rows" if rank_of(n) == 0 else r._aligned(n, s)


def _split(r: Rowwise, n: fx.Node, s: Space) -> str | None:
    at = dim_of(n)
    if not r.on_rows(n.args[0], at, s):
        return None if r.covers(n.args[0], s) else "a split of a value with other rows"
    outer = r.typing.atoms(n.args[0])[at][:1]  # type: ignore[arg-type]
    whole = op(n) != "unbind" and blocks(r.typing, n) is not None and outer[0] not in s.axes
    return None if whole and r.covers(n.args[0], s) else "a split of rows"


for _name in SPLITS:
    _CHECKS[_name] = _split
