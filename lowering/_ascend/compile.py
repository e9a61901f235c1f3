"""Forward and backward graphs through torchair: our AOTAutograd around its compiler, boxed, min-cut partition."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import lru_cache
from types import ModuleType
from typing import Any

from torch import fx

from ... import _torch
from .._ge.torchair import decompositions as torchair_decompositions
from .._ge.torchair import patched
from ..aot import aot
from ..target import Hooks
from . import converters, operators
from .coverage import Refusals, gaps, refusals, split
from .decompositions import decompositions
from .legalize import legalize
from .results import without_inputs
from .sizes import Sizes

log = logging.getLogger("turbogr_compile.target")


def lower(
    torchair: ModuleType, config: Any, module: fx.GraphModule, inputs: Sequence[Any], hooks: Hooks
) -> Callable[..., Any]:
    _register(torchair)
    config.experimental_config.remove_noop_ops = False  # would undo the copies of `results.py`

    def compile_graph(graph: fx.GraphModule, values: Sequence[Any]) -> Callable[..., Any]:
        original = fx.GraphModule(graph, _torch.copy_graph(graph.graph))
        legalize(graph.graph)
        sizes = Sizes(graph, values)
        # With open sizes torchair's view optimisation packs numbers of 32 and 64 bits into one shape.
        config.experimental_config.enable_view_optimize = not sizes.symbols
        # The backward is compiled when it is first asked for, long after the forward.
        with patched(), sizes.tracing():
            sizes.apply(graph)
            found = refusals(torchair, config, graph)
            _say(found)
            compiled: Callable[..., Any]
            if found:
                compiled = split(graph, found, lambda part: _convert(torchair, config, part))
            else:
                compiled = _convert(torchair, config, graph)
        holds = sizes.answers_hold()

        def run(*given: Any) -> Any:
            return (compiled if holds(given) else original)(*given)

        return _torch.boxed(run)

    with patched():
        table = {**torchair_decompositions(), **decompositions()}
        return aot(module, inputs, hooks, compile_graph, _torch.min_cut_partition, table)


def _convert(torchair: ModuleType, config: Any, graph: fx.GraphModule) -> Callable[..., Any]:
    """One graph, all of whose nodes convert, as a function of its inputs."""
    graph, whole = without_inputs(graph)
    inputs = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
    compiled = torchair.get_compiler(config)(graph, inputs)
    return lambda *given: whole(given, compiled(*given))


def _say(found: Refusals) -> None:
    for gap in gaps(found):
        line = f" ({gap.line})" if gap.line else ""
        log.warning("%s runs op by op, outside of GE graphs: %s%s", gap.op, gap.reason, line)


@lru_cache(maxsize=1)
def _register(torchair: ModuleType) -> None:
    converters.register(torchair)
    operators.register(torchair)
