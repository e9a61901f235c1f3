"""Calls of the packed graph, sizes as arguments, and dims that are left when row axes are gone."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from .... import _torch
from ....errors import PassError
from ..axes import Typing
from ..calls import Size, rank_of, size_symbols
from ..program import RowSet

aten = torch.ops.aten


class Builder:
    """Adds nodes to a graph, on behalf of the captured node at hand."""

    def __init__(self, graph: fx.Graph, typing: Typing) -> None:
        self.graph, self.typing = graph, typing
        self.placeholders = graph.find_nodes(op="placeholder")
        self.symbols = size_symbols(self.placeholders)  # before anything that is added here makes one a number
        self.origin: dict[fx.Node, fx.Node] = {}  # new node -> the captured node it stands for
        self.at: fx.Node | None = None
        mode = _torch.fake_mode_of(graph)
        assert mode is not None
        self.mode = mode

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        assert self.at is not None
        self.origin[node] = self.at
        return node

    def reshape(self, x: fx.Node, sizes: Sequence[Any]) -> fx.Node:
        return self.call(aten.reshape.default, x, [self.size(s) for s in sizes])

    def size(self, value: Size) -> Any:
        """A size as an argument: a number, or a node that reads it from an input."""
        return _arithmetic(value, self._symbol, self.call)

    def _symbol(self, symbol: sympy.Symbol) -> fx.Node:
        index, dim = self.symbols[symbol]
        node = self.placeholders[index]
        return node if dim is None else self.call(aten.sym_size.int, node, dim)

    def kept(self, node: fx.Node, axes: Sequence[int]) -> list[tuple[int, Size]]:
        """Dims that survive the deletion of row axes, with their sizes."""
        out = []
        for i, dim in enumerate(self.typing.atoms(node)):
            rest = [a for a in dim if a not in axes]
            if rest or not dim:
                out.append((i, self.typing.size_of(rest)))
        return out

    def kept_sizes(self, node: fx.Node, axes: Sequence[int]) -> list[Size]:
        return [s for _, s in self.kept(node, axes)]

    def position(self, node: fx.Node, dim: int, chosen: RowSet) -> int:
        """A dim of the padded value in its packed twin."""
        return 1 + [i for i, _ in self.kept(node, chosen.space.axes)].index(dim % rank_of(node))

    def fake_size(self, value: Size) -> Any:
        """A size of fake tensors for an expression."""

        def of(symbol: sympy.Symbol) -> Any:
            index, dim = self.symbols[symbol]
            found = self.placeholders[index].meta["val"]
            return found if dim is None else found.shape[dim]

        return _arithmetic(value, of, lambda op, *args: op(*args))


def _arithmetic(value: Size, symbol: Callable[[sympy.Symbol], Any], call: Callable[..., Any]) -> Any:
    """What an expression says, from what each symbol stands for."""
    if isinstance(value, (int, sympy.Integer)):
        return int(value)
    if isinstance(value, sympy.Symbol):
        return symbol(value)
    op = _torch.size_operator(value)
    if op is None:
        raise PassError(f"cannot write the size {value} with the sizes of the inputs")
    return functools.reduce(lambda x, y: call(op, x, y), [_arithmetic(part, symbol, call) for part in value.args])
