"""Ops that nobody has declared by hand, as `table` says that torch treats their rows.

The table is generated (`python -m tests.ops derive`): for each overload, which dims are computed independently of each
other, in which operands, and for which arguments that was seen to be true. Such an op is called on packed rows with the
rank that it has on padded ones, rows in one of those dims, so that all of its other arguments stay as they are.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from ..calls import arg, is_tensor, op, rank_of, size, tensors
from ..declaration import Declaration, row_derived
from . import pointwise
from .table import TABLE

if TYPE_CHECKING:
    from ..axes import Dims, Typing
    from ..emit import Emitter
    from ..program import RowSet
    from ..rowwise import Rowwise
    from ..spaces import Space

aten = torch.ops.aten


@dataclass(frozen=True)
class Line:
    """One line of the table.

    rule    'pointwise'; 'beside dim …': all dims but those that these arguments name; 'before k': all but the last k;
            'first': the first
    rows    operands that may hold rows; all others must not
    takes   arguments that may differ from their defaults, and the values that they may have ('#2': a list of two);
            None for any
    ranks   of the first of those operands; none for any
    known   who says so: torch's sharding strategies, torch's decomposition, or trying alone
    """

    name: str
    rule: str
    rows: tuple[str, ...]
    takes: tuple[tuple[str, tuple[str, ...] | None], ...]
    ranks: tuple[int, ...]
    known: str

    @staticmethod
    def parse(text: str) -> Line:
        name, rule, rows, takes, ranks, known = (field.strip() for field in text.split(";"))
        values = [word.partition("=")[::2] for word in takes.split()]
        return Line(
            name, rule, tuple(rows.split()), tuple((k, tuple(v.split("|")) if v else None) for k, v in values),
            tuple(map(int, ranks.split())), known,
        )  # fmt: skip

    def __str__(self) -> str:
        takes = " ".join(name if values is None else f"{name}={'|'.join(values)}" for name, values in self.takes)
        ranks = " ".join(map(str, self.ranks))
        return " ; ".join([self.name, self.rule, " ".join(self.rows), takes, ranks, self.known])

    @property
    def declaration(self) -> Declaration:
        models = frozenset([*self.rows, *dict(self.takes)])
        values = {name: allowed for name, allowed in self.takes if allowed is not None}
        if self.rule == "pointwise":
            zeros, packed = pointwise.zero_of_zeros, pointwise.packed
            return Declaration(models, pointwise.broadcast, pointwise.aligned, zeros, None, packed, values)
        return Declaration(models, self.axes, self.mixes, None, None, self.packed, values)

    # --- dims --------------------------------------------------------------------------------------

    def operands(self, n: fx.Node) -> list[fx.Node]:
        return [x for name in self.rows if is_tensor(x := arg(n, name))]

    def independent(self, n: fx.Node, operand: fx.Node) -> list[int]:
        """Dims of an operand that are computed independently of each other."""
        rank, (kind, *words) = rank_of(operand), self.rule.split()
        if kind == "first":
            return [0] if rank else []
        if kind == "before":
            return list(range(rank - int(words[0])))
        named = [arg(n, word) for word in words]
        if any(dims in (None, [], ()) for dims in named):
            return []  # all of them
        mixed = {d % max(rank, 1) for dims in named for d in (dims if isinstance(dims, (list, tuple)) else [dims])}
        return [d for d in range(rank) if d not in mixed]

    def out(self, n: fx.Node, operand: fx.Node, result_rank: int) -> dict[int, int]:
        """Where these dims are in a result: in place, or moved up where others are gone."""
        dims = self.independent(n, operand)
        if self.rule.startswith("before"):
            most = max(len(self.independent(n, x)) for x in self.operands(n))
            return {d: d + most - len(dims) for d in dims}
        return {d: i for i, d in enumerate(dims)} if result_rank < rank_of(operand) else {d: d for d in dims}

    # --- the declaration ---------------------------------------------------------------------------

    def axes(self, t: Typing, n: fx.Node) -> Dims | list[Dims | None]:
        found: list[Dims | None] = []
        for result in _results(n):
            dims: Dims = [t.axes.fresh(size(s)) for s in result.shape]
            for at in range(result.dim()):
                outs = [(x, self.out(n, x, result.dim())) for x in self.operands(n)]
                mine = [t.dims(x)[d] for x, out in outs for d, e in out.items() if e == at]
                dims[at] = t.join(*mine) if mine else dims[at]
            found.append(dims)
        return found if not is_tensor(n) else found[0] or []

    def mixes(self, r: Rowwise, n: fx.Node, s: Space) -> str | None:
        name, operands = op(n), self.operands(n)
        if self.ranks and rank_of(operands[0]) not in self.ranks:
            return f"{name} of so many dims was not tried"
        own = [x for x in tensors(n) if not r.free(x, s)]
        if not own or any(x not in operands for x in own) or not all(r.covers(x, s) for x in own):
            return f"{name} of values with other rows"
        if any(r.on_rows(x, d, s) for x in own for d in range(rank_of(x)) if d not in self.independent(n, x)):
            return f"{name} over rows"
        if self.rule.startswith("before") and len({rank_of(x) for x in own}) > 1:
            return f"{name} of values with different numbers of dims"
        places = {self._rows_out(r.typing, n, x, s) for x in own}
        return None if len(places) == 1 and None not in places else f"{name} of rows that share a dim with others"

    def _rows_out(self, t: Typing, n: fx.Node, x: fx.Node, s: Space) -> tuple[int, ...] | None:
        """Dims of the first result that rows go to, where those dims hold nothing else."""
        held = {d: atoms for d, atoms in enumerate(t.atoms(x)) if set(atoms) & set(s.axes)}
        out = self.out(n, x, _results(n)[0].dim())
        return tuple(out[d] for d in held) if all(set(atoms) <= set(s.axes) for atoms in held.values()) else None

    def packed(self, e: Emitter, n: fx.Node, chosen: RowSet) -> Any:
        axes = set(chosen.space.axes)
        own = {name: arg(n, name) for name in self.rows}
        own = {name: x for name, x in own.items() if is_tensor(x) and axes & set(e.typing.flat(x))}
        whole = e.again(n, **{name: _with_rank(e, x, chosen) for name, x in own.items()})
        first = next(iter(own.values()))
        rows = [d for d, atoms in enumerate(e.typing.atoms(first)) if axes & set(atoms)]
        if is_tensor(n):
            return _rows_first(e, whole, self.out(n, first, rank_of(n)), rows, rank_of(n))
        ranks = [result.dim() for result in _results(n)]
        pieces = [e.call(operator.getitem, whole, i) for i in range(len(ranks))]
        return [_rows_first(e, y, self.out(n, first, rank), rows, rank) for y, rank in zip(pieces, ranks, strict=True)]


def _results(n: fx.Node) -> list[torch.Tensor]:
    value = n.meta["val"]
    return [value] if isinstance(value, torch.Tensor) else list(value)


def _with_rank(e: Emitter, x: fx.Node, chosen: RowSet) -> fx.Node:
    """Packed, with all dims that the padded value has: rows in the first that held some, one in the others."""
    kept = [d for d, _ in e.kept(x, chosen.space.axes)]
    first, *others = [d for d in range(rank_of(x)) if d not in kept]
    y, before = e.packed(x, chosen), sum(d < first for d in kept)
    if before:
        y = e.call(aten.permute.default, y, [*range(1, before + 1), 0, *range(before + 1, len(kept) + 1)])
    for d in others:
        y = e.call(aten.unsqueeze.default, y, d)
    return y


def _rows_first(e: Emitter, y: fx.Node, out: dict[int, int], rows: list[int], rank: int) -> fx.Node:
    """The reverse, for a result."""
    first, *others = [out[d] for d in rows]
    for d in sorted(others, reverse=True):
        y = e.call(aten.squeeze.dim, y, d)
    at = first - sum(d < first for d in others)
    return y if at == 0 else e.call(aten.permute.default, y, [at, *(d for d in range(rank - len(others)) if d != at)])


def read() -> list[Line]:
    return [Line.parse(line) for line in TABLE.splitlines() if line]


for line in read():
    row_derived(line.name, line.declaration)
