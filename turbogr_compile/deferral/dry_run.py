"""What a function would return, found out by running it on tensors without data.

It may be recorded if it writes to nothing, draws nothing, and says the sizes of its results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .. import _torch
from ..check.validate import drops_nothing
from .record import Meta

T = torch.Tensor


class Results:
    """Types of the results of a call.

    `kind` makes the container they come in, None for a single tensor, and `places` says where in it they are; `aliases`
    says for each which argument it is a view of, or -1; `same` is the argument that is returned as it is, or -1.
    """

    __slots__ = ("aliases", "kind", "metas", "places", "same")

    def __init__(
        self, kind: Any, metas: list[Meta], aliases: list[int], same: int, places: Sequence[int] = (-1,)
    ) -> None:
        self.kind, self.metas, self.aliases, self.same, self.places = kind, metas, aliases, same, places


class _Unfit(Exception):
    """Seen while running on tensors without data."""


@torch.compiler.disable
def dry_run(func: Any, args: Any, kwargs: Any, metas: Sequence[Meta], counts: tuple[int, ...]) -> Results | None:
    """Run the function on tensors without data; None where it cannot be recorded.

    `metas`: what is known of the tensors among its arguments; `counts`: how many elements boolean masks pick.
    """
    with _torch.without_modes(), _torch.outside_compilation():
        mode = _torch.new_fake_mode()
        fakes: list[Any] = []
        left, known = list(counts), iter(metas)

        def fake(x: Any) -> Any:
            if not isinstance(x, T):
                return x
            meta = next(known)
            made = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=meta.device)
            fakes.append(made.requires_grad_(meta.requires_grad))
            if len(fakes) > 1 and left and meta.dtype in (torch.bool, torch.uint8):
                count = left.pop(0)
                return _Indices(torch.empty(count, dtype=torch.long) for _ in meta.shape)
            return made

        try:
            with mode, torch.enable_grad():
                given = mapped(args, fake)
                named = mapped(kwargs, fake)
            if counts and func is not T.__getitem__:
                return _picked(fakes, counts[0]) if len(counts) == 1 else None
            if counts:
                given = (given[0], _spread(given[1]), *given[2:])
            inputs = {_torch.StorageWeakRef(f.untyped_storage()): i for i, f in enumerate(fakes)}
            with mode, _torch.watching_ops(lambda op, a, k: _fit(op, a, k, inputs)):
                result = func(*given, **named)
        except Exception:
            return None
        return _read(result, fakes, inputs)


class _Indices(tuple):
    """What a boolean mask stands for among indices."""

    __slots__ = ()


def _spread(index: Any) -> Any:
    items = list(index) if isinstance(index, tuple) and not isinstance(index, _Indices) else [index]
    return tuple(j for i in items for j in (i if isinstance(i, _Indices) else (i,)))


def _picked(fakes: list[Any], count: int) -> Results | None:
    if len(fakes) != 2:
        return None
    source, mask = fakes
    if mask.dtype is not torch.bool or torch.broadcast_shapes(source.shape, mask.shape) != source.shape:
        return None  # where the mask is what is repeated, elements come more than once
    grad = source.requires_grad and torch.is_grad_enabled()
    return Results(None, [Meta((count,), (1,), source.dtype, source.device, grad)], [-1], -1)


def mapped(x: Any, fn: Callable[[Any], Any]) -> Any:
    if isinstance(x, list):
        return [mapped(i, fn) for i in x]
    if isinstance(x, tuple):
        return tuple(mapped(i, fn) for i in x)
    if isinstance(x, dict):
        return {k: mapped(v, fn) for k, v in x.items()}
    if isinstance(x, slice):
        return slice(mapped(x.start, fn), mapped(x.stop, fn), mapped(x.step, fn))
    return fn(x)


def _fit(op: Any, args: Any, kwargs: Any, inputs: Any) -> None:
    schema = op._schema
    if op.namespace in ("c10d", "_c10d_functional", "c10d_functional"):
        raise _Unfit
    if torch.Tag.nondeterministic_seeded in op.tags and not drops_nothing(op, args, kwargs):
        raise _Unfit
    if not schema.is_mutable:
        return
    given = dict(zip((a.name for a in schema.arguments), args, strict=False)) | kwargs
    for a in schema.arguments:
        if a.alias_info is not None and a.alias_info.is_write:
            for x in pytree.tree_leaves(given.get(a.name)):
                if isinstance(x, T) and _torch.StorageWeakRef(x.untyped_storage()) in inputs:
                    raise _Unfit


def _read(result: Any, fakes: list[Any], inputs: Any) -> Results | None:
    if isinstance(result, T):
        for i, f in enumerate(fakes):
            if result is f:
                return Results(None, [], [], i)
        flat, kind, places = [result], None, [-1]
    elif isinstance(result, (tuple, list)) and any(isinstance(t, T) for t in result):
        places = [i for i, t in enumerate(result) if t is not None]
        flat, kind = [result[i] for i in places], _kind_of(result, places)
        if not all(isinstance(t, T) for t in flat):
            return None
    else:
        return None
    aliases = []
    memory = []
    for t in flat:
        if any(t is f for f in fakes) or any(type(s) is not int for s in (*t.shape, *t.stride())):
            return None
        own = _torch.StorageWeakRef(t.untyped_storage())
        at = inputs.get(own, -1)
        if at < 0 and own in memory:
            return None  # results that share memory among themselves
        memory.append(own)
        aliases.append(at)
    return Results(kind, [Meta.of(t) for t in flat], aliases, -1, places)


def _kind_of(result: Any, places: Sequence[int]) -> Callable[[Any], Any]:
    kind, length = type(result), len(result)
    make = kind if kind in (tuple, list) else lambda items: kind(tuple(items))  # torch.return_types.topk
    if len(places) == length:
        return make

    def with_nones(items: Any) -> Any:
        """Such as weights of an attention that nobody asked for."""
        given = dict(zip(places, items, strict=True))
        return make([given.get(i) for i in range(length)])

    return with_nones
