"""Forward and backward graphs through torchair: our AOTAutograd around its compiler, boxed, min-cut partition."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache
from types import ModuleType
from typing import Any

from torch import fx

from ... import _torch
from ...errors import OptionError, TurbogrError
from ...graph.phases import Role
from ...graph.streams import stream_of
from ...pipeline.remarks import Remark
from ...pipeline.target import Hooks
from ..common.aot import aot
from ..ge import graph as ge
from . import converters, operators, simulation, tell
from .coverage import first_cause, refusals, split
from .decompositions import decompositions
from .groups import require_process_group
from .legalize import legalize
from .load import decompositions as torchair_decompositions
from .load import patched
from .results import without_inputs
from .settings import Settings
from .sizes import Sizes
from .streams import apply_streams


def lower(
    torchair: ModuleType,
    settings: Settings,
    module: fx.GraphModule,
    inputs: Sequence[Any],
    hooks: Hooks,
    simulated: bool = False,
) -> Callable[..., Any]:
    _register(torchair)
    config = settings.config(torchair)

    def compile_graph(graph: fx.GraphModule, values: Sequence[Any], role: Role) -> Callable[..., Any]:
        require_process_group(graph.graph)
        if settings.enable_single_stream and any(stream_of(node) for node in graph.graph.nodes):
            raise OptionError(
                "target_options 'enable_single_stream' does not go with nodes on streams of their own\n"
                "  try: without='overlap'; or leave the setting out"
            )
        original = fx.GraphModule(graph, _torch.copy_graph(graph.graph))
        legalize(graph.graph)
        sizes = Sizes(graph, values)
        # With open sizes torchair's view optimisation packs numbers of 32 and 64 bits into one shape.
        config.experimental_config.enable_view_optimize = settings.enable_view_optimize and not sizes.symbols
        # The backward is compiled when it is first asked for, long after the forward.
        with patched(), sizes.tracing():
            sizes.apply(graph)
            parts = _Parts(torchair, config, settings, lambda remarks: hooks.tell(role, remarks, {}), simulated)
            compiled = parts.compile(graph)
        with _torch.outside_compilation():  # constants of GE graphs are real tensors
            hooks.tell(role, parts.remarks(), parts.texts())
        holds = sizes.answers_hold()

        def run(*given: Any) -> Any:
            return (compiled if holds(given) else original)(*given)

        return _torch.boxed(run)

    with patched():
        table = {**torchair_decompositions(), **decompositions()}
        return aot(module, inputs, hooks, compile_graph, _torch.min_cut_partition, table)


class _Parts:
    """The GE graphs that one graph becomes: one where every op converts, else several with ops in between."""

    def __init__(
        self, torchair: ModuleType, config: Any, settings: Settings, later: simulation.Tell, simulated: bool
    ) -> None:
        self.torchair, self.config, self.settings = torchair, config, settings
        self.later, self.simulated = later, simulated
        self.made: list[tuple[Any, fx.Graph]] = []  # what torchair returned, and the graph it was given
        self.refused: list[Remark] = []
        self.coverage = ""

    def compile(self, module: fx.GraphModule) -> Callable[..., Any]:
        found = refusals(self.torchair, self.config, module)
        self.refused += tell.outside(found)
        self.coverage = tell.coverage_text(module.graph, found)
        return split(module, found, self._convert) if found else self._convert(module)

    def remarks(self) -> list[Remark]:
        believed = simulation.beliefs((ge.of(made), source) for made, source in self.made) if self.simulated else []
        return [*self.refused, *believed]

    def texts(self) -> dict[str, str]:
        return {"ge-coverage": self.coverage, **tell.graph_texts(self.made)}

    def _convert(self, module: fx.GraphModule) -> Callable[..., Any]:
        """One graph, all of whose nodes convert, as a function of its inputs."""
        asked = fx.GraphModule(module, _torch.copy_graph(module.graph))
        module, whole = without_inputs(module)
        apply_streams(module)
        inputs = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
        try:
            with warnings.catch_warnings():
                # Our operators bring their own InferShape, and torchair need not derive one.
                warnings.filterwarnings("ignore", "infer and generate sym shape failed")
                compiled = self.torchair.get_compiler(self.config)(module, inputs)
        except TurbogrError:
            raise
        except Exception as error:
            self.refused.append(tell.not_converted(asked.graph, first_cause(error)))
            return asked
        self.made.append((compiled, module.graph))
        run = simulation.watched(compiled, module.graph, self.later) if self.simulated else compiled
        run = _loaded(run, self.settings)
        return lambda *given: whole(given, run(*given))


def _loaded(run: Callable[..., Any], settings: Settings) -> Callable[..., Any]:
    """Settings that GE reads when a graph is loaded, at its first call."""
    if settings.deterministic is None:
        return run
    loaded = False

    def call(*given: Any) -> Any:
        nonlocal loaded
        if loaded:
            return run(*given)
        with settings.loading():
            results = run(*given)
        loaded = True
        return results

    return call


@lru_cache(maxsize=1)
def _register(torchair: ModuleType) -> None:
    converters.register(torchair)
    operators.register(torchair)
