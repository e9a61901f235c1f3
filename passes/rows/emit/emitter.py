"""The walk over a captured graph that carries decisions out; it makes none."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ....errors import TurbogrError
from ....graph.nodes import tensor
from ....graph.provenance import line_of
from ..attending import Attention
from ..attention.checks import LogSum
from ..attention.checks import SeesKey as SeesAKey
from ..calls import Size, differ, is_tensor, op, shape
from ..deciding import (
    Attends,
    AttendsAll,
    Decision,
    Fills,
    Given,
    Keeps,
    Leaves,
    Loses,
    Moves,
    OnRows,
    Picks,
    Pools,
    Sums,
    Weighs,
)
from ..declaration import declared
from ..program import HasRow, Holds, RowSet, SeesKey
from . import exits
from .attention import attention
from .functions import function
from .values import GATHER, Values

aten = torch.ops.aten
NOT_ON_BATCH = (SeesAKey, LogSum)  # asked of queries that are demanded; after the fact


class RuleFailed(TurbogrError):
    """A decision about a node could not be carried out."""

    def __init__(self, node: fx.Node, error: Exception) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.node = node

    @property
    def counts_rows(self) -> bool:
        """Does the fake of an op of torch ask how many rows there are?"""
        return any(words in str(self) for words in ("data-dependent", "only concrete integers"))


class Emitter(Values):
    """Makes the packed graph beside the captured one, whose nodes are left alone until the end."""

    def run(self) -> None:
        self.seen_sizes: list[fx.Node] = []  # whose number of rows the model sees, so that it is not rounded
        self._replaced: dict[fx.Node, fx.Node] = {}
        self._reads_padded: list[tuple[fx.Node, fx.Node, fx.Node]] = []  # node, packed operand, its padded form
        for node in list(self.graph.nodes):
            if node.op == "placeholder":
                continue
            self.at = node
            with self.graph.inserting_before(node):
                try:
                    self._visit(node)
                except Exception as error:
                    raise RuleFailed(node, error) from error
        for node, x, padded in self._reads_padded:
            node.replace_input_with(x, padded)
        for old, new in self._replaced.items():
            old.replace_all_uses_with(new)

    @property
    def superseded(self) -> set[fx.Node]:
        """Captured nodes whose work is done by packed ones."""
        attentions = [d.attention for d in self.an.decisions.values() if isinstance(d, (Attends, AttendsAll))]
        inside = {n for a in attentions for n in a.form.chain}
        return {*self.homes, *self._replaced, *inside}

    def refuse_misshapen(self) -> None:
        """A value with other dims than its rows have, or of another type, would be broadcast or cast where it is read.

        Asked once the graph is described.
        """
        for node, chosen in self.homes.items():
            self._compare(node, self._twins[node, chosen], self.kept_sizes(node, chosen.space.axes), 1)
        for node, new in self._replaced.items():
            self._compare(node, new, shape(node) if is_tensor(node) else [], 0)

    def _compare(self, node: fx.Node, made: Any, sizes: list[Size], rows: int) -> None:
        wanted, found = tensor(node), tensor(made)
        if wanted is None or found is None:
            return
        dims = shape(made)[rows:]
        misshapen = len(dims) != len(sizes) or any(map(differ, dims, sizes))
        if misshapen or found.dtype != wanted.dtype:
            error = TurbogrError(f"gives {found.dtype}{dims} in place of {wanted.dtype}{sizes}")
            raise RuleFailed(node, error) from error

    def _visit(self, node: fx.Node) -> None:
        if node.op != "output" and node not in self.an.wanted and not node.is_impure():
            return
        if op(node) == "turbogr::leave_rows" and node.args[0] in self.homes:
            return  # what is read of it is made from packed rows
        decision = self.an.decisions.get(node)
        if isinstance(decision, OnRows):
            chosen = self.set_of(decision.space, decision.rows, exact=isinstance(decision, Given))
            self.live(node, chosen, self._on_rows(node, decision, chosen))
        elif decision is not None:
            self._replaced[node] = self._whole(node, decision)
        else:
            for x in node.all_input_nodes:
                if x in self.homes:
                    self._reads_padded.append((node, x, self.dense(x)))

    def function(self, node: fx.Node, chosen: RowSet) -> Any:
        return function(self, node, chosen)

    def _on_rows(self, node: fx.Node, decision: OnRows, chosen: RowSet) -> fx.Node:
        match decision:
            case Attends():
                return self._attention(decision.attention, chosen)
            case Weighs():
                return self._softmax(node, decision, chosen)
            case Given():
                return self.dense(node.all_input_nodes[0])
            case Moves():
                return self.moved(node, decision.move, chosen)
        if op(node) == "getitem":
            return self.piece(node, chosen)
        found = declared(node)
        assert found is not None and found.packed is not None, op(node)
        return found.packed(self, node, chosen)

    def _whole(self, node: fx.Node, decision: Decision) -> fx.Node:
        match decision:
            case Fills():
                return exits.filled(self, node)
            case AttendsAll(a):
                return self.padded(self._attention(a, self.set_of(a.queries, None)), node, a.queries)
            case Loses():
                return exits.loss(self, node, decision)
            case Leaves():
                return exits.left(self, decision)
            case Keeps():
                self.seen_sizes.append(node)
                return exits.kept(self, node, decision)
            case Pools(product):
                return exits.pooled(self, node, product)
            case Sums():
                return exits.summed(self, node, decision)
            case Picks(move):
                return self.padded(self.moved(node, move, self.set_of(move.out, None)), node, move.out)
        raise TypeError(decision)

    def _attention(self, a: Attention, queries: RowSet) -> fx.Node:
        line = str(line_of(a.node) or "")
        if a.sees_key is not None:
            self.check(SeesKey(a, queries, line))
        self.check(*(Holds(c, line) for c in a.form.checks if not isinstance(c, NOT_ON_BATCH)))
        return attention(self, a, queries, self.set_of(a.keys, self.an.keys_of(a)))

    def _softmax(self, node: fx.Node, decision: Weighs, chosen: RowSet) -> fx.Node:
        soft, line = decision.softmax, str(line_of(node) or "")
        self.check(*(Holds(c, line) for c in soft.checks))
        if not soft.is_safe:
            self.check(HasRow(soft.visible, line))
        (source,) = node.all_input_nodes
        scores, wanted, given = self.packed(source, chosen), tensor(node), tensor(source)
        assert wanted is not None and given is not None
        if given.dtype != wanted.dtype:
            scores = self.call(aten._to_copy.default, scores, dtype=wanted.dtype)
        weights = self.call(torch.ops.turbogr.segment_softmax.default, scores, self.offsets(chosen))
        return self.call(GATHER, weights, self._again(chosen)) if chosen.rounded else weights

    def _again(self, chosen: RowSet) -> fx.Node:
        """Each row's own place, and the last row's for dummies."""
        return self.per_row("again", ("again", chosen), chosen, lambda r: torch.arange(len(r.rows(chosen))))
