"""What a user calls: `compile`, `explain`, `replay`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from . import _torch
from . import kernels as _kernels  # noqa: F401  (whoever compiles or replays a graph has its ops)
from .backend import compile_graph, instruments_for
from .capture.dynamo import capture
from .capture.trace import trace_with_lines
from .errors import OptionError, TurbogrError
from .graph.phases import Phase, Role, Vocabulary
from .pipeline.instrument import GraphRun
from .pipeline.manager import Manager
from .pipeline.options import Options
from .pipeline.pipeline import Pipeline
from .pipeline.remarks import warn
from .pipeline.target import find_target
from .show.recording import Recording
from .show.report import report_text

# Generative recommenders index with boolean masks, read lengths and have recurrent layers: without these, Dynamo cuts
# the graph there.
FLAGS = {"capture_dynamic_output_shape_ops": True, "capture_scalar_outputs": True, "allow_rnn": True}


def compile(
    fn: Callable[..., Any] | None = None, *, dynamic: bool | None = None, fullgraph: bool = False, **options: Any
) -> Any:
    """`torch.compile(fn, backend="turbogr")` with the Dynamo settings that generative recommenders need.

    `fn` is a module, a step function or a bound method such as `model.calculate_loss`; keyword arguments are the fields
    of `Options`, checked now. Also works as a decorator.
    """
    if fn is None:
        return lambda f: compile(f, dynamic=dynamic, fullgraph=fullgraph, **options)
    if not callable(fn):
        raise OptionError(f"compile takes a module or a function, got {type(fn).__name__}")
    read = Options.read(options)

    def turbogr(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return compile_graph(read, module, inputs)

    flags = _torch.DynamoFlags(**FLAGS, ignore_logging_functions=_torch.quiet_functions())
    turbogr.backend_ctx_ctor = lambda: flags  # type: ignore[attr-defined]
    plain = dict.fromkeys(FLAGS, False)
    return _torch.optimize(fn, turbogr, _not_traced, plain, dynamic=dynamic, nopython=fullgraph)


def _not_traced(said: str) -> None:
    reasons = [line.strip() for line in said.splitlines() if line.strip().startswith("Explanation:")]
    why = reasons[0].removeprefix("Explanation:").strip() if reasons else said.strip().splitlines()[0]
    warn(f"a function is cut where sizes depend on data, because Dynamo cannot trace it as a whole: {why}")


@dataclass(frozen=True)
class Report:
    """What the compiler did; prints as the summary of every graph."""

    records: tuple[dict[str, Any], ...]

    def __str__(self) -> str:
        return report_text(self.records)


def explain(fn: Callable[..., Any], *args: Any, backward: bool = True, **options: Any) -> Report:
    """Compile `fn` for these arguments, run it once (and its backward) and report what every pass did."""
    recording = Recording()
    watchers = (*options.pop("instruments", ()), recording)
    with _torch.backend_errors_unwrapped():
        result = compile(fn, instruments=watchers, **options)(*args)
        if backward:
            _torch.run_backward(result)
    return Report(tuple(recording.records))


def replay(
    fn: Callable[..., Any],
    inputs: Sequence[Any],
    *,
    pipeline: Pipeline | str,
    phase: str = "pre-grad",
    role: str = "captured",
    **options: Any,
) -> Report:
    """Run passes of one phase on one traced function, without Dynamo or a target; what `repro.py` does."""
    recording = Recording()
    read = Options.read({"on_error": "raise", **options, "pipeline": pipeline, "instruments": [recording]})
    words = find_target(read.target).vocabulary(Phase(phase), read.codegen)
    module = _traced(fn, _torch.fake_inputs(inputs), words)
    run = GraphRun("replay", Role(role), Phase(phase), read.target, read.plan(), read, module, words, inputs)
    Manager(run, instruments_for(read)).run_all()
    return Report(tuple(recording.records))


def _traced(fn: Callable[..., Any], inputs: list[Any], words: Vocabulary) -> fx.GraphModule:
    try:
        return trace_with_lines(fn, inputs, words.phase, words.decompositions)
    except TurbogrError:
        if words.phase is not Phase.PRE_GRAD:
            raise
        # A graph that writes to its inputs, such as counters and running statistics: the way of a graph from Dynamo.
        module = fx.symbolic_trace(fn)
        for node, value in zip(module.graph.find_nodes(op="placeholder"), inputs, strict=True):
            node.meta["example_value"] = value
        return capture(module, inputs).module
