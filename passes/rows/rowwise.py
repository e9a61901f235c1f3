"""Which ops compute each row of their result from the same row of their operands.

`why_mixed` answers with a reason, for the model's author, where an op mixes rows. Ops without a declaration mix rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import fx

from .axes import Typing
from .calls import LIKE, REPEATS, arg, is_tensor, op, rank_of, shape, tensors
from .declaration import declared, why_undeclared
from .spaces import Space


@dataclass
class Rowwise:
    typing: Typing
    space_of: Callable[[Any], Space | None]
    arg = staticmethod(arg)

    def why_mixed(self, node: fx.Node, space: Space) -> str | None:
        """None when row r of the result needs row r of its operands only."""
        if not op(node):
            return "an input"
        source: Any = node.args[0] if op(node) == "getitem" else node
        found = declared(source)
        if found is None or found.mixes is None:
            return why_undeclared(source)
        if is_tensor(node) and 0 in shape(node):
            return "a value without elements"
        if self.typing.crossed(source) & set(space.axes):
            return f"{op(source)} of values whose rows lie in another order"
        if self._makes_rows(node, source, space):
            return f"{op(source)} makes rows"
        mixes = found.mixes
        failed: str | None = "its row rule failed"
        return self.typing.trying(source, lambda: mixes(self, source, space), failed)

    def _makes_rows(self, node: fx.Node, source: fx.Node, space: Space) -> bool:
        """Do rows run over what only the result has, such as the classes of a one-hot matrix? Each row would be all."""
        if op(source) in REPEATS or op(source) in LIKE or not tensors(source):
            return False
        brought = {a for x in tensors(source) for a in self.typing.flat(x)}
        return any(a in space.axes and a not in brought for a in self.typing.flat(node))

    def aligned(self, node: fx.Node, space: Space) -> str | None:
        """Operands must run along the rows of the result, or not at all."""
        out = self.typing.atoms(node)
        for x in tensors(node):
            for mine, theirs in zip(reversed(self.typing.atoms(x)), reversed(out), strict=False):
                if mine and mine != theirs and any(a in space.axes for a in (*mine, *theirs)):
                    return f"%{x} is not aligned with the rows"
        return None

    def on_rows(self, node: Any, dim: int, space: Space) -> bool:
        """Does a dim of a value run over rows?"""
        return any(a in space.axes for a in self.typing.atoms(node)[dim % max(rank_of(node), 1)])

    def free(self, node: Any, space: Space) -> bool:
        """Has the value nothing to do with the rows?"""
        return not is_tensor(node) or not any(a in space.axes for a in self.typing.flat(node))

    def covers(self, node: Any, space: Space) -> bool:
        """Is each row axis of the value there once?"""
        flat = self.typing.flat(node)
        return all(flat.count(a) == 1 for a in space.axes)
