"""Inputs that passes add to a graph, computed outside of it before every call.

What depends only on other inputs (row indices, offsets) or on nothing (folded constants) need not be part of the
compiled graph; a pass appends a placeholder and says how to provide its value at run time. A provider may find that a
batch cannot take the rewritten graph (no valid row, a mask of another shape than it seemed): it raises `Unprovable`,
and this batch runs the graph that the pass kept with `keep_original`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import fx

from .. import _torch
from ..errors import TurbogrError
from ..pipeline.remarks import warn
from .statistics import RunStatistics

KEY = "turbogr_provider"
ORIGINAL = "turbogr_original"
ROWS = "turbogr_rows"
_UNSET = object()


class Call:
    """One call of a compiled graph, as its providers see it."""

    __slots__ = ("_made", "inputs", "kin", "seed")

    def __init__(self, inputs: Sequence[Any], seed: int = 0) -> None:
        self.inputs = inputs  # of the graph as it was captured
        self.seed = seed  # of whatever providers draw
        self._made: dict[Hashable, Any] = {}
        self.kin: list[Call] = []  # calls that another compilation of the same code announced for this batch

    def made(self) -> dict[Hashable, Any]:
        """What providers share so far, by key."""
        return dict(self._made)

    def once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """What `make` returns, made once per call: providers share work under a key."""
        made = self._made.get(key, _UNSET)
        if made is _UNSET:
            made = self._made[key] = make()
        return made


Provider = Callable[[Call], Any]


class RanksApart(TurbogrError):
    """Raised by an exchange on all ranks that take part in it: they came to it with different intentions."""


class Exchange(Protocol):
    """What providers do together with other ranks. May run ahead of its call, on another thread."""

    @property
    def place(self) -> Hashable:
        """Where ranks meet: equal for exchanges that must keep an order among each other."""

    def begin(self, call: Call) -> None:
        """In the thread of calls, during the call before: the exchange is about to be put on the line."""

    def leave(self, during: bool) -> Callable[[], Any]:
        """What tells the other ranks that no further call of this loop comes; raises where they go on.

        `during` the last call, or after it.
        """


class Unprovable(Exception):
    """Raised by a provider: this batch cannot take the rewritten graph. `line` is the user's, where there is one.

    Batches are counted by `reason`, and each reason is said once: leave numbers of the batch out of it.
    """

    def __init__(self, reason: str, line: str = "") -> None:
        super().__init__(reason)
        self.reason, self.line = reason, line


# --- for passes --------------------------------------------------------------------------------------


def add_input(graph: fx.Graph, name: str, fake: Any, provide: Provider) -> fx.Node:
    """Append a placeholder; `provide` gets the call and returns the placeholder's value, without gradient."""
    last = graph.find_nodes(op="placeholder")
    at = graph.inserting_after(last[-1]) if last else graph.inserting_before(next(iter(graph.nodes)))
    with at:
        node = graph.placeholder(name)
    node.target = node.name  # fx makes names unique, not targets, and generated code uses those
    node.meta["val"] = fake
    node.meta[KEY] = provide
    _torch.mark_added_input(node)
    return node


def keep_original(graph: fx.Graph) -> None:
    """Keep the graph as it is now for batches that a provider refuses; call before the first rewrite that needs it."""
    owner = graph.owning_module
    assert owner is not None
    if ORIGINAL not in owner.meta:
        owner.meta[ORIGINAL] = _torch.copy_graph(graph)


def original_of(module: fx.GraphModule) -> fx.GraphModule | None:
    """What `keep_original` kept, or None."""
    kept = module.meta.get(ORIGINAL)
    return fx.GraphModule(module, kept) if kept is not None else None


@dataclass(frozen=True)
class InputRows:
    """Which dims of which inputs run over sequences and their columns, and which rows of a batch matter.

    `dims` has, by number of the input, the dim of sequences and then those of columns, if any.
    """

    dims: Mapping[int, tuple[int, ...]]
    valid: Callable[[Sequence[Any]], torch.Tensor]  # of a call's inputs: bool (sequences, columns)


def keep_rows(graph: fx.Graph, rows: InputRows) -> None:
    """Leave what is known about the rows of inputs for whoever tries the compiled graph on other batches."""
    owner = graph.owning_module
    assert owner is not None
    owner.meta[ROWS] = rows


def rows_of(module: fx.GraphModule) -> InputRows | None:
    return module.meta.get(ROWS)


def reading(provide: Provider, inputs: Iterable[int] = (), draws: str = "") -> Provider:
    """Say which inputs of the call a provider reads: those alone must be known to run it ahead of its call.

    `draws` names the lines whose random numbers it draws, seeded by `Call.seed`.
    """
    provide.reads, provide.draws = frozenset(inputs), draws  # type: ignore[attr-defined]
    return provide


def exchanging(provide: Provider, exchange: Exchange) -> Provider:
    """Say that all ranks run a provider together."""
    provide.exchange = exchange  # type: ignore[attr-defined]
    return provide


# --- for the backend ---------------------------------------------------------------------------------


def reads(provide: Iterable[Provider]) -> frozenset[int] | None:
    """Inputs that providers read; None where one of them does not say."""
    found: list[frozenset[int] | None] = [getattr(p, "reads", None) for p in provide]
    return None if None in found else frozenset(i for each in found for i in each or ())


def exchanges(provide: Iterable[Provider]) -> list[Exchange]:
    """What providers do together with other ranks, each once."""
    return list(dict.fromkeys(e for p in provide if (e := getattr(p, "exchange", None)) is not None))


def draws(provide: Iterable[Provider]) -> str:
    """Name of what providers draw; '' where they draw nothing."""
    return " ".join(sorted({d for p in provide if (d := getattr(p, "draws", ""))}))


def providers(graph: fx.Graph) -> list[Provider]:
    """Of the appended placeholders, in order."""
    return [n.meta[KEY] for n in graph.find_nodes(op="placeholder") if KEY in n.meta]


def fake_values(graph: fx.Graph) -> list[Any]:
    return [n.meta["val"] for n in graph.find_nodes(op="placeholder") if KEY in n.meta]


def supply(provide: Sequence[Provider], call: Call) -> list[Any]:
    """Values of the appended inputs for this call; what they are computed from has its casts in it."""
    with torch.no_grad(), _torch.without_autocast():
        return [p(call) for p in provide]


def with_prologue(
    compiled: Callable[..., Any],
    provide: Sequence[Provider],
    original: fx.GraphModule | None,
    stats: RunStatistics,
    seed: Callable[[], int] = lambda: 0,
    values: Callable[[Call], list[Any]] | None = None,
) -> Callable[..., Any]:
    """The compiled graph as a function of its original inputs; `original` runs the batches that a provider refuses.

    `seed` gives each call its own; `values` supplies what providers do, perhaps from elsewhere.
    """
    if not provide:
        return compiled
    fall_back = _unrewritten(original, stats)
    values = values or partial(supply, provide)

    def run(*inputs: Any) -> Any:
        stats.calls += 1
        call = Call(inputs, seed())
        try:
            added = values(call)
        except Unprovable as refusal:
            why = refusal.reason, refusal.line
        else:
            del call  # what providers shared need not live as long as the step
            return compiled(*inputs, *added)
        return fall_back(call, *why)

    return run


def _unrewritten(original: fx.GraphModule | None, stats: RunStatistics) -> Callable[[Call, str, str], Any]:
    if original is None:
        return _refused_without_original
    provide, forward = providers(original.graph), original.forward

    def run(call: Call, reason: str, line: str) -> Any:
        if reason not in stats.fallbacks:
            where = f"\n  {line}" if line else ""
            warn(
                f"a batch cannot take the rewritten graph {stats.graph}: {reason}{where}\n"
                "  batches like this one run the graph as it was before, op by op; turbogr_compile.statistics() "
                "counts them"
            )
        stats.fallbacks[reason] += 1
        return forward(*call.inputs, *supply(provide, call))

    return run


def _refused_without_original(call: Call, reason: str, line: str) -> Any:
    raise TurbogrError(
        f"a batch cannot take the rewritten graph: {reason}{f' ({line})' if line else ''}, and the pass that added "
        "the check kept no other; it must call keep_original(graph) before its first rewrite"
    )
