"""What evaluation asks of a graph beyond its nodes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable

import torch
from torch import fx

from ..._torch import shape_env_of
from .attention.facts import Constants
from .axes import Axis, Typing
from .spaces import Space


class Known:
    """Constants, the batch seen, and which dims run over sequences.

    tainted  values that only the graph computes: trained, drawn, exchanged, or too much work to compute twice
    example  the value of an untainted node on the inputs seen at compile time, or None
    """

    def __init__(
        self, graph: fx.Graph, typing: Typing, tainted: set[fx.Node], example: Callable[[fx.Node], torch.Tensor | None]
    ) -> None:
        self.graph, self.typing, self.tainted, self._example = graph, typing, tainted, example
        self.env = shape_env_of(graph)
        self._constants = Constants(graph)
        self._sequences: frozenset[Axis] = frozenset()

    def with_rows(self, spaces: Iterable[Space]) -> Known:
        """The same, once it is known what the rows are."""
        found = copy.copy(self)
        found._sequences = frozenset(a for s in spaces for a in s.sequence)
        return found

    def is_sequence(self, node: fx.Node, dim: int) -> bool:
        atoms = self.typing.atoms(node)[dim]
        return bool(atoms) and set(atoms) <= self._sequences

    def gradients_reach(self, node: fx.Node) -> bool:
        """Also of what is too much work to compute before the graph runs: it can be assumed of, but not checked."""
        return node in self.tainted

    def is_constant(self, node: fx.Node) -> bool:
        return node in self._constants

    def is_parameter(self, node: fx.Node) -> bool:
        """Of a model, as far as is known; a tensor that merely gets gradients may be one of the batch."""
        example = self._example(node)
        return example is None or isinstance(example, torch.nn.Parameter)

    def example(self, node: fx.Node) -> torch.Tensor | None:
        if node in self._constants:
            return self._constants.value(node)
        return self._example(node) if node not in self.tainted else None
