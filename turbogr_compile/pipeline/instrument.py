"""What watches passes run. Verifying, recording, dumping and tracing are instruments, never part of a pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from ..errors import OptionError
from ..graph.phases import Phase, Role, Vocabulary
from ..registry import Registry
from .context import Context
from .pass_base import Pass
from .remarks import Remark


@dataclass
class Step:
    """One pass on one graph: what it is, and, once it ran, what came of it."""

    number: int
    pass_: Pass
    status: str = "running"  # changed, unchanged, skipped, failed
    reason: str = ""
    context: Context | None = None
    began: float = 0.0
    seconds: float = 0.0  # of the pass and the refresh of its metadata

    @property
    def changed(self) -> bool:
        return self.status == "changed"


@dataclass
class GraphRun:
    """All passes of one phase on one graph."""

    name: str  # '0.0-captured'
    role: Role
    phase: Phase
    target: str
    pipeline: Any  # Pipeline
    options: Any  # Options
    module: fx.GraphModule
    words: Vocabulary
    inputs: Any = None  # example inputs, real ones where the phase has them
    examples: list[Any] | None = None  # the caller's own inputs, while compiling
    steps: list[Step] = field(default_factory=list)
    remarks: list[Remark] = field(default_factory=list)

    @property
    def graph(self) -> fx.Graph:
        return self.module.graph


class Instrument:
    """Base with empty hooks; override what you need and pass it as `options={"instruments": [...]}`.

    An installed package may offer instruments by name, through the entry-point group `turbogr.instruments`; such a name
    is then as good as the object.
    """

    explains = False  # rules look for near misses only when some instrument will show them

    def start(self, run: GraphRun) -> None:
        """The graph as it arrived; called again when a failing pass made the run start over."""

    def before(self, run: GraphRun, step: Step) -> None: ...

    def rewritten(self, run: GraphRun, step: Step) -> None:
        """After each single rewrite inside a pass; the latest is `step.context.rewrites[-1]`."""

    def after(self, run: GraphRun, step: Step) -> None:
        """After a pass, changed or not. Raising here counts as the pass's failure."""

    def failed(self, run: GraphRun, step: Step, error: Exception) -> None: ...

    def finish(self, run: GraphRun) -> None: ...

    def lowered(self, run: GraphRun, remarks: Sequence[Remark], texts: Mapping[str, str]) -> None:
        """After `finish`: what the target has to say about the graph, and texts by name. May come several times."""


def _load(imported: Any) -> Callable[[], Instrument]:
    """An entry point names a class, or a function that makes the instrument."""
    if not callable(imported):
        raise OptionError(f"{imported!r} is no instrument: neither a class nor a function that makes one")
    return imported


INSTRUMENTS: Registry[Callable[[], Instrument]] = Registry("instrument", "turbogr.instruments", _load, OptionError)
