"""A few sequences of a batch, where all of it would take too long to run padded.

Only sizes that are symbolic in the captured graph can be made smaller; the compiled graph then takes the smaller batch
as it takes any other. Sequences are chosen by length, from the shortest to the longest. Where even two whole sequences
are too many, every so many-th column is taken, the first and the last among them: padding stays on its side, holes stay
holes, and times stay in order. Inputs that held lengths hold the new ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from .. import _torch
from ..graph import costs
from ..graph.shapes import expression
from ..runtime.prologue import InputRows
from .disturbance import laid_out_like, relengthed

_SEQUENCES = (16, 8, 4, 3, 2)
_FEWEST_COLUMNS = 8
_ROUND = 64  # models like their lengths to be multiples of a power of two, and guard on it
Sizes = Mapping[sympy.Symbol, int]


class CannotSample(Exception):
    """No smaller batch can be made for this graph; the text says why."""


@dataclass(frozen=True)
class Sample:
    """How to make a smaller batch of one."""

    rows: InputRows
    shapes: Sequence[Sequence[sympy.Expr] | sympy.Expr | None]  # of the inputs; a number has an expression, no shape
    sizes: Sizes
    sequence: sympy.Expr
    column: sympy.Expr | None
    text: str  # '2 of 8 sequences, 512 of 8192 columns'

    def allowed(self, graph: fx.Graph) -> bool:
        """Still: targets assume more about sizes while they compile."""
        return _torch.sizes_allowed(_torch.shape_env_of(graph), {**costs.known_sizes(graph), **self.sizes})

    def of(self, inputs: Sequence[Any]) -> list[Any]:
        with torch.no_grad():
            valid = self.rows.valid(inputs).cpu()
            sequences = _by_length(valid, self._size(self.sequence, valid.shape[0]))
            columns = _spread(valid.shape[1], self._size(self.column, valid.shape[1]))
            kept = valid[sequences][:, columns]
            small = [self._taken(i, x, sequences, columns) for i, x in enumerate(inputs)]
            return [
                relengthed(x, valid[sequences].sum(1), kept.sum(1)) if i in self.rows.dims else x
                for i, x in enumerate(small)
            ]

    def _size(self, size: sympy.Expr | None, present: int) -> int:
        return self.sizes.get(size, present) if isinstance(size, sympy.Symbol) else present

    def _taken(self, number: int, x: Any, sequences: torch.Tensor, columns: torch.Tensor) -> Any:
        shape = self.shapes[number]
        if not isinstance(x, torch.Tensor):
            return int(shape.subs(self.sizes)) if isinstance(shape, sympy.Expr) and self._changes(shape) else x
        if not isinstance(shape, Sequence) or not any(map(self._changes, shape)):
            return x
        out = x.detach()
        dims = self.rows.dims.get(number, ())
        for dim, size in enumerate(shape):
            if not self._changes(size):
                continue
            if size == self.sequence and (size != self.column or dim in dims[:1]):
                places = sequences
            elif size == self.column:
                places = columns
            else:
                places = torch.arange(int(size.subs(self.sizes)))
            out = out.index_select(dim, places.to(x.device))
        return laid_out_like(x, out).requires_grad_(x.requires_grad)

    def _changes(self, size: sympy.Expr) -> bool:
        return not size.free_symbols.isdisjoint(self.sizes)


def sample_for(graph: fx.Graph, rows: InputRows | None, fits: Callable[[Sizes], bool]) -> Sample:
    """The largest of the smaller batches that fit; raises CannotSample."""
    if rows is None:
        raise CannotSample("which dims of its inputs run over sequences is not known")
    shapes = [_shape(n.meta.get("val")) for n in graph.find_nodes(op="placeholder")]
    sequence = _common(shapes, {i: dims[:1] for i, dims in rows.dims.items()})
    column = _common(shapes, {i: dims[1:] for i, dims in rows.dims.items()})
    if not isinstance(sequence, sympy.Symbol) and not isinstance(column, sympy.Symbol):
        raise CannotSample("its sizes are fixed; with dynamic=True a few sequences of the batch are compared")
    seen = {symbol: int(size) for symbol, size in costs.known_sizes(graph).items()}
    env = _torch.shape_env_of(graph)
    for sizes in _candidates(sequence, column, seen):
        if _torch.sizes_allowed(env, {**seen, **sizes}) and fits(sizes):
            told = [(sequence, "sequences"), (column, "columns")]
            text = ", ".join(f"{sizes[s]} of {seen[s]} {what}" for s, what in told if s in sizes and sizes[s] < seen[s])
            return Sample(rows, shapes, sizes, sequence, column, text)
    raise CannotSample("no smaller batch that its sizes allow is small enough")


def _shape(value: Any) -> Sequence[sympy.Expr] | sympy.Expr | None:
    if isinstance(value, torch.Tensor):
        return [expression(s) for s in value.shape]
    return expression(value) if isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool) else None


def _common(shapes: Sequence[Any], dims: Mapping[int, tuple[int, ...]]) -> sympy.Expr | None:
    """The one size that these dims of inputs have; None where there are several, or none."""
    found = {shapes[i][dim] for i, each in dims.items() for dim in each}
    return found.pop() if len(found) == 1 else None


def _candidates(sequence: Any, column: Any, seen: Sizes) -> Iterator[dict[sympy.Symbol, int]]:
    """Long sequences before many."""
    columns: int | None = seen.get(column)
    while columns is None or columns >= _FEWEST_COLUMNS:
        own = {column: columns} if columns is not None else {}
        if sequence == column:
            yield own
        elif sequence in seen:
            yield from ({**own, sequence: few} for few in _SEQUENCES if few < seen[sequence])
            if columns is not None and seen[sequence] <= _SEQUENCES[0]:
                yield {**own, sequence: seen[sequence]}
        else:
            yield own
        if columns is None:
            return
        columns //= 2
        columns -= columns % _ROUND if columns > _ROUND else 0


def _by_length(valid: torch.Tensor, count: int) -> torch.Tensor:
    """Sequences from the shortest to the longest, in the order of the batch."""
    order = valid.sum(1).argsort(stable=True)
    return order[_spread(len(order), count)].sort().values


def _spread(size: int, count: int) -> torch.Tensor:
    """So many of the numbers below `size`, the first and the last among them."""
    return torch.linspace(0, size - 1, count).round().long()
