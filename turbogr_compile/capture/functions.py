"""`torch.autograd.Function` as one op: Dynamo hands over its forward and its backward as graphs.

The op computes the forward graph, and its gradient is the backward graph whatever that computes: nothing is derived.
Where both are elementwise and the backward leaves a zero gradient zero, the op is tagged as pointwise, and passes may
run it on fewer rows. Of any other, passes may look at the bodies and make an op for fewer rows out of them. Its name is
made from its content, so that it is the same op in every process and for every size.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.library import Library, register_autograd, register_fake
from torch.utils import _pytree as pytree

from .._torch import FakeTensor, autograd_function_apply, detect_fake_mode, is_random
from ..errors import TurbogrError
from ..graph.nodes import zeros_of
from ..graph.shapes import same_shape
from .normal import memory_of, value_of
from .trace import functional_trace, remove_modes

COMPUTES, MAY_ACT = "turbogr_function", "turbogr_user_function"  # namespaces: of torch's ops alone, or of others too
FUNCTIONS = {COMPUTES, MAY_ACT}
aten = torch.ops.aten
_LIBRARIES: dict[str, Library] = {}
_TORCHS_OWN = {"aten", "prims", "turbogr", COMPUTES}


class CannotMake(TurbogrError):
    """The function cannot be an op."""


@dataclass(frozen=True)
class Function:
    """An op for one call of an `autograd.Function`."""

    op: torch._ops.OpOverload
    single: bool  # returns one tensor, not a tuple
    results: int

    def __call__(self, *arguments: Any) -> Any:
        found = self.op(*arguments)
        if self.single:
            return found if isinstance(found, torch.Tensor) else found[0]
        return (found,) if isinstance(found, torch.Tensor) else tuple(found[: self.results])


@dataclass(frozen=True)
class Bodies:
    """What a function computes, as functional ATen.

    forward    of the arguments: what it returns, and what it saves
    backward   of the gradients of what it returns, and of what was saved: a gradient for each argument
    unwatched  results that have no gradient
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    unwatched: tuple[int, ...] = ()

    def function(self) -> Function:
        """The op; raises CannotMake."""
        return _Making(self.forward, self.backward, self.unwatched).function()


_BODIES: dict[torch._ops.OpOverload, Bodies] = {}


def bodies_of(target: Any) -> Bodies | None:
    """What an op of this module was made from."""
    return _BODIES.get(target)


def is_function(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is autograd_function_apply


def function_of(owner: fx.GraphModule, node: fx.Node) -> Function:
    """The op for a call that Dynamo recorded; raises CannotMake."""
    if node.kwargs.get("dirty_idx"):
        raise CannotMake("it writes to its arguments (mark_dirty)")
    bodies: list[Any] = [getattr(owner, str(body.target)) for body in node.args[:2]]  # type: ignore[union-attr]
    forward, backward = (_traced(body) for body in bodies)
    unwatched: Any = node.kwargs.get("non_differentiable_idx") or ()
    made = Bodies(forward, backward, tuple(unwatched))
    function = made.function()
    _BODIES.setdefault(function.op, made)
    return function


def _traced(body: fx.GraphModule) -> fx.GraphModule:
    """Functional ATen of what Dynamo recorded."""
    inputs = [_fresh(n.meta.get("example_value")) for n in body.graph.find_nodes(op="placeholder")]
    traced = functional_trace(fx.Interpreter(body).run, inputs, composites=True)
    if traced.written or traced.reshaped:
        raise CannotMake("it writes to its arguments, or to what it saved")
    if remove_modes(traced, grad_enabled=False):
        raise CannotMake("it switches gradients on")
    _drop_views_as(traced.module.graph)
    traced.module.graph.eliminate_dead_code()
    if traced.module.graph.find_nodes(op="get_attr"):
        raise CannotMake("it holds a tensor that is no argument")
    traced.module.recompile()
    return traced.module


def _drop_views_as(graph: fx.Graph) -> None:
    """`x.view_as(x)`, which torch makes of an argument that is handed through, names sizes and means `x`."""
    for node in graph.nodes:
        source = node.args[0] if node.target is aten.view.default else None
        if isinstance(source, fx.Node) and same_shape(value_of(node).shape, value_of(source).shape):
            node.replace_all_uses_with(source)


def _fresh(value: Any) -> Any:
    """As the value, without its past."""
    if value is None:
        raise CannotMake("Dynamo does not say what it is called with")
    if not isinstance(value, torch.Tensor):
        return value
    mode = detect_fake_mode([value])
    if mode is None or type(value) is not FakeTensor:
        raise CannotMake(f"it takes a {type(value).__name__}")
    with mode, torch.no_grad():
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


@dataclass(frozen=True)
class _Making:
    forward: fx.GraphModule
    backward: fx.GraphModule
    unwatched: tuple[int, ...]  # results that have no gradient

    def function(self) -> Function:
        (output,) = self.forward.graph.find_nodes(op="output")
        returned, saved = output.args[0][0], list(output.args[0][1])
        results: Any = [returned] if isinstance(returned, fx.Node) else list(returned)
        if not results or not all(isinstance(value_of(r), torch.Tensor) for r in results):
            raise CannotMake("it returns something that is no tensor")
        pointwise = len(results) == 1 and self._is_pointwise()
        arguments = self.forward.graph.find_nodes(op="placeholder")
        self._unshare(results, [] if pointwise else saved, arguments)
        kept = [s for s in saved if isinstance(value_of(s), torch.Tensor) and s not in arguments and s not in results]
        # An elementwise function is computed again in its backward: with one result it fits wherever such ops fit.
        extra = [] if pointwise else list(dict.fromkeys(kept))
        recall = _Recall(self.forward, list(saved), arguments, results, extra, again=pointwise and bool(kept))
        compute = fx.GraphModule(self.forward, fx.Graph())
        values: dict[fx.Node, fx.Node] = {}
        compute.graph.graph_copy(self.forward.graph, values)
        made = [values[n] for n in (*results, *extra)]
        compute.graph.output(made[0] if len(made) == 1 else tuple(made))
        compute.graph.eliminate_dead_code()
        compute.recompile()
        op = self._registered(arguments, compute, recall, len(results), pointwise)
        return Function(op, isinstance(returned, fx.Node), len(results))

    def _is_pointwise(self) -> bool:
        return _elementwise(self.forward) and _elementwise(self.backward) and _keeps_zero(self.backward)

    def _unshare(self, results: list[fx.Node], saved: list[Any], arguments: list[fx.Node]) -> None:
        """An op returns memory of its own, in what it saves, too: code generators write to memory that nobody reads.

        A function may hand an argument through; eager lets nobody write to it.
        """
        taken = {memory for n in arguments for memory in memory_of(n)}
        owned: dict[fx.Node, fx.Node] = {}
        for i, result in enumerate(results):
            results[i] = self._own(result, taken)
            owned.setdefault(result, results[i])
        for i, value in enumerate(saved):
            if isinstance(value, fx.Node) and value not in arguments:
                saved[i] = owned[value] = owned.get(value) or self._own(value, taken)

    def _own(self, value: fx.Node, taken: set[Any]) -> fx.Node:
        """The value, or a copy of it where its memory is taken."""
        memory = memory_of(value)
        if memory.isdisjoint(taken):
            taken |= memory
            return value
        (output,) = value.graph.find_nodes(op="output")
        with value.graph.inserting_before(output):
            copy = value.graph.call_function(aten.clone.default, (value,))
        copy.meta = dict(value.meta)
        return copy

    def _registered(
        self, arguments: list[fx.Node], compute: fx.GraphModule, recall: _Recall, results: int, pointwise: bool
    ) -> torch._ops.OpOverload:
        (output,) = compute.graph.find_nodes(op="output")
        count = 1 if isinstance(output.args[0], fx.Node) else len(output.args[0])
        returns = "Tensor" if count == 1 else f"({', '.join(['Tensor'] * count)})"
        schema = f"({', '.join(f'{_type(n)} a{i}' for i, n in enumerate(arguments))}) -> {returns}"
        text = "\n".join([schema, *map(_text, (compute, self.backward)), str(recall), str(self.unwatched)])
        name = f"f_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
        space = COMPUTES if _only_computes(self.forward) and _only_computes(self.backward) else MAY_ACT
        if not hasattr(getattr(torch.ops, space), name):
            library = _LIBRARIES.setdefault(space, Library(space, "FRAGMENT"))
            tags = (torch.Tag.pt2_compliant_tag, *([torch.Tag.pointwise] if pointwise else []))
            library.define(name + schema, tags=tags)
            library.impl(name, _without_grad(compute), "CompositeExplicitAutograd")
            register_fake(f"{space}::{name}", compute.forward, lib=library)
            save, gradient = recall.of_context(self.unwatched), _gradient(self.backward, recall, results)
            register_autograd(f"{space}::{name}", gradient, setup_context=save, lib=library)
        return getattr(getattr(torch.ops, space), name).default


@dataclass(frozen=True)
class _Recall:
    """Where the backward finds what the forward saved."""

    forward: fx.GraphModule
    saved: list[Any]
    arguments: list[fx.Node]
    results: list[fx.Node]
    extra: list[fx.Node]
    again: bool

    def __str__(self) -> str:
        return " ".join(f"{kind}{at}" for kind, at in map(self._place, self.saved))

    def _place(self, value: Any) -> tuple[str, Any]:
        if not isinstance(value, fx.Node):
            return "constant", value
        if value in self.arguments:
            return "argument", self.arguments.index(value)
        if not isinstance(value_of(value), torch.Tensor):
            raise CannotMake("it saves a number that it computes")
        made = [*self.results, *self.extra]
        return ("again", self.saved.index(value)) if value not in made else ("result", made.index(value))

    def of_context(self, unwatched: Sequence[int]) -> Callable[..., None]:
        places = list(map(self._place, self.saved))

        def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            made = [output] if isinstance(output, torch.Tensor) else list(output)
            if unwatched:
                ctx.mark_non_differentiable(*(made[i] for i in unwatched))
            tensors = {i: x for i, x in enumerate(inputs) if isinstance(x, torch.Tensor)}
            wanted = [at for kind, at in places if kind == "argument" and at in tensors]
            inputs_kept = sorted(tensors) if self.again else sorted(set(wanted))
            results_kept = sorted({at for kind, at in places if kind == "result"})
            ctx.numbers = {i: x for i, x in enumerate(inputs) if i not in tensors}
            ctx.places = inputs_kept, results_kept
            ctx.save_for_backward(*(tensors[i] for i in inputs_kept), *(made[i] for i in results_kept))

        return save

    def values(self, ctx: Any) -> list[Any]:
        inputs_kept, results_kept = ctx.places
        tensors = list(ctx.saved_tensors)
        inputs = {**ctx.numbers, **dict(zip(inputs_kept, tensors, strict=False))}
        made = dict(zip(results_kept, tensors[len(inputs_kept) :], strict=True))
        again = self.forward(*(inputs[i] for i in range(len(self.arguments))))[1] if self.again else ()
        found = {"argument": inputs, "result": made, "again": dict(enumerate(again))}
        return [at if kind == "constant" else found[kind][at] for kind, at in map(self._place, self.saved)]


def _gradient(backward: fx.GraphModule, recall: _Recall, results: int) -> Callable[..., Any]:
    def gradient(ctx: Any, *grads: Any) -> Any:
        return tuple(backward(*grads[:results], *recall.values(ctx)))

    return gradient


def _without_grad(compute: fx.GraphModule) -> Callable[..., Any]:
    def run(*arguments: Any) -> Any:
        with torch.no_grad():
            return compute.forward(*arguments)

    return run


def _type(node: fx.Node) -> str:
    value = value_of(node)
    if isinstance(value, torch.Tensor):
        return "Tensor"
    if isinstance(value, (torch.SymInt, int)) and not isinstance(value, bool):
        return "SymInt"
    raise CannotMake(f"it takes a {type(value).__name__}")


def _text(module: fx.GraphModule) -> str:
    """What a graph computes, without the names of its values."""
    numbers = {n: _Number(i) for i, n in enumerate(module.graph.nodes)}
    numbered: Any = numbers.__getitem__
    return "\n".join(
        f"{n.op} {n.target if n.op == 'call_function' else ''} {fx.map_arg((n.args, n.kwargs), numbered)}"
        for n in module.graph.nodes
    )


@dataclass(frozen=True)
class _Number:
    """Stands for a value in the text of a graph."""

    of: int

    def __repr__(self) -> str:
        return f"%{self.of}"


def _only_computes(module: fx.GraphModule) -> bool:
    targets = [n.target for n in module.graph.nodes if isinstance(n.target, torch._ops.OpOverload)]
    return all(t.namespace in _TORCHS_OWN for t in targets)


# --- elementwise functions ---------------------------------------------------------------------------


def _elementwise(module: fx.GraphModule) -> bool:
    return all(n.op != "call_function" or _is_elementwise(n) for n in module.graph.nodes)


_BY_CHANNEL = {aten.prelu.default, aten._prelu_kernel.default}  # which is dim 1, whatever that is
_COPIES = {aten.clone.default, aten._to_copy.default, aten.detach.default, aten.alias.default}


def _is_elementwise(node: fx.Node) -> bool:
    """Of its own element of every argument. What names a size does not fit other rows."""
    if node.target in _COPIES:
        return True
    tags = getattr(node.target, "tags", ())
    return torch.Tag.pointwise in tags and not is_random(node) and node.target not in _BY_CHANNEL


def _keeps_zero(backward: fx.GraphModule) -> bool:
    """Is the gradient of every argument exactly zero where those of the results are?

    Eager calls a backward on padded rows too, with gradients of zero.
    """
    (output,) = backward.graph.find_nodes(op="output")
    zero = set(backward.graph.find_nodes(op="placeholder")[:1])
    for node in backward.graph.nodes:
        if node.op == "call_function" and is_zero(node, zero):
            zero.add(node)
    return all(n in zero for n in pytree.tree_leaves(output.args[0]) if isinstance(n, fx.Node))


_PRODUCTS = {"mul", "matmul", "mm", "bmm", "mv", "einsum"}
_SUMS = {"add", "sub", "minimum", "maximum", "cat", "stack"}
_OF_THE_FIRST = {
    "getitem", "reshape", "view", "_unsafe_view", "flatten", "unflatten", "unsqueeze", "squeeze", "permute",
    "transpose", "t", "expand", "repeat", "slice", "select", "flip", "split", "split_with_sizes", "chunk", "unbind",
    "sum", "mean", "cumsum",
}  # fmt: skip


def is_zero(node: fx.Node, zero: set[fx.Node]) -> bool:
    """Does an op make zeros where these values hold zeros? Of an op within each row: is its row zero where theirs are?

    Anything times zero is zero, as everywhere in turbogr.
    """
    name = getattr(node.target, "overloadpacket", node.target).__name__  # type: ignore[union-attr]
    operands = node.all_input_nodes
    if getattr(node.target, "namespace", "aten") not in _TORCHS_OWN:
        return False  # nobody knows what a user's op makes of zeros, or does

    def zeros(*values: Any) -> bool:
        return all(v in zero if isinstance(v, fx.Node) else isinstance(v, (int, float)) and v == 0 for v in values)

    if node.target in _COPIES or name in _OF_THE_FIRST:
        return zeros(node.args[0])
    if name in _PRODUCTS and any(a in zero for a in operands):
        return True
    if name == "linear":
        return zeros(node.args[0]) and len(operands) == 2
    if name == "div":
        return isinstance(node.args[0], fx.Node) and zeros(node.args[0])
    if name in _SUMS and len(operands) > 1:
        return zeros(*operands)
    if name in ("where", "masked_fill"):
        return len(node.args) == 3 and zeros(*(node.args[1:] if name == "where" else node.args[::2]))
    return operands == [*zero.intersection(operands)] and _is_zero_of_zero(node, operands)


def _is_zero_of_zero(node: fx.Node, operands: list[fx.Node]) -> bool:
    """By calling the op."""
    target: Any = node.target
    if len(operands) != 1 or "empty" in str(target):
        return False
    given = value_of(operands[0])
    # A zero may be negative, and some ops tell; others tell one zero from several.
    zeros = [torch.full([2] * given.dim(), zero, dtype=given.dtype, device="cpu") for zero in zeros_of(given)]
    try:
        with torch.no_grad():
            made = [target(*(x if a is operands[0] else a for a in node.args), **node.kwargs) for x in zeros]
    except (RuntimeError, TypeError, ValueError, IndexError):
        return False
    return all(isinstance(y, torch.Tensor) and bool((y == 0).all()) for y in made)
