"""Compute SiLU and the cut of its result in one sweep."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from .. import (
    kernels,  # noqa: F401  (defines the ops)
)
from ..graph.nodes import tensor
from ..graph.phases import Phase
from ..pipeline.catalogue import register
from ..pipeline.context import Context
from ..pipeline.pass_base import Pass
from ..rules.pattern import arguments

aten, ops = torch.ops.aten, torch.ops.turbogr
GATHER = ops.gather_rows.default


@register
@dataclass(frozen=True)
class FuseSiluSplit(Pass):
    """Compute silu(x) and its parts, as an HSTU block begins, in one sweep over x."""

    name = "fuse-silu-split"
    phase = Phase.PRE_GRAD
    after = ("remove-noops", "fold-views", "pack-rows", "eliminate-common", "recognize-activations", "simplify-masks")
    before = ("eliminate-dead-code",)

    def run(self, graph: fx.Graph, ctx: Context) -> None:
        for silu in list(graph.find_nodes(op="call_function", target=aten.silu.default)):
            cuts = Cuts(silu)
            if not cuts.parts:
                continue  # nothing is cut here
            reason = cuts.obstacle()
            if reason:
                ctx.missed("silu-not-split", reason, silu)
                continue
            with ctx.rewrite("silu-split", silu, *cuts.nodes):
                _fuse(silu, cuts)


@dataclass(frozen=True)
class Part:
    """Some columns of silu(x), perhaps of some of its rows."""

    node: fx.Node
    first: int
    last: int
    gather: fx.Node | None


@dataclass
class Cuts:
    """Who reads the result of a SiLU."""

    silu: fx.Node
    parts: list[Part] = field(default_factory=list)
    nodes: list[fx.Node] = field(default_factory=list)  # between the SiLU and its parts, and the parts
    others: list[fx.Node] = field(default_factory=list)
    sizes: set[tuple[int, ...]] = field(default_factory=set)  # as splits say

    def __post_init__(self) -> None:
        self._read(self.silu, None)

    @property
    def width(self) -> Any:
        value = tensor(self.silu)
        assert value is not None
        return value.shape[-1]

    def _read(self, source: fx.Node, gather: fx.Node | None) -> None:
        for user in source.users:
            if user.target is GATHER and user.args[0] is source and gather is None and _rank(source) > 1:
                self.nodes.append(user)
                self._read(user, user)  # parts of gathered rows are gathered rows of parts
            elif user.target is aten.sym_size.int:
                pass
            elif not self._cut(user, source, gather):
                self.others.append(user)

    def _cut(self, node: fx.Node, source: fx.Node, gather: fx.Node | None) -> bool:
        if node.target is aten.slice.Tensor:
            a = arguments(node)
            ends = _ends(a["start"], a["end"], self.width)
            if a["dim"] != _rank(source) - 1 or a["step"] != 1 or ends is None:
                return False
            self.parts.append(Part(node, *ends, gather))
            self.nodes.append(node)
            return True
        sizes = _sizes(node, _rank(source) - 1, self.width)
        if sizes is None or any(u.target is not operator.getitem for u in node.users):
            return False
        self.sizes.add(sizes)
        self.nodes.append(node)
        for user in node.users:
            which = user.args[1]
            assert isinstance(which, int)
            first = sum(sizes[:which])
            self.parts.append(Part(user, first, first + sizes[which], gather))
            self.nodes.append(user)
        return True

    def partition(self) -> tuple[int, ...]:
        """Sizes of parts that cover all columns; empty where parts overlap or leave columns out."""
        if len(self.sizes) == 1:
            (sizes,) = self.sizes
        else:
            edges = sorted({(p.first, p.last) for p in self.parts})
            sizes = tuple(last - first for first, last in edges)
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        known_edges = {(start, start + size) for start, size in zip(starts, sizes, strict=True)}
        whole = sum(sizes) == self.width and all((p.first, p.last) in known_edges for p in self.parts)
        return sizes if whole else ()

    def obstacle(self) -> str:
        """Why the two cannot be one; '' where they can."""
        if self.others:
            reader = self.others[0]
            named = "the caller" if reader.op == "output" else f"%{reader.name}"
            return f"all of %{self.silu.name} is read by {named}, not only its parts"
        if any(u.target is aten.as_strided.default for p in self.parts for u in p.node.users):
            return f"the memory of %{self.silu.name} is read by its strides"
        if not isinstance(self.width, int):
            return f"the width of %{self.silu.name} is not fixed"
        sizes = self.partition()
        if not sizes:
            return f"the parts of %{self.silu.name} do not cover it, each column once"
        return "" if len(sizes) > 1 else f"%{self.silu.name} has one part only"


def _rank(node: fx.Node) -> int:
    value = tensor(node)
    return 0 if value is None else value.dim()


def _ends(start: Any, end: Any, width: Any) -> tuple[int, int] | None:
    """Columns of a slice, counted from the first."""
    if not isinstance(width, int) or not isinstance(start, int) or not (end is None or isinstance(end, int)):
        return None
    first, last, _ = slice(start, end).indices(width)
    return (first, last) if first < last else None


def _sizes(node: fx.Node, last: int, width: Any) -> tuple[int, ...] | None:
    """Of the parts of a split along the last dim."""
    if node.target not in (aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default):
        return None
    parts = node.meta.get("val")
    if arguments(node)["dim"] != last or not isinstance(parts, (list, tuple)) or not isinstance(width, int):
        return None
    sizes = tuple(p.shape[-1] for p in parts)
    return sizes if all(isinstance(s, int) for s in sizes) else None


def _fuse(silu: fx.Node, cuts: Cuts) -> None:
    graph, sizes = silu.graph, cuts.partition()
    with graph.inserting_before(silu):
        made = graph.call_function(ops.silu_split.default, (silu.args[0], list(sizes)))
        pieces = {}
        for i, size in enumerate(sizes):
            first = sum(sizes[:i])
            pieces[first, first + size] = graph.call_function(operator.getitem, (made, i))
    gathered: dict[Any, fx.Node] = {}
    for part in cuts.parts:
        piece = pieces[part.first, part.last]
        if part.gather is not None:
            key = part.gather, piece
            if key not in gathered:
                with graph.inserting_before(part.gather):
                    gathered[key] = graph.call_function(GATHER, (piece, part.gather.args[1]))
            piece = gathered[key]
        part.node.replace_all_uses_with(piece)
    for node in sorted({silu, *cuts.nodes}, reverse=True):
        if not node.users:
            graph.erase_node(node)
