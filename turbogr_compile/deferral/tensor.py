"""The tensor that stands for a value which is not computed yet.

Shape, type, device and place in autograd's graph are known. What functional code does with it is recorded; what needs
its numbers or its memory computes it. Whether a function may be recorded is found out by running it on tensors without
data: it must write to nothing, draw nothing, and say the sizes of its results.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

import numpy
import torch
from torch.utils import _pytree as pytree

from .. import _torch
from ..graph.provenance import is_library
from .dry_run import Results, dry_run, mapped
from .flush import compute, look, place, realize
from .record import LOCK, SCALARS, WAITING, Kept, Link, Meta, Modes, Node, Source, Value, above, tensors_of

T = torch.Tensor


class Deferred(torch.Tensor):
    """A tensor whose value is computed when it is needed, together with what was done with it."""

    value: Value
    adopted: Any = None  # the place in autograd's graph that somebody else gave it

    @classmethod
    @_torch.untraced
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _called(func, args, kwargs or {})

    @classmethod
    @_torch.untraced
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Code out of sight of __torch_function__: C++, transforms. Autograd is above us, and has our links."""
        args, kwargs = pytree.tree_map(_detached_value, (args, kwargs or {}))
        return func(*args, **kwargs)


def _make(value: Value, link: Any = None) -> Deferred:
    meta = value.meta
    with _torch.below_torch_function():
        made: Any = _torch.wrapper(Deferred, meta.shape, meta.stride, meta.dtype, meta.device)
        made.value = value
    value.stands(made, link)
    return made


def tensor_for(value: Value) -> Deferred:
    """The tensor that user code gets."""
    node = value.node
    if not value.meta.requires_grad:
        return _make(value)
    if node.token is None:
        node.connect(compute)
    value.token = node.token
    return _torch.apply_as_it_is(Link, node.anchor, value, _make)


def _link_of(x: Deferred) -> Any:
    with _torch.below_torch_function():
        return x.grad_fn


def real_of(x: Any) -> Any:
    """An ordinary tensor for a deferred one; everything else as it is."""
    if type(x) is not Deferred:
        return x
    _adopt_foreign(x)
    if x.value.real is None:
        realize([x.value])
    return x.value.real


def _detached_value(x: Any) -> Any:
    if type(x) is not Deferred:
        return x
    with _torch.above_autograd():
        real = real_of(x)
    token = x.value.token
    if real.requires_grad and torch.is_grad_enabled() and (x.value.moved or token is None or not token.simple):
        raise RuntimeError(
            "turbogr: code that does not ask a tensor for its value (C++, a transform) got a deferred one, which was "
            "written to or has gradients of other tensors than the model's parameters; compute it with the model, or "
            "compile with options={'deferral': False}"
        )
    return real.detach() if real.requires_grad else real


def pending(x: Any) -> bool:
    return type(x) is Deferred and x.value.real is None


def _adopt_foreign(x: Deferred) -> None:
    """Somebody else (an `autograd.Function`, a write in C++) gave the tensor another place in autograd's graph."""
    with _torch.below_torch_function():
        function = x.grad_fn
    if function is None or getattr(function, "value", None) is x.value or x.adopted is function:
        return
    realize([x.value])
    real = x.value.real
    assert real is not None
    with torch.enable_grad(), _torch.below_torch_function():
        x.value.becomes(_torch.apply_as_it_is(_Carry, x, real.detach()))
    x.adopted = function


class _Carry(torch.autograd.Function):
    """A real tensor at the place that a deferred one has in autograd's graph."""

    @staticmethod
    def forward(ctx: Any, deferred: Any, real: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        twin = _torch.lazy_twin(real)  # no view: it may be written to
        return twin if twin is not None else real.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, None


# --- what a function does with it -----------------------------------------------------------------------

_PROPERTIES = ("shape", "dtype", "device", "ndim", "layout", "is_cuda", "is_sparse", "is_quantized", "is_meta",
               "is_nested", "is_mkldnn", "is_mps", "is_xpu", "names", "is_sparse_csr", "itemsize", "nbytes",
               "is_vulkan", "is_mtia", "is_cpu", "is_xla", "is_ipu", "is_maia", "requires_grad", "is_leaf", "grad_fn",
               "output_nr", "_backward_hooks", "retains_grad")  # fmt: skip
_METHODS = (T.size, T.dim, T.stride, T.numel, T.nelement, T.is_contiguous, T.is_floating_point, T.is_complex,
            T.element_size, T.ndimension, T.storage_offset, T.get_device, T.is_signed, T.__len__, T.is_inference,
            torch.is_floating_point, torch.is_complex, torch.numel, T.is_conj, T.is_neg, torch.is_conj, torch.is_neg,
            torch.is_inference, T._is_view, T.is_same_size, T.__hash__, torch.is_same_size)  # fmt: skip
_DESCRIBES = {*_METHODS, *(getattr(T, name).__get__ for name in (*_PROPERTIES, "_version") if hasattr(T, name))}
_OF_REAL = {getattr(T, name).__get__ for name in ("requires_grad", "is_leaf", "grad_fn", "output_nr", "retains_grad")}
_GRAD, _VERSION = (getattr(T, name).__get__ for name in ("grad", "_version"))
_VIEWS_AS_PROPERTIES = {getattr(T, name).__get__ for name in ("T", "mT", "H", "mH", "real", "data")}
_PLACES = {T.register_hook, T.retain_grad, T.register_post_accumulate_grad_hook}
# Who calls these keeps nothing of the tensor's memory.
_LOOKS = {
    "item", "tolist", "__bool__", "__float__", "__int__", "__index__", "__complex__", "__repr__", "__str__",
    "__format__", "is_nonzero", "equal", "allclose", "__contains__",
}  # fmt: skip
# Only the description of their first argument is read.
_LIKE = {
    "zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "randint_like", "new_zeros",
    "new_ones", "new_full", "new_empty", "new_tensor", "new_empty_strided",
}  # fmt: skip
_SIGNS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift")
_OPERATORS = {
    "__getitem__", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__neg__", "__pos__", "__abs__",
    "__invert__", "__div__", "__rdiv__", *(f"__{s}__" for s in _SIGNS), *(f"__r{s}__" for s in _SIGNS),
}  # fmt: skip
_INTO = {
    "__iadd__": T.add, "__isub__": T.sub, "__imul__": T.mul, "__itruediv__": T.div, "__idiv__": T.div,
    "add_": T.add, "sub_": T.sub, "mul_": T.mul, "div_": T.div,
}  # fmt: skip
_DYNAMO = os.path.join("torch", "_dynamo", "eval_frame.py")
_MASKED = {T.__getitem__, T.masked_select, torch.masked_select}


def _called(func: Any, args: Any, kwargs: Any) -> Any:
    if func in _DESCRIBES:
        return _described(func, args, kwargs)
    if func is T.__getitem__:
        args = mapped(tuple(args), _as_index)
    if func is T.backward and kwargs.get("inputs") is None:
        return func(*map(real_of, args), **{k: real_of(x) for k, x in kwargs.items()})
    with LOCK:
        answer = _answer(func, args, kwargs)
    return _eager(func, args, kwargs) if answer is _NONE_YET else answer


_NONE_YET = object()


def _answer(func: Any, args: Any, kwargs: Any) -> Any:
    """The result, where the function is none that just runs on what is computed."""
    tensors = tensors_of(args) + (tensors_of(kwargs) if kwargs else [])
    waiting = False
    for x in tensors:
        if type(x) is Deferred:
            _adopt_foreign(x)
            waiting |= x.value.real is None
    if not waiting:
        return _NONE_YET
    name = getattr(func, "__name__", "")
    if func == _GRAD:
        return None
    if func in _PLACES or func is torch.autograd.grad or func is T.backward:
        _make_places(_asked(func, args, kwargs), name)
        return _NONE_YET
    if name in _LOOKS:
        return func(*mapped(tuple(args), _looked), **mapped(kwargs, _looked))
    if name == "__iter__":
        return iter(args[0].unbind(0))
    if name in _LIKE:
        return func(_description(args[0]), *mapped(args[1:], real_of), **mapped(kwargs, real_of))
    if name in _INTO and not kwargs and type(args[0]) is Deferred:
        done = _number_into(_INTO[name], args)
        if done is not None:
            return done
    if _may_record(func, name, kwargs):
        try:
            return _record(func, args, kwargs, tensors)
        except NotRecorded:
            pass
    return _NONE_YET


def _as_index(x: Any) -> Any:
    """Arrays of NumPy index as tensors do."""
    return torch.from_numpy(x) if type(x) is numpy.ndarray and x.dtype in (numpy.int64, numpy.bool_) else x


def _described(func: Any, args: Any, kwargs: Any) -> Any:
    x = args[0]
    if (
        type(x) is Deferred
        and x.value.real is not None
        and (func in _OF_REAL or func == _VERSION or func is T._is_view)
    ):
        args = (x.value.real, *args[1:])
    with _torch.below_torch_function():
        return func(*args, **kwargs)


def _looked(x: Any) -> Any:
    return look(x.value) if type(x) is Deferred else x


def _description(x: Deferred) -> torch.Tensor:
    """A tensor that looks like it; its memory is never touched."""
    meta = x.value.meta
    return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=meta.device)


def _eager(func: Any, args: Any, kwargs: Any) -> Any:
    """On what is computed, the function itself; not under the lock, for hooks of a backward may wait for threads."""
    deferred = [x for x in tensors_of((args, kwargs)) if type(x) is Deferred]
    waiting = [x.value for x in deferred if pending(x)]
    into = [x.value for x in tensors_of(kwargs.get("out", args[:1])) if pending(x)]
    if into and _writes(func, kwargs):
        for n in above(into):
            if n.model is not None:
                n.model.written()
    realize(waiting)
    given = {id(x.value.real): x for x in deferred}
    result = func(*mapped(tuple(args), real_of), **mapped(kwargs, real_of))
    return given.get(id(result), result) if isinstance(result, T) else result


def _writes(func: Any, kwargs: Any) -> bool:
    name = getattr(func, "__name__", "")
    return name == "__setitem__" or name in _INTO or "out" in kwargs or (name.endswith("_") and name[-2:] != "__")


def _asked(func: Any, args: Any, kwargs: Any) -> Any:
    """What somebody wants a place in autograd's graph of: it is computed, and what follows from it."""
    gradients = func is torch.autograd.grad or func is T.backward
    return kwargs.get("inputs", args[1] if len(args) > 1 else ()) if gradients else args[0]


def _make_places(asked: Any, name: str) -> None:
    places = [x.value for x in tensors_of(asked) if pending(x)]
    for value in places:
        if value.meta.requires_grad and any(n.passed for n in above([value]) if n.model is not None):
            raise RuntimeError(
                f"turbogr: {name} on an output of a compiled model after a loss of it was computed; do it before the "
                "loss is read, or compile with options={'deferral': False}"
            )
    place(places)


def placed_of(x: Any) -> Any:
    """Ordinary tensors for what somebody asks gradients of."""
    _make_places(x, "backward")
    return mapped(x, real_of)


def _number_into(func: Any, args: Any) -> Any:
    """`loss += x` on a number that shares memory with nothing else is an ordinary sum under the old name."""
    target = args[0]
    old = target.value
    if old.real is not None or old.meta.shape or old.alias is not None:
        return None
    if old.node.model is not None or any(v.alias is old for v in list(WAITING.values())):
        return None
    try:
        new = _record(func, args, {}, tensors_of(args))
    except NotRecorded:
        return None
    if new.value.meta.shape or new.value.meta.dtype != old.meta.dtype:
        return None
    value = new.value
    if value.meta.requires_grad:
        with torch.enable_grad(), _torch.below_torch_function():
            _torch.apply_as_it_is(_Rename, target, value.node.anchor, value)
    WAITING.pop(id(old), None)
    WAITING.pop(id(value), None)
    target.value = value
    value.stands(target, _link_of(target))
    return target


class _Rename(torch.autograd.Function):
    """The tensor stands for another value from now on, and has that one's place in autograd's graph."""

    @staticmethod
    def forward(ctx: Any, target: Any, anchor: torch.Tensor, value: Value) -> Any:
        ctx.value = value
        ctx.set_materialize_grads(False)
        ctx.mark_dirty(target)
        return target

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return None, Link.backward(ctx, grad)[0], None


# --- recording ------------------------------------------------------------------------------------------


class NotRecorded(Exception):
    """The function needs values."""


def _may_record(func: Any, name: str, kwargs: Any) -> bool:
    if name == "__get__":
        return func in _VIEWS_AS_PROPERTIES
    if name.startswith("__") and name.endswith("__"):
        return name in _OPERATORS
    if name.endswith("_") or "out" in kwargs or _torch.transforms_active():
        return False
    return not _torch.saved_tensors_are_hooked()


_KNOWN: dict[Any, Results | None] = {}


def _record(func: Any, args: Any, kwargs: Any, tensors: list[Any]) -> Any:
    modes = Modes()
    for x in tensors:
        if type(x) is Deferred:
            maker = x.value.maker
            if maker is not None and maker.modes.dtype is not modes.dtype:
                raise NotRecorded
        elif type(x) not in (T, torch.nn.Parameter) or x.layout is not torch.strided:
            raise NotRecorded
    counts = _counts(func, args)
    key: list[Any] = [func, modes.key, counts, len(args)]
    for a in args:
        _describe(a, key)
    if kwargs:
        _describe(kwargs, key)
    found = _results_of(tuple(key), func, args, kwargs, tensors, counts)
    if found.same >= 0:
        return tensors[found.same]
    node = Node(func, Kept(args, kwargs, kept_of), modes, line_of_user())
    node.kind = found
    made = []
    for i, meta in enumerate(found.metas):
        at = found.aliases[i]
        value = Value(node, found.places[i], meta, tensors[at].value if at >= 0 else None)
        node.values.append(value)
        made.append(tensor_for(value))
    return made[0] if found.kind is None else found.kind(made)


def _results_of(key: Any, func: Any, args: Any, kwargs: Any, tensors: list[Any], counts: tuple[int, ...]) -> Results:
    try:
        found = _KNOWN[key]
    except TypeError:  # an argument that has no hash
        raise NotRecorded from None
    except KeyError:
        if len(_KNOWN) > 20000:
            _KNOWN.clear()
        found = _KNOWN[key] = dry_run(func, args, kwargs, [_meta_of(x) for x in tensors], counts)
    if found is None or any(at >= 0 and not pending(tensors[at]) for at in found.aliases):
        raise NotRecorded  # a view of a tensor from outside is that, and nothing to wait for
    return found


def _meta_of(x: torch.Tensor) -> Meta:
    return x.value.meta if type(x) is Deferred and pending(x) else Meta.of(real_of(x))


def kept_of(x: torch.Tensor) -> Value | Source:
    if type(x) is Deferred:
        return x.value if x.value.real is None else Source(real_of(x))
    return Source(x)


def _describe(x: Any, key: list[Any]) -> None:
    """Everything that decides the types of the results."""
    kind = type(x)
    if kind in SCALARS:
        key += (kind, repr(x) if kind is float else x)
    elif kind is Deferred and x.value.real is None:
        key += (x.value.meta.key, True)
    elif isinstance(x, T):
        x = real_of(x)
        key += (tuple(x.shape), x.stride(), x.dtype, x.requires_grad, False)
    elif isinstance(x, (list, tuple)):
        key += (kind, len(x))
        for item in x:
            _describe(item, key)
    elif isinstance(x, dict):
        key.append(tuple(x))
        for item in x.values():
            _describe(item, key)
    elif isinstance(x, slice):
        key.append(slice)
        for item in (x.start, x.stop, x.step):
            _describe(item, key)
    else:
        key += (kind, x)


def _counts(func: Any, args: Any) -> tuple[int, ...]:
    """How many elements boolean masks pick: the one thing about their values that sizes depend on."""
    if func not in _MASKED:
        return ()
    masks = [x for x in tensors_of(args[1:]) if x.dtype in (torch.bool, torch.uint8)]
    counts = [int((look(m.value) if type(m) is Deferred else m).count_nonzero()) for m in masks]
    if func is not T.__getitem__ and len(masks) == 1 and len(args) == 2:  # a mask of rows picks all of their elements
        counts[0] *= _times_repeated(masks[0].shape, args[0].shape)
    return tuple(counts)


def _times_repeated(mask: Sequence[int], shape: Sequence[int]) -> int:
    """How many elements of the shape each one of the mask stands for; 0 where only the mask is repeated, or neither."""
    before = len(shape) - len(mask)
    if before < 0 or any(m not in (1, n) for m, n in zip(mask, shape[before:], strict=True)):
        return 0
    return math.prod(shape) // max(math.prod(mask), 1)


def line_of_user(after_dynamo: bool = False) -> Any:
    """Code and line that called us; with `after_dynamo`, that called the compiled function we were called by."""
    frame: FrameType | None = sys._getframe(2)
    first = None
    while frame is not None:
        file = frame.f_code.co_filename
        if after_dynamo and first is not None and file.endswith(_DYNAMO):
            after_dynamo = False
        elif not is_library(file):
            first = first or (frame.f_code, frame.f_lineno)
            if not after_dynamo:
                return frame.f_code, frame.f_lineno
        frame = frame.f_back
    return first
