"""Sizes for torchair: symbols with example values, in place of sizes that nothing is known about.

torchair asks questions about sizes, such as whether one is 1, that have no answer for the number of packed rows. Here
each symbol gets an example value to answer with. What was asked and answered is kept, and looked at before each call:
where an answer is another one for the call's sizes, the graph as it came from AOTAutograd runs instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any

import sympy
import torch
from torch import fx

from ... import _torch
from .results import size_of, sources

# Unlike each other and unlike what models are made of, so that no two sizes seem equal or related.
EXAMPLES = (1021, 1427, 1931, 2503, 3001, 3583, 4001, 4507, 5003, 5507)


class Sizes:
    def __init__(self, module: fx.GraphModule, values: Sequence[Any]) -> None:
        inputs = module.graph.find_nodes(op="placeholder")
        self.sources = sources(inputs)
        self.mode = _torch.new_fake_mode()
        assert self.mode.shape_env is not None
        self.shapes = self.mode.shape_env
        self.symbols = {symbol: self._new(place) for place, symbol in enumerate(self._all(values))}
        self.values = [self._renewed(value) for value in values]

    def apply(self, module: fx.GraphModule) -> None:
        """Each value of the graph is described in terms of the new symbols."""
        _drop_promises(module.graph)
        _torch.propagate(module, self.mode, self.values)

    def tracing(self) -> AbstractContextManager[Any]:
        """Whoever looks for the mode of this compilation finds the one of the new symbols."""
        return _torch.tracing_with(self.mode)

    def answers_hold(self) -> Callable[[Sequence[Any]], bool]:
        """For the inputs of a call: whether all that was asked has the same answer for their sizes."""
        back = {new: old for old, new in self._pairs()}
        asked = [guard.expr.xreplace(back) for guard in self.shapes.guards]
        symbols = sorted((symbol for symbol in self.symbols if symbol in self.sources), key=str)
        places = [self.sources[symbol] for symbol in symbols]
        if any(question.free_symbols - set(symbols) for question in asked):
            return lambda given: False  # about a size that no input shows

        @lru_cache(maxsize=4096)
        def hold(*sizes: int) -> bool:
            known = {symbol: sympy.Integer(size) for symbol, size in zip(symbols, sizes, strict=True)}
            # That a size is neither 0 nor 1 is taken for granted of such symbols, and never asked.
            return all(size > 1 for size in sizes) and all(bool(question.xreplace(known)) for question in asked)

        return lambda given: hold(*(size_of(given, *place) for place in places))

    def _all(self, values: Sequence[Any]) -> list[sympy.Symbol]:
        found: dict[sympy.Symbol, None] = {}
        for value in values:
            for size in _sizes(value):
                if isinstance(size, torch.SymInt):
                    found.update(dict.fromkeys(sorted(size.node.expr.free_symbols, key=str)))
        return list(found)

    def _new(self, place: int) -> torch.SymInt:
        return _torch.named_symbol(
            self.shapes, f"size{place}", EXAMPLES[place % len(EXAMPLES)] + place // len(EXAMPLES)
        )

    def _pairs(self) -> list[tuple[sympy.Symbol, sympy.Symbol]]:
        return [(old, new.node.expr) for old, new in self.symbols.items()]

    def _renewed(self, value: Any) -> Any:
        if isinstance(value, torch.SymInt):
            return self._size(value)
        if not isinstance(value, torch.Tensor):
            return value
        with self.mode:
            sizes, strides = ([self._size(s) for s in part] for part in (value.shape, value.stride()))
            return torch.empty_strided(sizes, strides, dtype=value.dtype, device=value.device)

    def _size(self, size: Any) -> Any:
        if not isinstance(size, torch.SymInt):
            return size
        return _torch.symbolic_int(self.shapes, size.node.expr.xreplace(dict(self._pairs())))


def _drop_promises(graph: fx.Graph) -> None:
    """Bounds that a graph asserts, such as no more rows than the padded batch has: true of calls, not of examples."""
    for node in reversed(graph.find_nodes(op="call_function", target=torch.ops.aten._assert_scalar.default)):
        graph.erase_node(node)


def _sizes(value: Any) -> Sequence[Any]:
    if isinstance(value, torch.Tensor):
        return [*value.shape, *value.stride()]
    return [value]
