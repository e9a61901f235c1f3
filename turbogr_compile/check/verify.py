"""The verifier: what must hold after every pass that changed the graph.

    off      nothing (lint and metadata refresh still run)
    fast     every value described, outputs unchanged, no forbidden mutation, no new guard, no loose unbacked size
    strict   fast, plus full re-propagation with strides, aliasing of outputs, provenance, spec round-trip
    numeric  strict, plus running the graph before and after on real numbers

An invariant is one function in the list of its level, so that adding one is one line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from .. import _torch
from ..errors import VerifyError
from ..graph import metadata
from ..graph.phases import Phase
from ..graph.provenance import Origin
from ..graph.text import type_text
from ..pipeline.instrument import GraphRun, Instrument, Step
from ..pipeline.pass_base import build, parse_spec
from .numerics import compare_graphs


class Verifier(Instrument):
    """Checks the graph after each changing pass and blames that pass."""

    def __init__(self, level: str) -> None:
        self.level = level

    def start(self, run: GraphRun) -> None:
        self.arrived = set(run.graph.nodes)

    def before(self, run: GraphRun, step: Step) -> None:
        self.outputs = output_values(run.graph)
        self.placeholders = [n.meta.get("val") for n in run.graph.find_nodes(op="placeholder")]
        self.env = _torch.shape_env_of(run.graph)
        self.guards = _torch.guard_count(self.env)
        self.unbacked = set(_bound_symbols(run.graph))
        self.aliases = _alias_classes(run.graph) if self.level in ("strict", "numeric") else None
        self.kept = _torch.copy_graph(run.graph) if self.level == "numeric" else None

    def after(self, run: GraphRun, step: Step) -> None:
        if step.status not in ("changed", "unchanged"):
            return
        self._check_guards(step)
        if not step.changed:
            return
        levels = {"fast": FAST, "strict": FAST + STRICT, "numeric": FAST + STRICT + NUMERIC}
        for check in levels[self.level]:
            for node, text in check(self, run, step):
                raise VerifyError(text, node=node.name if node is not None else "")

    def _check_guards(self, step: Step) -> None:
        """A guard is added by looking at a size, so even a pass that changed nothing may have added one."""
        if _torch.guard_count(self.env) == self.guards or step.pass_.adds_guards:
            return
        added = "; ".join(_torch.new_guards(self.env, self.guards)) or "a run-time assertion"
        raise VerifyError(
            f"specialised a symbolic size (guard added: {added}; it stays for this compilation); ask with known(...) "
            "instead of if/==/%, or declare adds_guards = True"
        )


Finding = Iterator[tuple[fx.Node | None, str]]
Check = Callable[[Verifier, GraphRun, Step], Finding]


def values_described(v: Verifier, run: GraphRun, step: Step) -> Finding:
    for node in run.graph.nodes:
        if node.op == "call_function" and "val" not in node.meta and node not in v.arrived:
            yield node, f"left %{node.name} without a shape"


def _renamed(old: object, new: object) -> bool:
    """Sizes that only the run knows may be defined elsewhere than before."""
    if not isinstance(old, torch.Tensor) or not isinstance(new, torch.Tensor) or old.dtype != new.dtype:
        return False
    pairs = list(zip(old.shape, new.shape, strict=False))
    return old.dim() == new.dim() and all(
        metadata.same_sizes([a], [b]) or (_torch.free_unbacked(a) and _torch.free_unbacked(b)) for a, b in pairs
    )


def outputs_unchanged(v: Verifier, run: GraphRun, step: Step) -> Finding:
    now = output_values(run.graph)
    if len(now) != len(v.outputs):
        yield None, f"changed the number of outputs from {len(v.outputs)} to {len(now)}"
        return
    for i, (old, new) in enumerate(zip(v.outputs, now, strict=True)):
        if not metadata.same_tensor(old, new, strides=False) and not _renamed(old, new):
            culprit = _output_nodes(run.graph)[i]
            yield culprit, f"changed output {i} from {type_text(old)} to {type_text(new)}"


def inputs_unchanged(v: Verifier, run: GraphRun, step: Step) -> Finding:
    """Existing inputs stay, in place and kind; a pass may append inputs of its own."""
    now = [n.meta.get("val") for n in run.graph.find_nodes(op="placeholder")]
    for i, old in enumerate(v.placeholders):
        if i >= len(now) or not metadata.same_tensor(old, now[i], strides=False):
            yield None, f"removed or changed input {i}, {type_text(old)}; leave unused inputs in place"
            return


def functional(v: Verifier, run: GraphRun, step: Step) -> Finding:
    """Before lowering, only the trailing copies into mutated inputs may write."""
    if run.phase is Phase.LOWERING:
        return
    for node in run.graph.nodes:
        # What arrived in the graph is not the pass's fault.
        if node.op == "call_function" and not _torch.is_functional(node) and node not in v.arrived:
            yield node, f"made %{node.name} = {node.target}, which mutates its argument; use the functional form"


def unbacked_bound(v: Verifier, run: GraphRun, step: Step) -> Finding:
    bound = set(_bound_symbols(run.graph))
    lost = v.unbacked - bound
    for node in run.graph.nodes:
        loose = _torch.free_unbacked(node.meta.get("val")) & lost if lost else set()
        if loose:
            yield node, f"%{node.name} uses size {min(map(str, loose))}, whose defining node is gone"


def metadata_true(v: Verifier, run: GraphRun, step: Step) -> Finding:
    for node, fresh in metadata.recompute_all(run.module).items():
        # Data-dependent sizes get a new symbol each time they are computed.
        if _torch.free_unbacked(fresh):
            continue
        if not metadata.same_tensor(node.meta.get("val"), fresh):
            yield node, f"%{node.name} says {type_text(node.meta.get('val'))} but computes {type_text(fresh)}"


def aliases_unchanged(v: Verifier, run: GraphRun, step: Step) -> Finding:
    if _alias_classes(run.graph) != v.aliases:
        yield None, "changed which outputs are the same tensor or an input; eager would not share them so"


def provenance_complete(v: Verifier, run: GraphRun, step: Step) -> Finding:
    for node in run.graph.nodes:
        if node.op == "call_function" and node not in v.arrived and not isinstance(node.meta.get("turbogr"), Origin):
            yield node, f"made %{node.name} outside of `with ctx.rewrite(...)`: its origin is unknown"


def spec_round_trips(v: Verifier, run: GraphRun, step: Step) -> Finding:
    name, options = parse_spec(step.pass_.spec)
    if name != step.pass_.name or build(type(step.pass_), options) != step.pass_:
        yield None, f"spec {step.pass_.spec!r} does not read back as itself"


def numbers_equal(v: Verifier, run: GraphRun, step: Step) -> Finding:
    assert v.kept is not None
    verdict = compare_graphs(run.module, v.kept, run.graph, run.inputs)
    if verdict.wrong:
        yield None, f"changed the numbers: {verdict.text}"


FAST: tuple[Check, ...] = (values_described, inputs_unchanged, outputs_unchanged, functional, unbacked_bound)
STRICT: tuple[Check, ...] = (metadata_true, aliases_unchanged, provenance_complete, spec_round_trips)
NUMERIC: tuple[Check, ...] = (numbers_equal,)


# --- reading a graph ---------------------------------------------------------------------------------


def _output_nodes(graph: fx.Graph) -> list[Any]:
    (output,) = graph.find_nodes(op="output")
    returned = output.args[0]
    return list(returned) if isinstance(returned, (list, tuple)) else [returned]


def output_values(graph: fx.Graph) -> list[Any]:
    return [n.meta.get("val") if isinstance(n, fx.Node) else n for n in _output_nodes(graph)]


def _alias_classes(graph: fx.Graph) -> list[Any]:
    """For each output: the input it is, or the first output that is the same node."""
    outputs = _output_nodes(graph)
    return [n.name if isinstance(n, fx.Node) and n.op == "placeholder" else outputs.index(n) for n in outputs]


def _bound_symbols(graph: fx.Graph) -> Iterator[Any]:
    for node in graph.nodes:
        if node.op == "placeholder" or node.meta.get("unbacked_bindings"):
            yield from _torch.free_unbacked(node.meta.get("val"))
            yield from node.meta.get("unbacked_bindings") or ()
