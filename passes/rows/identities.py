"""Ops as other ops, where that shows that rows stay apart: what is written, beside what it is written into.

`scatter_add(x, i, y)` is `x + scatter_add(nothing, i, y)`, and `index_put(x, i, y)` has elements of
`index_put(nothing, i, y)` where something was written and those of x elsewhere: each element of x meets itself only,
wherever i points. What is written is made by the op itself, so that torch decides which of two writes counts and where
its gradient goes.

An identity holds for the value and for the gradient of every operand, up to the order of sums; an operand that has no
influence keeps its gradient of zeros. Ops of which that is not so have none: maxima split a gradient among equals.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...graph.shapes import known
from ...kernels.declare import accumulator

aten = torch.ops.aten
Tensor = torch.Tensor
Identity = Callable[..., Any]
_IDENTITIES: dict[Any, Identity] = {}
_ALONG: dict[Any, Identity] = {}  # for a dim of columns: rows move, none is lost


def identity_of(target: Any, along_columns: bool) -> Identity | None:
    """The same function of the same arguments; called, it may say that it does not know (NotImplemented)."""
    return (_ALONG.get(target) if along_columns else None) or _IDENTITIES.get(target)


def has_identity(target: Any) -> bool:
    return target in _IDENTITIES


def _is(*targets: Any) -> Callable[[Identity], Identity]:
    def register(fn: Identity) -> Identity:
        _IDENTITIES.update(dict.fromkeys(targets, fn))
        return fn

    return register


def _nothing(x: Tensor) -> Tensor:
    """What added to leaves everything as it is: minus zero, for -0 + 0 is 0."""
    zeros = torch.zeros_like(x)
    return -zeros if x.is_floating_point() or x.is_complex() else zeros


def _nowhere(x: Tensor) -> Tensor:
    return torch.zeros_like(x, dtype=torch.bool)


def _yes(source: Tensor) -> Tensor:
    return torch.ones_like(source, dtype=torch.bool)


def _wide(*given: Any) -> list[Any]:
    """As one op computes inside: several would round, or overflow, after each step."""
    return [t if t is None or accumulator(t.dtype) == t.dtype else t.to(accumulator(t.dtype)) for t in given]


def _added_to(x: Tensor, source: Tensor, added: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """A half type may lack what comes together before it meets x."""
    wide, source = _wide(x, source)
    return (wide + added(_nothing(wide), source)).to(x.dtype)


# --- added to --------------------------------------------------------------------------------------


@_is(aten.scatter_add.default)
def _scatter_add(x: Tensor, dim: int, index: Tensor, src: Tensor) -> Tensor:
    return _added_to(x, src, lambda zeros, each: torch.scatter_add(zeros, dim, index, each))


@_is(aten.index_add.default)
def _index_add(x: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: Any = 1) -> Tensor:
    return _added_to(x, source, lambda zeros, each: torch.index_add(zeros, dim, index, each, alpha=alpha))


@_is(aten._unsafe_masked_index_put_accumulate.default)
def _masked_index_add(x: Tensor, mask: Tensor, indices: Any, values: Tensor) -> Tensor:
    add = aten._unsafe_masked_index_put_accumulate.default
    return _added_to(x, values, lambda zeros, each: add(zeros, mask, indices, each))


# What a reduction makes of an element and of what was reduced, where neither has a gradient; of truth values, any.
_BOTH: dict[bool, dict[str, Identity]] = {
    False: {"amax": torch.maximum, "amin": torch.minimum},
    True: {"sum": torch.logical_or, "amax": torch.logical_or, "prod": torch.logical_and, "amin": torch.logical_and},
}


@_is(aten.scatter_reduce.two)
def _scatter_reduce(x: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, *, include_self: bool = True) -> Any:
    if x.is_floating_point() and reduce in ("amax", "amin"):
        return NotImplemented
    both = _BOTH[x.dtype == torch.bool].get(reduce) if include_self else None
    if both is not None or not include_self:
        hit = torch.scatter(_nowhere(x), dim, index, True)
        written = torch.scatter_reduce(_nothing(x), dim, index, src, reduce, include_self=False)
        return torch.where(hit, written if both is None else both(x, written), x)
    wide, more = _wide(x, src)
    if reduce == "prod":
        return (wide * torch.scatter_reduce(torch.ones_like(wide), dim, index, more, "prod")).to(x.dtype)
    total = wide + torch.scatter_add(_nothing(wide), dim, index, more)
    if reduce == "sum":
        return total.to(x.dtype)
    count = torch.scatter_add(torch.ones_like(wide), dim, index, torch.ones_like(more))
    if x.is_floating_point():
        return (total / count).to(x.dtype)
    return torch.div(total, count, rounding_mode="floor")


# --- written over ----------------------------------------------------------------------------------


@_is(aten.scatter.src)
def _scatter(x: Tensor, dim: int, index: Tensor, src: Tensor) -> Tensor:
    return torch.where(torch.scatter(_nowhere(x), dim, index, True), torch.scatter(_nothing(x), dim, index, src), x)


@_is(aten.scatter.value)
def _scatter_value(x: Tensor, dim: int, index: Tensor, value: Any) -> Tensor:
    return torch.where(torch.scatter(_nowhere(x), dim, index, True), torch.scatter(_nothing(x), dim, index, value), x)


@_is(aten.index_copy.default)
def _index_copy(x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    hit = torch.index_copy(_nowhere(x), dim, index, _yes(source))
    return torch.where(hit, torch.index_copy(_nothing(x), dim, index, source), x)


@_is(aten.index_put.default)
def _index_put(x: Tensor, indices: Any, values: Tensor, accumulate: bool = False) -> Tensor:
    if accumulate:
        return _added_to(x, values, lambda zeros, each: aten.index_put.default(zeros, indices, each, True))
    hit = aten.index_put.default(_nowhere(x), indices, torch.ones((), dtype=torch.bool, device=x.device))
    return torch.where(hit, aten.index_put.default(_nothing(x), indices, values), x)


@_is(aten.put.default)
def _put(x: Tensor, index: Tensor, source: Tensor, accumulate: bool = False) -> Tensor:
    if accumulate:
        return _added_to(x, source, lambda zeros, each: torch.put(zeros, index, each, True))
    return torch.where(torch.put(_nowhere(x), index, _yes(source)), torch.put(_nothing(x), index, source), x)


@_is(aten.masked_scatter.default)
def _masked_scatter(x: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    return torch.where(mask, torch.masked_scatter(_nothing(x), mask, source), x)


@_is(aten.diagonal_scatter.default)
def _diagonal_scatter(x: Tensor, src: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    hit = torch.diagonal_scatter(_nowhere(x), _yes(src), offset, dim1, dim2)
    return torch.where(hit, torch.diagonal_scatter(_nothing(x), src, offset, dim1, dim2), x)


@_is(aten.select_scatter.default)
def _select_scatter(x: Tensor, src: Tensor, dim: int, index: int) -> Tensor:
    hit = torch.select_scatter(_nowhere(x), _yes(src), dim, index)
    return torch.where(hit, torch.select_scatter(_nothing(x), src, dim, index), x)


@_is(aten.slice_scatter.default)
def _slice_scatter(x: Tensor, src: Tensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Tensor:
    if _is_whole(x, dim, start, end, step):
        return torch.where(_yes(x), src, x)  # the gradient of x is zero, not none
    hit = torch.slice_scatter(_nowhere(x), _yes(src), dim, start, end, step)
    return torch.where(hit, torch.slice_scatter(_nothing(x), src, dim, start, end, step), x)


@_is(aten.index_fill.int_Scalar)
def _index_fill(x: Tensor, dim: int, index: Tensor, value: Any) -> Tensor:
    hit = torch.index_fill(_nowhere(x), dim, index, True)
    return torch.where(hit, torch.index_fill(_nothing(x), dim, index, value), x)


@_is(aten.tril.default)
def _tril(x: Tensor, diagonal: int = 0) -> Tensor:
    return torch.where(torch.tril(_yes(x), diagonal), x, torch.zeros_like(x))


@_is(aten.triu.default)
def _triu(x: Tensor, diagonal: int = 0) -> Tensor:
    return torch.where(torch.triu(_yes(x), diagonal), x, torch.zeros_like(x))


# --- written along columns: pieces one after the other -----------------------------------------------


def _between(x: Tensor, src: Tensor, dim: int, start: int, end: int | None) -> Tensor:
    """x with what is between start and end replaced."""
    if not start and end is None:
        return torch.where(_yes(x), src, x)  # the gradient of x is zero, not none
    after = [] if end is None else [aten.slice.Tensor(x, dim, end)]
    return torch.cat([*([aten.slice.Tensor(x, dim, 0, start)] if start else []), src, *after], dim)


def _select_scatter_along(x: Tensor, src: Tensor, dim: int, index: int) -> Any:
    if index < 0 and not isinstance(x.shape[dim], int):
        return NotImplemented
    index = index + x.shape[dim] if index < 0 else index
    last = isinstance(x.shape[dim], int) and index == x.shape[dim] - 1
    return _between(x, src.unsqueeze(dim), dim, index, None if last else index + 1)


def _slice_scatter_along(
    x: Tensor, src: Tensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Any:
    start = 0 if start is None else start
    if step != 1 or not isinstance(start, int) or start < 0 or not (end is None or isinstance(end, int)):
        return NotImplemented
    size = x.shape[dim]
    if end is not None and isinstance(size, int):
        end = None if end >= size else end
    if (end is not None and end <= start) or (isinstance(size, int) and start >= size):
        return NotImplemented
    # A dim of unknown size may be shorter than the end, and the source would be shorter, too.
    return _between(x, src, dim, start, end) if end is None or isinstance(size, int) else NotImplemented


def _is_whole(x: Tensor, dim: int, start: Any, end: Any, step: int) -> bool:
    size = x.shape[dim]
    return step == 1 and start in (None, 0) and (end is None or (isinstance(size, int) and end >= size))


_ALONG[aten.select_scatter.default] = _select_scatter_along
_ALONG[aten.slice_scatter.default] = _slice_scatter_along


# --- products added to something --------------------------------------------------------------------


def _added(x: Tensor, left: Tensor, right: Tensor, of: Identity, beta: Any, alpha: Any) -> Any:
    if x.dtype == torch.bool or beta == 0:  # the gradient of x is zero then, not none
        return NotImplemented
    wide, left, right = _wide(x, left, right)  # a half type may lack the product, where it has the sum
    product = of(left, right) if alpha == 1 else alpha * of(left, right)
    return ((wide if beta == 1 else beta * wide) + product).to(x.dtype)


@_is(aten.addr.default)
def _addr(x: Tensor, vec1: Tensor, vec2: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Any:
    return _added(x, vec1.unsqueeze(-1), vec2, torch.mul, beta, alpha)


@_is(aten.addmv.default)
def _addmv(x: Tensor, mat: Tensor, vec: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Any:
    return _added(x, mat, vec, torch.matmul, beta, alpha)


@_is(aten.addmm.default)
def _addmm(x: Tensor, mat1: Tensor, mat2: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Any:
    return _added(x, mat1, mat2, torch.mm, beta, alpha)


@_is(aten.baddbmm.default)
def _baddbmm(x: Tensor, batch1: Tensor, batch2: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Any:
    return _added(x, batch1, batch2, torch.bmm, beta, alpha)


@_is(aten.addbmm.default)
def _addbmm(x: Tensor, batch1: Tensor, batch2: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Any:
    return _added(x, batch1, batch2, lambda p, q: torch.bmm(p, q).sum(0), beta, alpha)


# --- losses that are reduced --------------------------------------------------------------------------


def _each_then_all(loss: Any) -> Identity:
    """The loss of each element, then their sum or mean."""
    names = [argument.name for argument in loss._schema.arguments]

    def parts(*args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        reduction = given.get("reduction", MEAN)
        if reduction not in (MEAN, SUM):
            return NotImplemented
        for name in ("weight", "pos_weight"):
            if given.get(name) is not None:
                given[name] = given[name].detach()  # no loss has a gradient for it
        each = loss(**{**given, "reduction": NO_REDUCTION})
        return each.mean() if reduction == MEAN else each.sum()

    return parts


NO_REDUCTION, MEAN, SUM = range(3)
for _loss in (
    aten.binary_cross_entropy, aten.binary_cross_entropy_with_logits, aten.mse_loss, aten.l1_loss, aten.smooth_l1_loss,
    aten.huber_loss, aten.kl_div,
):  # fmt: skip
    _is(_loss.default)(_each_then_all(_loss.default))


# --- the same elements elsewhere ---------------------------------------------------------------------


@_is(aten.resize_as.default)
def _resize_as(x: Tensor, the_template: Tensor, *, memory_format: Any = None) -> Any:
    """Of the size that it has, it is a copy; torch has no gradient for it."""
    same = x.dim() == the_template.dim() and all(
        known(a == b) for a, b in zip(x.shape, the_template.shape, strict=True)
    )
    return x.clone() if same and not x.is_floating_point() and memory_format is None else NotImplemented


@_is(aten.rot90.default)
def _rot90(x: Tensor, k: int = 1, dims: Any = (0, 1)) -> Tensor:
    first, second = dims
    turns = k % 4
    if turns == 2:
        return x.flip([first, second])
    if turns == 0:
        return x.clone()
    return x.flip([second if turns == 1 else first]).transpose(first, second)


@_is(aten.pixel_shuffle.default)
def _pixel_shuffle(x: Tensor, upscale_factor: int) -> Tensor:
    *outer, channels, height, width = x.shape
    r, n = upscale_factor, x.dim() - 3
    parts = x.reshape([*outer, channels // (r * r), r, r, height, width])
    order = [*range(n), n, n + 3, n + 1, n + 4, n + 2]
    return parts.permute(order).reshape([*outer, channels // (r * r), height * r, width * r])


@_is(aten.pixel_unshuffle.default)
def _pixel_unshuffle(x: Tensor, downscale_factor: int) -> Tensor:
    *outer, channels, height, width = x.shape
    r, n = downscale_factor, x.dim() - 3
    parts = x.reshape([*outer, channels, height // r, r, width // r, r])
    order = [*range(n), n, n + 2, n + 4, n + 1, n + 3]
    return parts.permute(order).reshape([*outer, channels * r * r, height // r, width // r])


@_is(aten.channel_shuffle.default)
def _channel_shuffle(x: Tensor, groups: int) -> Tensor:
    batch, channels, *rest = x.shape
    return x.reshape([batch, groups, channels // groups, *rest]).transpose(1, 2).reshape(x.shape)


# --- statistics that are given -----------------------------------------------------------------------


@_is(aten._native_batch_norm_legit_no_training.default)
def _batch_norm(x: Tensor, weight: Any, bias: Any, mean: Tensor, var: Tensor, momentum: float, eps: float) -> Any:
    """In evaluation each channel has one scale and one shift."""
    given = [t for t in (weight, bias, mean, var) if t is not None]
    if any(t.dtype != x.dtype for t in given) or x.dim() < 2 or _wide(x)[0] is not x:  # it rounds where it likes
        return NotImplemented
    each = [x.shape[1], *[1] * (x.dim() - 2)]
    scale = torch.rsqrt(var.detach() + eps)
    y = (x - mean.detach().reshape(each)) * scale.reshape(each)
    y = y if weight is None else y * weight.reshape(each)
    return (y if bias is None else y + bias.reshape(each)), mean, scale


@_is(aten.batch_norm.default)
def _batch_norm_layer(
    x: Tensor, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float, cudnn: bool
) -> Any:
    if training or mean is None or var is None:
        return NotImplemented
    found = _batch_norm(x, weight, bias, mean, var, momentum, eps)
    return found if found is NotImplemented else found[0]


@_is(aten.instance_norm.default)
def _instance_norm(
    x: Tensor, weight: Any, bias: Any, mean: Any, var: Any, use_input_stats: bool, momentum: float, eps: float, _: bool
) -> Any:
    if not use_input_stats:
        return _batch_norm_layer(x, weight, bias, mean, var, False, momentum, eps, False)
    given = [t for t in (weight, bias) if t is not None]
    if mean is not None or var is not None or any(t.dtype != x.dtype for t in given) or x.dim() < 3:
        return NotImplemented
    dtype, (x, weight, bias) = x.dtype, _wide(x, weight, bias)
    over, each = list(range(2, x.dim())), [x.shape[1], *[1] * (x.dim() - 2)]
    centred = x - x.mean(over, keepdim=True)
    y = centred * torch.rsqrt(centred.square().mean(over, keepdim=True) + eps)
    y = y if weight is None else y * weight.reshape(each)
    y = y if bias is None else y + bias.reshape(each)
    return y if y.dtype == dtype else y.to(dtype)
