"""Static shapes with option `capacity`: one compiled graph for each combination of sizes that batches come in.

A target that wants static shapes is not given the graph with open numbers of rows. The first call with a combination of
sizes compiles the graph for it, later ones find it: as many graphs as there are combinations of buckets, and of batch
sizes and lengths where those are dynamic too. At `LIMIT` of them no more are compiled, and batches of other sizes run
the captured graph.

Where the model sees a number of rows that is not rounded (`x[mask]`), almost every batch would be another combination:
then the target gets the graph with open sizes, as it does without `capacity`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from .. import _torch
from ..errors import TurbogrError
from .prologue import Call, Unprovable

ROUNDED = "turbogr_rounded"  # on inputs with one entry per row of a set that is rounded
LIMIT = 32
log = logging.getLogger("turbogr_compile.target")

Lower = Callable[[str, fx.GraphModule, Sequence[Any]], Callable[..., Any]]  # a name for the sizes, module, fake inputs


def open_size(graph: fx.Graph) -> fx.Node | None:
    """A value with a size that only the data knows and that is not rounded; None where there is none."""
    rounded: set[Any] = set()
    for node in graph.find_nodes(op="placeholder"):
        if node.meta.get(ROUNDED):
            rounded |= _torch.free_unbacked(node.meta["val"])
    values = (n for n in graph.nodes if n.op in ("placeholder", "call_function"))
    return next((n for n in values if _torch.free_unbacked(n.meta.get("val")) - rounded), None)


def is_rounded(graph: fx.Graph) -> bool:
    return any(node.meta.get(ROUNDED) for node in graph.find_nodes(op="placeholder"))


class Specialized:
    """A graph that is compiled when its inputs come in sizes that are new."""

    def __init__(self, module: fx.GraphModule, lower: Lower, raises: bool) -> None:
        self.module, self.lower, self.raises = module, lower, raises
        self.places = list(_open_places(module.graph))
        self.compiled: dict[tuple[int, ...], Callable[..., Any]] = {}
        self.refused: dict[tuple[int, ...], str] = {}

    def __call__(self, *given: Any) -> Any:
        return self.fitting(given)(*given)

    def checking(self, values: Callable[[Call], list[Any]]) -> Callable[[Call], list[Any]]:
        """`values`, after which a graph for their sizes exists, or the batch is refused."""

        def checked(call: Call) -> list[Any]:
            added = values(call)
            self.fitting([*call.inputs, *added])
            return added

        return checked

    def fitting(self, given: Sequence[Any]) -> Callable[..., Any]:
        """The graph for the sizes of these inputs."""
        sizes = tuple(int(given[at] if dim is None else given[at].shape[dim]) for at, dim in self.places)
        if sizes not in self.compiled:
            self.compiled[sizes] = self._compile(sizes, given)
        return self.compiled[sizes]

    def _for(self, name: str, given: Sequence[Any]) -> Callable[..., Any]:
        module, kept = _with_numbers(self.module, given)
        compiled = self.lower(name, module, _torch.fake_inputs([given[at] for at in kept]))
        return compiled if len(kept) == len(given) else lambda *all: compiled(*(all[at] for at in kept))

    def _compile(self, sizes: tuple[int, ...], given: Sequence[Any]) -> Callable[..., Any]:
        if sizes in self.refused:
            raise Unprovable(self.refused[sizes])
        if len(self.compiled) >= LIMIT:
            raise Unprovable(
                f"graphs for {LIMIT} combinations of sizes are compiled and no more will be: ask for fewer and larger "
                "buckets with option 'capacity'"
            )
        name = "x".join(map(str, dict.fromkeys(sizes)))
        log.info("compiling for sizes %s, combination %d of at most %d", name, len(self.compiled) + 1, LIMIT)
        try:
            return self._for(name, given)
        except TurbogrError:
            raise
        except Exception as error:
            if self.raises:
                raise
            said = (str(error).strip() or type(error).__name__).splitlines()[0]
            self.refused[sizes] = f"the target cannot take the graph with static shapes: {said}"
            raise Unprovable(self.refused[sizes]) from error


def _with_numbers(module: fx.GraphModule, given: Sequence[Any]) -> tuple[fx.GraphModule, list[int]]:
    """The module with its inputs that are numbers replaced by those, and places of the other inputs."""
    graph = _torch.copy_graph(module.graph)
    inputs, kept = graph.find_nodes(op="placeholder"), []
    for at, (node, value) in enumerate(zip(inputs, given, strict=True)):
        if isinstance(value, torch.Tensor):
            kept.append(at)
            continue
        for user in list(node.users):
            user.args, user.kwargs = fx.map_arg((user.args, user.kwargs), _replacing(node, value))
        graph.erase_node(node)
    return fx.GraphModule(module, graph), kept


def _replacing(node: fx.Node, value: Any) -> Callable[[fx.Node], Any]:
    return lambda n: value if n is node else n


def _open_places(graph: fx.Graph) -> Sequence[tuple[int, int | None]]:
    """Inputs and dims with a symbolic size, one for each such size."""
    found: dict[str, tuple[int, int | None]] = {}
    for at, node in enumerate(graph.find_nodes(op="placeholder")):
        value = node.meta.get("val")
        sizes: Sequence[tuple[int | None, Any]] = [(None, value)]
        if isinstance(value, torch.Tensor):
            sizes = list(enumerate(value.shape))
        for dim, size in sizes:
            if isinstance(size, torch.SymInt):
                found.setdefault(str(size.node.expr), (at, dim))
    return list(found.values())
