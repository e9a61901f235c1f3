"""A part of the record as one graph, compiled like any other: model graphs, and recorded calls appended to them.

A plan that was seen before, with the same sizes, runs at once. Otherwise programs of the same structure are asked
whether their assumptions about sizes hold; what none of them takes is compiled, and sizes and numbers that were
different before become symbols.
"""

from __future__ import annotations

import contextlib
import linecache
import operator
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx

from .. import _torch
from ..errors import TurbogrError
from ..graph.provenance import short_path
from ..pipeline.remarks import warn
from ..show.console import WAITED
from .record import LateRead, Node, Source, Value, above

Compiler = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]
_EXACT = 4096  # sizes remembered per model graph
_TOO_MANY = 12  # programs of one structure: whatever changes between steps cannot be made a symbol


class Plan:
    """What to compute: nodes, the tensors from outside they read, and all numbers among their arguments.

    Of the values in `leaves`, rows that are computed anyway are returned, too, and where they are.
    """

    def __init__(self, wanted: Sequence[Value], leaves: Sequence[Value] = (), nodes: list[Node] | None = None) -> None:
        self.wanted, self.leaves = list(wanted), list(leaves)
        self.nodes = above(wanted) if nodes is None else nodes
        self.place = {n.order: i for i, n in enumerate(self.nodes)}
        self.sources: list[Source] = []
        self.numbers: list[int] = []
        self._slots: dict[int, int] = {}
        for node in self.nodes:
            if node.given_up:
                raise LateRead(f"turbogr: a deferred result is read, {node.given_up}; model called at {where(node)}")
        # Kinds say everything but who the tensors are.
        self.exact = (
            tuple([(n.kind, self._slots_of(n.sources), *map(self._wire, n.inputs)) for n in self.nodes]),
            tuple([self._wire(v) for v in self.wanted]),
            tuple([self._wire(v) for v in self.leaves]),
        )

    @cached_property
    def structure(self) -> Any:
        """Calls and who their tensors are, without numbers, which are gathered, and without sizes."""
        calls = tuple(self._call(node) for node in self.nodes)
        return calls, tuple(self._wire(v) for v in self.wanted), tuple(self._wire(v) for v in self.leaves)

    @cached_property
    def models(self) -> list[Node]:
        return [n for n in self.nodes if n.model is not None]

    @property
    def grad(self) -> bool:
        return any(n.modes.grad for n in self.nodes)

    def _wire(self, v: Value) -> tuple[int, int]:
        return self.place[v.node.order], v.index

    def _slot(self, source: Source) -> int:
        slot = self._slots.get(id(source.tensor))
        if slot is not None:
            if self.sources[slot] is source or self.sources[slot].same(source):
                return slot
            for k, s in enumerate(self.sources):  # other values that the tensor had
                if s is source or s.same(source):
                    return k
        else:
            self._slots[id(source.tensor)] = len(self.sources)
        self.sources.append(source)
        return len(self.sources) - 1

    def _slots_of(self, sources: Sequence[Source]) -> Sequence[int]:
        if not self.sources:  # a model has many parameters, each once
            slots = {id(s.tensor): i for i, s in enumerate(sources)}
            if len(slots) == len(sources):
                self.sources, self._slots = list(sources), slots
                return range(len(sources))
        return tuple([self._slot(s) for s in sources])

    def _call(self, node: Node) -> Any:
        model = node.model
        callee = model.serial if model is not None else node.func
        args = tuple(self._wired(a, model is None) for a in node.args)
        kwargs = tuple((k, self._wired(v, True)) for k, v in node.kwargs.items())
        return callee, args, kwargs, node.modes.key

    def _wired(self, a: Any, described: bool) -> Any:
        kind = type(a)
        if kind is Value:
            return "value", *self._wire(a)
        if kind is Source:
            slot = self._slot(a)
            return ("source", slot, a.tensor.dtype, a.requires_grad, a.tensor.dim()) if described else ("source", slot)
        if kind is int and a > 1:  # 0, 1 and negative ones are places and switches, not sizes
            self.numbers.append(a)
            return "number", len(self.numbers) - 1
        if kind is tuple or kind is list or kind is torch.Size:
            return ("list" if kind is list else "tuple"), tuple(self._wired(x, described) for x in a)
        if kind is slice:
            return "slice", tuple(self._wired(x, described) for x in (a.start, a.stop, a.step))
        if kind is dict:
            return "dict", tuple((k, self._wired(x, described)) for k, x in a.items())
        return "constant", kind, repr(a) if kind is float else a


class Programs:
    """Compiled steps that begin with one model graph."""

    def __init__(self, compiler: Compiler) -> None:
        self.compiler = compiler
        self.exact: dict[Any, tuple[Program, list[int]]] = {}  # and the numbers it takes beside tensors
        self.alike: dict[Any, list[Program]] = {}

    def run(self, plan: Plan, ready: Callable[[], None] = lambda: None) -> list[torch.Tensor]:
        """Results of the plan. `ready` is called when its inputs are there, before anything reads their memory."""
        values = [s.value() for s in plan.sources]
        known = self.exact.get(plan.exact)
        if known is None:
            program = self._find(plan, values)
            if len(self.exact) >= _EXACT:
                self.exact.clear()
            known = self.exact[plan.exact] = program, [plan.numbers[k] for k in program.changing]
        ready()
        program, numbers = known
        return program(plan, [*values, *numbers])

    def _find(self, plan: Plan, values: list[Any]) -> Program:
        alike = self.alike.setdefault(plan.structure, [])
        for program in alike:
            if program.takes(plan, values):
                return program
        if len(alike) == _TOO_MANY:
            warn(
                "a step was compiled anew too often: numbers or sizes in it change that cannot be symbols; "
                f"from now on it runs op by op\n  {where(plan.nodes[-1])}"
            )
        compiler = self.compiler if len(alike) < _TOO_MANY else _op_by_op
        program = Program(plan, values, alike, compiler)
        if compiler is not _op_by_op:
            alike.append(program)
        return program


def _op_by_op(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    return module.forward


class Program:
    """A plan, compiled."""

    def __init__(self, plan: Plan, values: list[Any], before: list[Program], compiler: Compiler) -> None:
        self.trusted = False  # its results from kept rows were compared with those of the whole model
        self.sizes = [tuple(v.shape) for v in values]
        self.numbers = tuple(plan.numbers)
        self.changing = self._changing_numbers(plan, before)
        mode = _torch.new_fake_mode()
        assert mode.shape_env is not None
        fakes: list[Any] = []
        for i, v in enumerate(values):
            fakes.append(_torch.fake_of_sizes(mode, v, self._dynamic(plan, i, before), f"x{i}"))
        for k in self.changing:
            fakes.append(_torch.named_symbol(mode.shape_env, f"n{k}", plan.numbers[k]))
        given = [*values, *(plan.numbers[k] for k in self.changing)]
        module = _Writer(plan, self.changing, fakes, given).module
        with _torch.without_modes(), _torch.tracing_with(mode), plain_modes(plan):
            self.compiled = _compiled(compiler, module, fakes, plan)
        for node in module.graph.find_nodes(op="placeholder"):
            node.meta.clear()  # a batch must not live as long as the code compiled for it
        self.holds = _torch.checks_of(mode.shape_env, fakes)

    def _changing_numbers(self, plan: Plan, before: list[Program]) -> list[int]:
        """Numbers that were others before; at first those that are sizes which the model's graph leaves open."""
        if before:
            known = {k for p in before for k in p.changing}
            return [k for k, n in enumerate(plan.numbers) if k in known or any(p.numbers[k] != n for p in before)]
        fixed = {n for node in plan.models for n in node.model.fixed_sizes}
        likely = _open_products(plan) - fixed
        return [k for k, n in enumerate(plan.numbers) if n in likely]

    def _dynamic(self, plan: Plan, slot: int, before: list[Program]) -> set[int]:
        shape = self.sizes[slot]
        if plan.sources[slot].requires_grad and plan.sources[slot].is_leaf:
            return set()
        likely = _open_products(plan)
        found = {d for d, size in enumerate(shape) if size in likely}
        if likely and shape and shape[0] > 1 and slot not in _of_models(plan):
            found.add(0)  # rows that were picked outside, as many as this batch has
        for p in before:
            found |= {d for d, (a, b) in enumerate(zip(p.sizes[slot], shape, strict=False)) if a != b}
        return found

    def takes(self, plan: Plan, values: list[Any]) -> bool:
        if any(
            n != m and k not in self.changing for k, (n, m) in enumerate(zip(plan.numbers, self.numbers, strict=True))
        ):
            return False
        if any(v.dim() != len(s) for v, s in zip(values, self.sizes, strict=True)):
            return False
        return self.holds([*values, *(plan.numbers[k] for k in self.changing)])

    def __call__(self, plan: Plan, given: list[Any]) -> list[torch.Tensor]:
        seeds = [n.seed for n in plan.nodes if n.seed is not None]
        if not seeds and are_plain(plan):
            return list(self.compiled(*given))
        with contextlib.ExitStack() as stack:
            if seeds:
                stack.enter_context(torch.random.fork_rng(devices=[]))
                torch.random.default_generator.manual_seed(seeds[0])
            stack.enter_context(plain_modes(plan))
            return list(self.compiled(*given))


def _compiled(compiler: Compiler, module: fx.GraphModule, fakes: list[Any], plan: Plan) -> Callable[..., Any]:
    try:
        return compiler(module, fakes)
    except TurbogrError:
        raise
    except Exception as error:
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        warn(f"a deferred step cannot be compiled and runs op by op: {said}\n  {where(plan.nodes[-1])}")
        return module.forward


def _open_sizes(plan: Plan) -> set[int]:
    return {size for n in plan.nodes for size in n.sizes}


def _open_products(plan: Plan) -> set[int]:
    """Sizes that the model's graph leaves open, and those of two dims made one: targets are flattened before a loss."""
    sizes = [n for n in sorted(_open_sizes(plan)) if n > 1]
    return {*sizes, *(a * b for i, a in enumerate(sizes) for b in sizes[i + 1 :])}


def _of_models(plan: Plan) -> set[int]:
    """Slots that the model's graph reads: it knows which of their sizes are open."""
    calls = zip(plan.nodes, plan.structure[0], strict=True)
    return {w[1] for node, call in calls if node.model is not None for w in call[1] if w[0] == "source"}


def are_plain(plan: Plan) -> bool:
    return (
        torch.is_grad_enabled() == plan.grad
        and not torch.is_autocast_enabled("cpu")
        and torch.get_default_dtype() is plan.nodes[0].modes.dtype
    )


@contextlib.contextmanager
def plain_modes(plan: Plan) -> Iterator[None]:
    """As little around a step as possible: what user code had switched on when it recorded is in the graph."""
    default, recorded = torch.get_default_dtype(), plan.nodes[0].modes.dtype
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(plan.grad))
        if torch.is_autocast_enabled("cpu"):
            stack.enter_context(torch.autocast("cpu", enabled=False))
        if default is not recorded:
            torch.set_default_dtype(recorded)
            stack.callback(torch.set_default_dtype, default)
        yield


class _Writer:
    """Writes a plan as an fx graph in Dynamo's vocabulary."""

    def __init__(self, plan: Plan, changing: list[int], fakes: list[Any], given: list[Any]) -> None:
        self.plan = plan
        self.graph, self.module = fx.Graph(), fx.GraphModule(torch.nn.Module(), fx.Graph())
        names = self._names()
        inputs = [self.graph.placeholder(names.get(i, f"x{i}")) for i in range(len(plan.sources))]
        self.sources = inputs
        self.numbers: dict[int, Any] = dict(enumerate(plan.numbers))
        for k in changing:
            self.numbers[k] = self.graph.placeholder(f"n{k}")
        for node, fake, value in zip(self.graph.find_nodes(op="placeholder"), fakes, given, strict=True):
            node.target = node.name  # fx makes names unique, not targets
            node.meta["example_value"] = fake
            node.meta["grapharg"] = SimpleNamespace(example=value)
        self.results: list[Any] = []
        self.grad, self.autocast = plan.grad, None
        self.entered: Any = None
        calls, outputs, leaves = plan.structure
        for node, call in zip(plan.nodes, calls, strict=True):
            self._modes(node)
            self._write(node, call)
        self._switch_autocast(None)
        self._switch_grad(plan.grad)
        left = [self._left(self.results[i][k]) for i, k in leaves]
        self.graph.output(tuple([*(self.results[i][k] for i, k in outputs), *(x for pair in left for x in pair)]))
        self.module.graph = self.graph
        self.module.meta[WAITED] = _in_words(plan)

    def _left(self, value: fx.Node) -> list[fx.Node]:
        pair = self.graph.call_function(torch.ops.turbogr.leave_rows.default, (value,))
        pair.meta["stack_trace"] = value.meta.get("stack_trace", "")
        return [self.graph.call_function(operator.getitem, (pair, i)) for i in (0, 1)]

    def _names(self) -> dict[int, str]:
        """Dynamo's names for what model graphs read, by which people know their parameters."""
        found: dict[int, str] = {}
        for node, call in zip(self.plan.nodes, self.plan.structure[0], strict=True):
            for name, wire in zip(node.model.names, call[1], strict=True) if node.model is not None else ():
                if wire[0] == "source":
                    found.setdefault(wire[1], name)
        return found

    def _modes(self, node: Node) -> None:
        self._switch_autocast(node.modes.autocast)
        self._switch_grad(node.modes.grad)

    def _switch_grad(self, wanted: bool) -> None:
        if self.grad != wanted:
            self.grad = wanted
            self.graph.call_function(_torch.set_grad_enabled, (wanted,))

    def _switch_autocast(self, wanted: Any) -> None:
        if self.autocast == wanted:
            return
        if self.entered is not None:
            self.graph.call_function(_torch.exit_autocast, (self.entered,))
            self.entered = None
        if wanted is not None:
            self.entered = self.graph.call_function(_torch.enter_autocast, ("cpu", wanted[0], True, wanted[1]))
        self.autocast = wanted

    def _write(self, node: Node, call: Any) -> None:
        _, wired_args, wired_kwargs, _ = call
        args = [self._argument(w) for w in wired_args]
        kwargs = {k: self._argument(w) for k, w in wired_kwargs}
        if node.model is not None:
            self.results.append(self._inline(node, args))
            return
        made = self._called(node.func, args, kwargs)
        made.meta["stack_trace"] = text_of(node.line)
        single = len(node.values) == 1 and node.values[0].index == -1
        self.results.append(_Single(made) if single else _Items(self.graph, made, made.meta["stack_trace"]))

    def _called(self, func: Any, args: list[Any], kwargs: dict[str, Any]) -> fx.Node:
        name = getattr(func, "__name__", "")
        if func == torch.Tensor.data.__get__:  # type: ignore[attr-defined]
            return self.graph.call_method("detach", tuple(args))
        if name == "__get__":
            return self.graph.call_function(getattr, (args[0], func.__self__.__name__))
        for method in (name, f"__{name}__"):  # `Tensor.__pow__` calls itself `pow`
            if getattr(torch.Tensor, method, None) is func:
                return self.graph.call_method(method, tuple(args), kwargs)
        return self.graph.call_function(func, tuple(args), kwargs)

    def _inline(self, node: Node, args: list[Any]) -> list[Any]:
        model, values = node.model, {}
        for placeholder, a in zip(model.module.graph.find_nodes(op="placeholder"), args, strict=True):
            values[placeholder] = a
        for i, (at, dim) in model.size_inputs.items():  # sizes are what the tensors say, not numbers beside them
            placeholder = model.module.graph.find_nodes(op="placeholder")[i]
            values[placeholder] = self.graph.call_function(torch.ops.aten.sym_size.int, (args[at], dim))
        prefix = f"call{len(self.results)}_"
        for inner in model.module.graph.nodes:
            if inner.op == "placeholder":
                continue
            if inner.op == "output":
                return [values[n] if isinstance(n, fx.Node) else n for n in inner.args[0]]
            copied = self.graph.node_copy(inner, lambda n: values[n])
            copied.meta = dict(inner.meta)
            if inner.op in ("get_attr", "call_module"):
                copied.target = prefix + str(inner.target).replace(".", "_")
                setattr(self.module, copied.target, _attribute(model.module, str(inner.target)))
            values[inner] = copied
        raise AssertionError("a graph without an output")

    def _argument(self, wire: Any) -> Any:
        kind, *rest = wire
        if kind == "value":
            return self.results[rest[0]][rest[1]]
        if kind == "source":
            return self.sources[rest[0]]
        if kind == "number":
            return self.numbers[rest[0]]
        if kind == "list":
            return [self._argument(w) for w in rest[0]]
        if kind == "tuple":
            return tuple(self._argument(w) for w in rest[0])
        if kind == "slice":
            return slice(*(self._argument(w) for w in rest[0]))
        if kind == "dict":
            return {k: self._argument(w) for k, w in rest[0]}
        return float(rest[1]) if rest[0] is float else rest[1]


class _Single:
    """Results of a function that returns one tensor."""

    def __init__(self, node: fx.Node) -> None:
        self.node = node

    def __getitem__(self, index: int) -> fx.Node:
        return self.node


class _Items:
    """Results of a function that returns several; made as they are asked for."""

    def __init__(self, graph: fx.Graph, node: fx.Node, text: str) -> None:
        self.graph, self.node, self.text = graph, node, text
        self.made: dict[int, fx.Node] = {}

    def __getitem__(self, index: int) -> fx.Node:
        if index not in self.made:
            self.made[index] = self.graph.call_function(operator.getitem, (self.node, index))
            self.made[index].meta["stack_trace"] = self.text
        return self.made[index]


def _attribute(module: Any, path: str) -> Any:
    for part in path.split("."):
        module = getattr(module, part)
    return module


def _in_words(plan: Plan) -> str:
    if not plan.models:
        return ""
    calls = list(dict.fromkeys(where(n) for n in plan.models))
    after = len(plan.nodes) - len(plan.models)
    models = f"the model called at {calls[0]}" + (f" and {len(calls) - 1} more" if calls[1:] else "")
    return f"{models} until its loss is needed, and runs it as one step with {after} recorded calls of torch"


def where(node: Node) -> str:
    if node.line is None:
        return "?"
    code, line = node.line
    return f"{short_path(code.co_filename)}:{line}"


def text_of(line: Any) -> str:
    """As Dynamo writes the place of a node."""
    if line is None:
        return ""
    code, number = line
    source = linecache.getline(code.co_filename, number).strip()
    return f'  File "{code.co_filename}", line {number}, in {code.co_name}\n    {source}\n'
