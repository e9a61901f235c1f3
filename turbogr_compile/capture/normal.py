"""The normal form: one spelling per meaning, for captured graphs, rule patterns and replacements alike.

`trace` turns a function of tensors into functional ATen of a phase and `normalize` gives every node its canonical
spelling. What holds afterwards:

* functional: in-place ops are gone, every value is written once;
* no modes: a value computed under `no_grad` and used outside is behind an `aten.detach`, autocast is explicit casts,
  so the meaning of a node does not depend on where it stands;
* PRE_GRAD keeps composites (`linear`, `layer_norm`, `softmax.int`, `matmul`, `dropout`, ...), spells `view` as
  `reshape`, one for several in a row, a swap of two dims as `transpose`, `&` as `bitwise_and`;
* a size that an input has is read from the input, and not from a value that happens to have it, too;
* views that change nothing (full slices, expansion or reshape to the same shape) are gone, and copies before a reshape,
  but for those that somebody sees who looks at memory (`as_strided`, `view_as_complex`, ops of others);
* arguments are positional as far as the schema allows, trailing defaults are dropped, dims are non-negative, a number
  that meets a floating-point tensor is a float.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from .._torch import StorageWeakRef
from ..graph.nodes import layout_sensitive
from ..graph.phases import Phase
from ..graph.shapes import same_shape

aten = torch.ops.aten


_RESHAPES = {aten.reshape.default, aten.view.default, aten._unsafe_view.default}
_SPELLED = {
    aten.view.default: aten.reshape.default,  # strides seen in tracing need not be those of the run
    aten._unsafe_view.default: aten.reshape.default,
    aten.lift_fresh_copy.default: aten.clone.default,
    aten.clamp_min.default: aten.clamp.default,
    aten.concat.default: aten.cat.default, aten.concatenate.default: aten.cat.default,
    aten.__and__.Tensor: aten.bitwise_and.Tensor, aten.__and__.Scalar: aten.bitwise_and.Scalar,
    aten.__or__.Tensor: aten.bitwise_or.Tensor, aten.__or__.Scalar: aten.bitwise_or.Scalar,
    aten.__xor__.Tensor: aten.bitwise_xor.Tensor, aten.__xor__.Scalar: aten.bitwise_xor.Scalar,
}  # fmt: skip
_COPIES = {aten.alias.default, aten.lift_fresh_copy.default, aten.lift_fresh.default}
_SAME_IF_SAME_SHAPE = {aten.reshape.default, aten.view.default, aten.expand.default, aten.slice.Tensor}
_DIMS = {"dim", "dims", "dim0", "dim1", "dim2", "start_dim", "end_dim"}
_OF_RESULT = {"unsqueeze", "unsqueeze_copy", "stack", "diag_embed"}  # dims count those of the result: one more
_SIZES = {"reshape": "shape", "view": "size", "_unsafe_view": "size", "expand": "size"}  # -1 where a size is meant
_UNSAID = {"pin_memory": False, "layout": torch.strided}  # same as leaving the argument out
_TO_THE_END = torch.iinfo(torch.int64).max


def normalize(graph: fx.Graph, phase: Phase) -> None:
    """Spell every node canonically. Changes no value, keeps the names of nodes it keeps, and is idempotent."""
    returned = _Returned(graph)
    for node in list(graph.nodes):
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        if node.target is aten._assert_tensor_metadata.default:
            graph.erase_node(node)
            continue
        if phase is Phase.PRE_GRAD and not _is_copy(node, phase, returned):
            _skip_reshapes(node, returned)
            node.target = _SPELLED.get(node.target, node.target)
        _spell_arguments(node)
        if phase is Phase.PRE_GRAD:  # later phases keep to the ops their target knows
            _spell_transpose(node)
        if _is_copy(node, phase, returned) or _is_identity(node, returned):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    if phase is Phase.PRE_GRAD:
        _read_sizes_of_inputs(graph)


def _read_sizes_of_inputs(graph: fx.Graph) -> None:
    inputs = graph.find_nodes(op="placeholder")
    read = [n for n in graph.find_nodes(op="call_function", target=aten.sym_size.int) if n.args[0] not in inputs]
    if not read:
        return
    known: dict[Any, fx.Node | tuple[fx.Node, int]] = {}
    for node in inputs:
        value = value_of(node)
        for dim, size in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
            if isinstance(size, torch.SymInt):
                known.setdefault(size.node.expr, (node, dim))
        if isinstance(value, torch.SymInt):
            known[value.node.expr] = node
    for node in read:
        size = value_of(node)
        place = known.get(size.node.expr) if isinstance(size, torch.SymInt) else None
        if place is None:
            continue
        if not isinstance(place, fx.Node):
            with graph.inserting_after(inputs[-1]):
                source = graph.call_function(aten.sym_size.int, place)
            source.meta = dict(node.meta)
            place = known[size.node.expr] = source
        node.replace_all_uses_with(place)
        graph.erase_node(node)


class _Returned:
    """What the caller gets to see: there a copy, or an alias, makes a difference."""

    def __init__(self, graph: fx.Graph) -> None:
        (output,) = graph.find_nodes(op="output")
        self.nodes = set(output.all_input_nodes)
        self.memory = returned_memory(graph)
        stores = graph.find_nodes(op="call_function", target=aten.copy_.default)
        self.written = {memory for n in stores for memory in memory_of(n.args[0])}  # where a copy keeps the old value
        self.strided = layout_sensitive(graph, own=False)  # somebody looks at how they lie in memory

    def __contains__(self, node: fx.Node) -> bool:
        return not self.memory.isdisjoint(memory_of(node))


def _is_copy(node: fx.Node, phase: Phase, returned: _Returned) -> bool:
    """Passes its argument on, and nobody can tell."""
    if node.target in _COPIES or (node.target is aten.detach.default and phase is not Phase.PRE_GRAD):
        return node not in returned
    return False


def _is_identity(node: fx.Node, returned: _Returned) -> bool:
    """A view of everything, in the same shape."""
    if node.target not in _SAME_IF_SAME_SHAPE or (node.target is aten.slice.Tensor and len(node.args) > 4):
        return False
    source: Any = node.args[0]
    value, of = value_of(node), value_of(source)
    if not isinstance(value, torch.Tensor) or not isinstance(of, torch.Tensor) or not same_shape(value.shape, of.shape):
        return False
    if node in returned.strided and not _lie_alike(value, of):
        return False
    # The caller can tell a view from an input, and from another result.
    return node not in returned or (source.op != "placeholder" and source not in returned.nodes)


def _lie_alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.layout is not torch.strided or b.layout is not torch.strided or same_shape(a.stride(), b.stride())


def _skip_reshapes(node: fx.Node, returned: _Returned) -> None:
    """Only the last of several reshapes counts. `reshape` itself is recorded as copy and view where it has to copy."""
    if node.target not in _RESHAPES or not isinstance(node.args[0], fx.Node):
        return
    source: Any = node.args[0]
    if node.target is aten._unsafe_view.default and source.target is aten.clone.default:
        source = source.args[0]
    while (source.target in _RESHAPES or source.target is aten.clone.default) and _can_skip(source, node, returned):
        source = source.args[0]
    node.args = (source, *node.args[1:])


def _can_skip(source: fx.Node, node: fx.Node, returned: _Returned) -> bool:
    """May `node`, a reshape of `source`, start from what `source` starts from?"""
    assert isinstance(source.args[0], fx.Node)
    memory = memory_of(source.args[0])
    if node in returned.strided and memory != memory_of(source):
        return False  # what is copied lies in one piece
    if node in returned:
        return memory_of(node) == memory  # views of one memory, before and after
    return source.target in _RESHAPES or returned.written.isdisjoint(memory)


def _spell_transpose(node: fx.Node) -> None:
    """Swapping two dims is `transpose`, lower dim first, also where it was written as `permute` or `T`."""
    args: Any = node.args
    if node.target is aten.permute.default:
        moved = [i for i, d in enumerate(args[1]) if i != d]
        if len(moved) == 2:
            node.target, node.args = aten.transpose.int, (args[0], *moved)
    elif node.target is aten.transpose.int:
        node.args = (args[0], *sorted(args[1:]))


def returned_memory(graph: fx.Graph) -> set[StorageWeakRef]:
    (output,) = graph.find_nodes(op="output")
    return {memory for node in output.all_input_nodes for memory in memory_of(node)}


def memory_of(node: fx.Node) -> set[StorageWeakRef]:
    """Identity of the memory behind a node's fake value; views share it."""
    values = pytree.tree_leaves(node.meta.get("val"))
    return {StorageWeakRef(v.untyped_storage()) for v in values if isinstance(v, torch.Tensor)}


def _spell_arguments(node: fx.Node) -> None:
    target = node.target
    assert isinstance(target, torch._ops.OpOverload)
    arguments = target._schema.arguments
    positional = [a for a in arguments if not a.kwarg_only]
    given = dict(zip((a.name for a in positional), node.args, strict=False)) | dict(node.kwargs)
    spell = _Speller(node, given)
    values = {a.name: spell(a, given[a.name]) for a in arguments if a.name in given}
    defaults = {a.name: spell(a, a.default_value) for a in arguments if a.has_default_value()}

    def said(name: str) -> bool:
        if name not in values or (name in defaults and _same(values[name], defaults[name])):
            return False
        return not (name in _UNSAID and _same(values[name], _UNSAID[name]))

    names = [a.name for a in positional]
    while names and not said(names[-1]):
        names.pop()
    args = tuple(values[n] if n in values else defaults[n] for n in names)
    kwargs = {a.name: values[a.name] for a in arguments if a.kwarg_only and said(a.name)}
    if not _same(args, tuple(node.args)) or not _same(kwargs, dict(node.kwargs)):
        node.args, node.kwargs = args, kwargs


class _Speller:
    """Canonical form of one argument of one node."""

    def __init__(self, node: fx.Node, given: Mapping[str, Any]) -> None:
        packet = node.target.overloadpacket.__name__  # type: ignore[union-attr]
        is_aten = node.target.namespace == "aten"  # type: ignore[union-attr]
        first = given.get(node.target._schema.arguments[0].name) if given else None  # type: ignore[union-attr]
        subject = value_of(first[0] if isinstance(first, (list, tuple)) and first else first)
        result = node.meta.get("val")
        self.is_slice = node.target is aten.slice.Tensor
        self.rank = subject.ndim + (packet in _OF_RESULT) if is_aten and isinstance(subject, torch.Tensor) else None
        values = [value_of(x) for x in node.all_input_nodes]
        if self.rank is not None and any(isinstance(v, torch.Tensor) and v.ndim > subject.ndim for v in values):
            self.rank = (
                None  # dims may count those of all operands together: broadcast, or of a cat's first that is void
            )
        self.sizes = _SIZES.get(packet) if is_aten and isinstance(result, torch.Tensor) else None
        self.shape = result.shape if isinstance(result, torch.Tensor) else ()
        self.floating = (
            isinstance(subject, torch.Tensor) and subject.is_floating_point()
            and isinstance(result, torch.Tensor) and (result.is_floating_point() or result.dtype is torch.bool)
        )  # fmt: skip

    def __call__(self, argument: Any, value: Any) -> Any:
        if self.is_slice and argument.name == "start" and value is None:
            return 0
        if self.is_slice and argument.name == "end" and value == _TO_THE_END:
            return None
        kind = argument.real_type if hasattr(argument, "real_type") else argument.type
        inner = kind.getElementType() if isinstance(kind, torch.OptionalType) else kind
        if isinstance(inner, torch.ListType):
            if type(value) is int:  # one number stands for all
                value = [value] * (argument.N or 1)
            if isinstance(value, (list, tuple)):
                return [self._element(argument, v, i) for i, v in enumerate(value)]
            return value
        if isinstance(inner, (torch.NumberType, torch.TensorType)):
            return self._number(value)
        return self._element(argument, value, 0)

    def _element(self, argument: Any, value: Any, index: int) -> Any:
        if type(value) is not int or value >= 0:
            return value
        if argument.name in _DIMS and self.rank is not None:
            return value + max(self.rank, 1)
        if value == -1 and argument.name == self.sizes and type(self.shape[index]) is int:
            return self.shape[index]
        return value

    def _number(self, value: Any) -> Any:
        if self.floating and type(value) is int and int(float(value)) == value:
            return float(value)
        return value


def value_of(node: Any) -> Any:
    return node.meta.get("val") if isinstance(node, fx.Node) else None


def _same(a: Any, b: Any) -> bool:
    """Equal as arguments: 1 and True differ, 1 and 1.0 differ, lists and tuples do not."""
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    return a is b or (type(a) is type(b) and not isinstance(a, fx.Node) and bool(a == b))
