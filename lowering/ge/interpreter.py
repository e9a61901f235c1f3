"""Runs a GE graph on the CPU, node by node, and holds every value against what the graph declares.

    result = Interpreter(graph).run(inputs)

Kernels never write into their inputs. An operator that GE runs in place (input and output of one name) is computed
aside, and its result written into the graph's input where it goes back to one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ...graph.text import dtype_text
from . import prototypes
from .check import Problem, Seen, certain, check, check_values, listed
from .graph import INPUTS, Graph, GraphError, Node, Source, Value
from .kernels import KERNELS
from .kernels.registry import Kernel

Tensor = torch.Tensor
Observer = Callable[[Node, int, Tensor], None]

_observers: list[Observer] = []
_own: set[str] = set()  # operators of turbogr's


def register_kernel(op: str, kernel: Kernel) -> None:
    """What computes an operator of turbogr's: a function of the node and its inputs. A later one takes its place."""
    if op in KERNELS and op not in _own:
        raise ValueError(f"GE operator {op} is one of GE's, and its kernel stays")
    _own.add(op)
    KERNELS[op] = kernel


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """The observer sees each value as it is made, of whatever graphs run inside of the block."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


@dataclass(frozen=True, eq=False)
class Step:
    node: Node
    kernel: Kernel
    done_with: tuple[Source, ...]  # values that nobody reads afterwards
    in_place: dict[int, Source]  # outputs that stand for an input's memory, and which


class Interpreter:
    def __init__(self, graph: Graph) -> None:
        """GraphError where the graph breaks a rule, or holds an operator without a kernel."""
        self.graph = graph
        self.doubts: list[Problem] = []  # dtypes that the prototypes at hand do not list and newer ones may
        missing = [n for n in graph.nodes if n.type not in (*INPUTS, "Const", "NetOutput") and n.type not in KERNELS]
        self._stop_at(check(graph))
        if missing:
            lines = "".join(f"\n  {n}" for n in {n.type: n for n in reversed(missing)}.values())
            raise GraphError(
                f"GE graph {graph.name} holds operators that the simulator has no kernel for:{lines}\n"
                "  try: register_kernel() for an operator of your own; target='cpu' for the rest"
            )
        self._inputs = graph.inputs
        self._constants = [(n, n.constant) for n in graph.nodes if n.constant is not None]
        self._steps = list(_plan(graph))
        self._ran = False

    def run(self, inputs: Sequence[Tensor], assigned: Sequence[Tensor | None] = ()) -> list[Tensor]:
        """The graph's results. Where `assigned` names a tensor, the result is written into it."""
        with torch.no_grad():
            values = dict(self._given(inputs))
            for step in self._steps:
                self._run_step(step, values)
            results = list(self._results(values, assigned))
        self._ran = True
        return results

    def _given(self, inputs: Sequence[Tensor]) -> Iterator[tuple[Source, Tensor]]:
        for node in self._inputs:
            index, declared = node.attributes["index"], node.outputs[0]
            if index >= len(inputs):
                raise GraphError(f"GE graph {self.graph.name} got {len(inputs)} inputs, and reads number {index}")
            tensor = inputs[index]
            if declared.shape == () and tensor.numel() == 1:
                tensor = tensor.reshape(())  # numbers may arrive as one element
            _compare(tensor, declared, f"GE graph {self.graph.name}: input {index}, {node},", strict=True)
            _observe(node, 0, tensor)
            yield Source(node.name, 0), tensor
        for node, constant in self._constants:
            _observe(node, 0, constant)
            yield Source(node.name, 0), constant

    def _run_step(self, step: Step, values: dict[Source, Tensor]) -> None:
        node = step.node
        arguments = [_value(values, source, node) if source else None for source in node.inputs]
        try:
            made = step.kernel(node, *arguments)
        except GraphError:
            raise
        except Exception as error:
            given = ", ".join(_describe(a) for a in arguments)
            raise GraphError(f"{node} failed on ({given}): {type(error).__name__}: {error}") from error
        results = tuple(made) if isinstance(made, (tuple, list)) else (made,)
        if len(results) != len(node.outputs):
            raise GraphError(f"{node} made {len(results)} values instead of {len(node.outputs)}")
        self._judge(node, arguments, results)
        for index, (result, declared) in enumerate(zip(results, node.outputs, strict=True)):
            if result is None:
                continue
            _compare(result, declared, f"{node}: result {index}", strict=False)
            if index in step.in_place:
                result = values[step.in_place[index]].copy_(result)
            _observe(node, index, result)
            values[Source(node.name, index)] = result
        for source in step.done_with:
            values.pop(source, None)

    def _judge(self, node: Node, arguments: Sequence[Tensor | None], results: Sequence[Tensor | None]) -> None:
        """Dtypes and ranks do not change from run to run, so once is enough."""
        prototype = None if self._ran else prototypes.find(node.type)
        if prototype is None or not prototype.is_reliable:
            return
        seen = [[None if t is None else Seen(t.dtype, t.dim()) for t in tensors] for tensors in (arguments, results)]
        self._stop_at(list(check_values(node, prototype, *seen)))

    def _stop_at(self, problems: Sequence[Problem]) -> None:
        if wrong := certain(problems):
            raise GraphError(f"GE graph {self.graph.name} breaks the rules of its operators:{listed(wrong)}")
        self.doubts += [p for p in problems if p not in self.doubts]

    def _results(self, values: dict[Source, Tensor], assigned: Sequence[Tensor | None]) -> Iterator[Tensor]:
        node = self.graph.result
        results: list[Tensor] = []
        for index, (source, declared) in enumerate(zip(node.inputs, node.expects, strict=True)):
            assert source is not None
            result = _value(values, source, node)
            _compare(result, declared, f"GE graph {self.graph.name}: result {index}", strict=True)
            # Results own their memory, and all are there before the first is written over an input.
            results.append(result.clone(memory_format=torch.contiguous_format))
        for index, result in enumerate(results):
            target = assigned[index] if index < len(assigned) else None
            yield result if target is None else target.copy_(result.reshape(target.shape))


def _plan(graph: Graph) -> Iterator[Step]:
    last: dict[Source, Node] = {}
    for node in graph.nodes:
        for source in node.inputs:
            if source:
                last[source] = node
    roots = {Source(n.name, 0): Source(n.name, 0) for n in graph.nodes if n.type in INPUTS}
    for node in graph.nodes:
        if node.type in (*INPUTS, "Const", "NetOutput"):
            continue
        in_place = {}
        for index, value in enumerate(node.outputs):
            source = dict(zip(node.ports, node.inputs, strict=True)).get(value.name)
            if source in roots and source is not None:
                in_place[index] = roots[source]
                roots[Source(node.name, index)] = roots[source]
        # Memory of the graph's inputs is the caller's, and in-place results stand for it.
        done = [s for s in node.inputs if s and last[s] is node and s not in roots]
        unread = [Source(node.name, i) for i in range(len(node.outputs)) if Source(node.name, i) not in last]
        yield Step(node, KERNELS[node.type], tuple(dict.fromkeys([*done, *unread])), in_place)


def _value(values: dict[Source, Tensor], source: Source, reader: Node) -> Tensor:
    if source not in values:
        raise GraphError(f"{reader} reads result {source.index} of %{source.node}, which is not simulated")
    return values[source]


def _compare(tensor: Tensor, declared: Value, what: str, strict: bool) -> None:
    """`strict`: the shape too; else only the number of elements, since a view of the value may be described."""
    if declared.dtype is not None and tensor.dtype != declared.dtype:
        raise GraphError(f"{what} is {_describe(tensor)}, and the graph declares {dtype_text(declared.dtype)}")
    if declared.shape is None:
        return
    if strict:
        fits = len(declared.shape) == tensor.dim() and all(
            d == s for d, s in zip(declared.shape, tensor.shape, strict=True) if isinstance(d, int)
        )
    else:
        known = [d for d in declared.shape if isinstance(d, int)]
        fits = len(known) != len(declared.shape) or torch.Size(known).numel() == tensor.numel()
    if not fits:
        dims = ", ".join(str(d) for d in declared.shape)
        raise GraphError(f"{what} is {_describe(tensor)}, and the graph declares [{dims}]")


def _describe(tensor: Tensor | None) -> str:
    return "nothing" if tensor is None else f"{dtype_text(tensor.dtype)}{list(tensor.shape)}"


def _observe(node: Node, index: int, tensor: Tensor) -> None:
    for observer in _observers:
        observer(node, index, tensor)
