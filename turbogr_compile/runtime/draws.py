"""Seeds of what is drawn outside of the compiled graph, and the state to go on from.

The n-th call of a graph (from 0) draws from a generator seeded with the first eight bytes, as a little-endian number
without its top bit, of blake2b over the text "seed/graph/n". `seed` is `torch.initial_seed()`, which
`torch.manual_seed` sets; `graph` names the user's lines that draw. Hence the numbers depend neither on threads nor on
what else draws, and a run that goes on from `state_dict()` draws what the undisturbed run would have drawn.

Recompilations of the same lines count on together. Counting starts anew when all code compiled for them is gone.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Mapping
from typing import Any

import torch

from ..errors import TurbogrError
from ..pipeline.remarks import warn


def seed_of(run: int, graph: str, number: int) -> int:
    """Seed of one call of one graph."""
    digest = hashlib.blake2b(f"{run}/{graph}/{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class _Count:
    """Calls so far, of all graphs that were compiled for the same lines."""

    def __init__(self, graph: str) -> None:
        self.graph, self.calls = graph, _RESUMED.pop(graph, 0)


_COUNTS: weakref.WeakValueDictionary[str, _Count] = weakref.WeakValueDictionary()
_RESUMED: dict[str, int] = {}  # loaded, and not compiled yet


class Seeds:
    """Gives the calls of one compiled graph their seeds, and guesses the next one; all 0 for a graph without draws."""

    def __init__(self, graph: str) -> None:
        self.draws = bool(graph)
        self._count = (_COUNTS.get(graph) if graph else None) or _Count(graph)
        if graph:
            _COUNTS[graph] = self._count
        self._last: int | None = None
        self._stride = 1

    def __call__(self) -> int:
        """Seed of the call that begins now."""
        if not self.draws:
            return 0
        number, self._count.calls = self._count.calls, self._count.calls + 1
        self._stride = number - self._last if self._last is not None and number > self._last else 1
        self._last = number
        return self._seed(number)

    def next(self) -> int:
        """Seed of the next call, if as many calls of others come in between as before."""
        return self._seed((self._last or 0) + self._stride)

    def _seed(self, number: int) -> int:
        return seed_of(torch.initial_seed(), self._count.graph, number) if self.draws else 0


def seed(number: int) -> None:
    """`torch.manual_seed`, and draws outside of compiled graphs begin anew as well."""
    torch.manual_seed(number)
    load_state_dict({"seed": number, "calls": {}})


def state_dict() -> dict[str, Any]:
    """What a checkpoint needs to draw on as if nothing had happened."""
    return {"seed": torch.initial_seed(), "calls": {**_RESUMED, **{g: c.calls for g, c in sorted(_COUNTS.items())}}}


def load_state_dict(state: Mapping[str, Any]) -> None:
    """Go on from `state_dict()`, before or after compiling; `torch.manual_seed` with its seed comes first."""
    seed, calls = state.get("seed"), state.get("calls")
    if not isinstance(seed, int) or not isinstance(calls, Mapping):
        raise TurbogrError(f"not a state of draws: expected 'seed' and 'calls', got {sorted(state)}")
    if seed != torch.initial_seed():
        warn(f"draws go on with another seed than they were saved with; torch.manual_seed({seed}) restores it")
    _RESUMED.clear()
    _RESUMED.update(calls)
    for graph, count in _COUNTS.items():
        count.calls = _RESUMED.pop(graph, 0)
