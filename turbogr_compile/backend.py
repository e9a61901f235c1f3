"""`torch.compile(..., backend="turbogr")`: capture, passes, hand-over to a target.

One call of `turbogr` compiles one Dynamo graph. Whatever turbogr cannot take runs unmodified on the same target, and a
remark says why.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from . import _torch
from .capture.breaks import COSTS, graph_break
from .capture.dynamo import VERSIONED, CannotCapture, capture, forget_unbacked
from .capture.normal import normalize
from .check.expectations import Expectations
from .check.validate import VALIDATION, Plan, Validation
from .check.verify import Verifier
from .deferral.model import deferred
from .errors import TurbogrError
from .graph.costs import cost
from .graph.phases import Phase, Role
from .pipeline.cache_key import cache_key
from .pipeline.instrument import GraphRun, Instrument
from .pipeline.manager import Manager
from .pipeline.options import Options
from .pipeline.pipeline import Pipeline
from .pipeline.remarks import CAPTURE, Remark, RemarkKind
from .pipeline.target import find_target
from .runtime import prologue
from .runtime.ahead import Foresight
from .runtime.draws import Seeds
from .runtime.specialize import Specialized, is_rounded, open_size
from .runtime.statistics import RunStatistics
from .show.console import WAITED, nothing_packed, step_waited
from .show.dump import Dump
from .show.torch_trace import TorchTrace

log = logging.getLogger("turbogr_compile.pipeline")


def turbogr(
    module: fx.GraphModule, inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None, mode: str | None = None
) -> Callable[..., Any]:
    """Dynamo backend; `options` are the fields of `Options`."""
    return compile_graph(Options.read(options), module, inputs)


def compile_graph(options: Options, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """One Dynamo graph: compiled, or recorded until what is done with its results is known."""
    graph_id = _torch.compile_id()

    def compile_step(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return Compilation(options, graph_id).compile(module, inputs)

    if not options.deferral:
        return compile_step(module, inputs)
    keeps = not find_target(options.target).static_shapes
    return deferred(module, inputs, compile_step, always=options.deferral == "always", keeps=keeps)


class Compilation:
    """One Dynamo graph on its road to a target. Serves the target as its `Hooks`."""

    def __init__(self, options: Options, graph_id: str) -> None:
        self.options, self.graph_id = options, graph_id
        self.target = find_target(options.target)
        self.validation = self._validation()
        # Validation first: what it remarks is then there for those who record.
        self.instruments = [*([self.validation] if self.validation else []), *instruments_for(options)]
        self.stats = RunStatistics(graph_id)
        self.examples: list[Any] | None = None
        self.idle: set[str] = set()  # passes that had nothing to do in the captured graph
        self.lowering: dict[Role, GraphRun] = {}  # the last run of passes over the graph of each role
        self.remarks: list[Remark] = []  # on the graph as Dynamo handed it over

    def _validation(self) -> Validation | None:
        calls, comparable = self.options.shadow(), self.options.padded_outputs == "strict"
        plan = Plan(calls) if calls else VALIDATION if self.options.verify == "validate" else None
        return Validation(plan, self.options.on_error, comparable) if plan is not None else None

    @property
    def key(self) -> str:
        return cache_key(self.options)

    @property
    def target_options(self) -> Mapping[str, Any]:
        return self.options.target_options

    @property
    def watched(self) -> bool:
        return any(i.explains for i in self.instruments)

    def compile(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        assert self.options.codegen is not None
        self.target.require(self.options.codegen)
        self._note_break(module)
        try:
            self.examples = _torch.real_inputs(module)
            captured = capture(module, inputs)
        except CannotCapture as refusal:
            self._refused(module, refusal)
            # Eager raises where a saved value was written to; a target that makes graphs functional would not.
            return module.forward if refusal.id in VERSIONED else self._lower_refused(module, inputs)
        waited = module.meta.get(WAITED, "")
        padded = cost(captured.module.graph) if waited else None
        # A step that waited is compiled for inputs without data, and is judged by its batch all the same.
        run = self._run(Phase.PRE_GRAD, Role.CAPTURED, captured.module, self.examples or inputs)
        if torch.is_grad_enabled():  # whoever evaluates may want every row
            nothing_packed(run)
        if padded is not None:
            step_waited(run, waited, padded)
        self.examples = None  # a batch must not live as long as the code compiled for it
        try:
            return captured.after_writes(self._lowered(captured.module, inputs))
        except (TurbogrError, *_torch.SIGNALS):
            raise
        except Exception as error:
            if self.options.on_error == "raise":
                raise
            self._refused(module, self._not_lowered(module, error))
            return self._lower_refused(module, inputs)

    def _lowered(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """The graph that passes made, behind the prologue they asked for."""
        added = prologue.providers(module.graph)
        inputs = [*inputs, *prologue.fake_values(module.graph)]
        original = prologue.original_of(module)
        seeds = Seeds(prologue.draws(added))
        foresight = Foresight(module.graph, added, self.stats, seeds)
        assert self.options.codegen is not None
        compiled = self._specialized(module) or self.target.lower(module, inputs, self.options.codegen, self)
        values = compiled.checking(foresight) if isinstance(compiled, Specialized) else foresight
        run = prologue.with_prologue(compiled, added, original, self.stats, seeds, values)
        if self.validation is None:
            return run
        return self.validation.watch(run, compiled, added, module, self.stats, self.target.locate)

    def _note_break(self, module: fx.GraphModule) -> None:
        found = graph_break(module)
        if found is not None:
            text = f"the graph ends here, and {COSTS}: {found.reason}"
            remark = Remark(RemarkKind.MISSED, "graph-break", CAPTURE, text, found.line, hint=found.hint)
            self.remarks.append(remark)
            log.info("%s", remark)

    def _specialized(self, module: fx.GraphModule) -> Specialized | None:
        """Static shapes, where the target wants them and sizes are rounded."""
        if not self.target.static_shapes or not is_rounded(module.graph) or open_size(module.graph) is not None:
            return None

        def lower(name: str, special: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            variant = copy.copy(self)
            variant.graph_id, variant.lowering = f"{self.graph_id}-{name}", {}
            return self.target.lower(special, inputs, self.options.codegen or "", variant)

        return Specialized(module, lower, raises=self.options.on_error == "raise")

    def _lower_refused(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """A graph that neither capture nor the target can take runs as Dynamo made it."""
        try:
            return self.target.lower(module, inputs, self.options.codegen or "", self)
        except (TurbogrError, *_torch.SIGNALS):
            raise
        except Exception as error:
            self._refused(module, self._not_lowered(module, error))
            return module.forward

    def _not_lowered(self, module: fx.GraphModule, error: Exception) -> CannotCapture:
        forget_unbacked(module)
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        return CannotCapture("not-lowered", f"target '{self.target.name}' cannot take it: {said}")

    def joint(self, module: fx.GraphModule) -> None:
        self._run(Phase.JOINT, Role.JOINT, module, None)

    def post_grad(self, module: fx.GraphModule, role: Role, inputs: Sequence[Any]) -> None:
        self._run(Phase.POST_GRAD, role, module, inputs)
        self._run(Phase.LOWERING, role, module, inputs)

    def _run(self, phase: Phase, role: Role, module: fx.GraphModule, inputs: Sequence[Any] | None) -> GraphRun | None:
        plan = self._plan_for(phase, module.graph)
        if phase is Phase.LOWERING and not plan.ordered(phase):
            return None  # the same graph as after POST_GRAD: nothing to show twice
        if phase is not Phase.PRE_GRAD and plan.ordered(phase):
            normalize(module.graph, phase)  # capture has done so already for PRE_GRAD
        run = self._graph_run(phase, role, module, inputs)
        run.pipeline = plan
        if phase is Phase.PRE_GRAD:
            run.remarks += self.remarks
        if phase in (Phase.POST_GRAD, Phase.LOWERING):
            self.lowering[role] = run
        Manager(run, self.instruments).run_all()
        return run

    def _plan_for(self, phase: Phase, graph: fx.Graph) -> Pipeline:
        """Most graphs have no sharded tables and no collectives: what is about them costs nothing, and is not shown.

        A pass that the caller set up himself always runs, and says what it did not find.
        """
        plan = self.options.plan()
        usual = set(Pipeline.default(self.options.target).passes())
        idle = {p.name for p in plan.passes() if p.phase is phase and p in usual and not p.concerns(graph)}
        if phase is Phase.PRE_GRAD:
            self.idle = idle
        return plan.without(*(self.idle | idle)) if self.idle | idle else plan

    def tell(self, role: Role, remarks: Sequence[Remark], texts: Mapping[str, str]) -> None:
        for remark in remarks:
            log.log(logging.WARNING if remark.kind is RemarkKind.MISSED else logging.DEBUG, "%s", remark)
        for instrument in self.instruments:
            instrument.lowered(self.lowering[role], remarks, texts)

    def _graph_run(self, phase: Phase, role: Role, module: fx.GraphModule, inputs: Any) -> GraphRun:
        name = f"{self.graph_id}-{role.value}" + ("-lowering" if phase is Phase.LOWERING else "")
        words = self.target.vocabulary(phase, self.options.codegen)
        return GraphRun(
            name,
            role,
            phase,
            self.options.target,
            self.options.plan(),
            self.options,
            module,
            words,
            inputs,
            self.examples,
        )

    def _refused(self, module: fx.GraphModule, refusal: CannotCapture) -> None:
        """Say so to every instrument; the graph runs as Dynamo made it."""
        run = self._graph_run(Phase.PRE_GRAD, Role.CAPTURED, module, None)
        text = f"this graph runs unmodified: {refusal.reason}"
        remark = Remark(RemarkKind.MISSED, refusal.id, CAPTURE, text, refusal.line, hint=refusal.hint)
        run.remarks += [*self.remarks, remark]
        log.warning("%s", remark)
        for instrument in self.instruments:
            instrument.start(run)
            instrument.finish(run)


def instruments_for(options: Options) -> list[Instrument]:
    chosen: list[Instrument] = [] if options.verify == "off" else [Verifier(options.level())]
    if options.dump is not None:
        chosen.append(Dump(options.dump, options))
    if TorchTrace.wanted():
        chosen.append(TorchTrace())
    if options.expect:
        chosen.append(Expectations(options.expect))
    return [*chosen, *options.instruments]


# torch loads this module when a program names the backend, and traces afterwards.
_torch.trace_transformer_layers()
