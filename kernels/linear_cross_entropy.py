"""Cross-entropy of logits that exist only in tiles: loss of scale · x @ weight.T + bias without a (T, V) tensor.

    logits[t, v] = scale · <x[t], weight[v]> + bias[v]
    log_sum[t]   = log of the sum over v of exp(logits[t, v])
    loss[t]      = log_sum[t] - (1 - smoothing) · logits[t, target[t]] - smoothing · mean over v of logits[t, v]

Rows whose target is `ignore_index` have loss 0 and gradient 0, and are not looked at. Each tile of logits is a matrix
product into a buffer, read while it is in cache. Tiles depend on sizes alone: the number of threads changes no sum of
this file; the products are those of torch.

There are two ways to a gradient. `linear_cross_entropy` gives the loss of each row, and what the gradient of each will
be is not known; the backward computes logits anew, a fourth product beside the three of eager. Where losses are only
added up (`linear_cross_entropy_total`: a sum, with a share of each row or without, or a mean), gradients are known but
for one factor. They are computed along with the loss, from the same logits, and multiplied in the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .contract import INT64, REAL, Array, As, Contract, Flags, Number, Range, Rule
from .cpu import linear_cross_entropy as cpu
from .declare import accumulator, as_given, compose, declare, require

ops = torch.ops.turbogr

# Tiles, found by measuring. Products of fewer rows or columns than these fall far behind the machine's peak.
TILE = 1024
# Tiles of whole rows, where gradients follow from the same logits: about so many of those, and so many rows at least.
# With more classes than MOST_CLASSES they would outgrow every cache; then two sweeps over square tiles are faster.
WHOLE, LEAST_ROWS, MOST_CLASSES = 1 << 22, 128, 1 << 16


class Rows(NamedTuple):
    """What is known of some rows; each tile adds to it."""

    target: Tensor
    sum: Tensor  # of exp(logit - top) so far
    total: Tensor  # of all logits so far, where labels are smoothed
    top: Tensor  # largest logit so far
    picked: Tensor  # logit of the target
    log_sum: Tensor
    loss: Tensor
    grad: Tensor  # of the loss

    def part(self, first: int, last: int) -> Rows:
        return Rows(*(x[first:last] for x in self))


class Step(NamedTuple):
    """What to do with a tile of logits."""

    first: int  # class of its first column
    classes: int  # of all tiles
    measure: bool  # look at it; the last tile of a row sets log_sum and loss
    slopes: bool  # overwrite it with the gradient
    smoothing: float


Tile = Callable[[Tensor, "Tensor | None", Rows, Step], None]


def tile(logits: Tensor, bias: Tensor | None, rows: Rows, step: Step) -> None:
    """Measure logits, replace them by their gradient, or both. They come without the bias."""
    if bias is not None:
        logits += bias
    column = rows.target - step.first
    inside = (column >= 0) & (column < logits.shape[1])
    place = column.clamp(0, logits.shape[1] - 1)[:, None]
    if step.measure:
        _measure(logits, rows, step)
        rows.picked.copy_(torch.where(inside, logits.gather(1, place)[:, 0], rows.picked))
        if step.first + logits.shape[1] == step.classes:
            _finish(rows, step)
    if step.slopes:
        logits.sub_(rows.log_sum[:, None]).exp_().sub_(step.smoothing / step.classes).mul_(rows.grad[:, None])
        logits.scatter_add_(1, place, (rows.grad * inside)[:, None] * (step.smoothing - 1))


def _measure(logits: Tensor, rows: Rows, step: Step) -> None:
    if step.first == 0:
        rows.top.fill_(-torch.inf)
        rows.sum.zero_()
        rows.total.zero_()
    top = torch.maximum(rows.top, logits.amax(1))
    shift = top.masked_fill(top == -torch.inf, 0.0)
    carried = torch.where(rows.sum == 0, 0.0, rows.sum * (rows.top - top).exp())
    rows.sum.copy_(carried + (logits - shift[:, None]).exp().sum(1))
    rows.top.copy_(top)
    if step.smoothing:
        rows.total.add_(logits.sum(1))


def _finish(rows: Rows, step: Step) -> None:
    log_sum = rows.top + rows.sum.log()
    rows.log_sum.copy_(log_sum)
    smoothed = step.smoothing * (rows.total / step.classes) if step.smoothing else 0.0
    rows.loss.copy_(log_sum - (1.0 - step.smoothing) * rows.picked.double() - smoothed)


# --- rows that count, tile by tile -------------------------------------------------------------------


def _cuts(count: int, most: int) -> Iterator[tuple[int, int]]:
    """Parts of nearly equal size, none larger than `most`, which is a multiple of 16."""
    if count > 0:
        parts = -(-count // most)
        size = -(-count // (16 * parts)) * 16
        yield from ((first, min(first + size, count)) for first in range(0, count, size))


@dataclass
class Gradients:
    """Sums of gradients; None where nobody asks."""

    x: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


class Problem:
    """The arguments of an op, less the rows that are ignored."""

    def __init__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, scale: float, ignore_index: int,
        smoothing: float, run: Tile,
    ) -> None:  # fmt: skip
        self.x, self.weight, self.scale, self.smoothing, self.run = x, weight, scale, smoothing, run
        self.real = accumulator(x.dtype)
        self.bias = None if bias is None else bias.to(self.real).contiguous()
        self.classes = weight.shape[0]
        self.kept = self._kept(target, ignore_index)
        self.target = self.only_kept(target).contiguous()
        self.count = self.target.shape[0]

    def _kept(self, target: Tensor, ignored: int) -> Tensor | None:
        """Rows that count, None for all of them."""
        counts = target != ignored
        return None if bool(counts.all()) else counts.nonzero()[:, 0]

    def only_kept(self, x: Tensor) -> Tensor:
        return x if self.kept is None else x.index_select(0, self.kept)

    def among_ignored(self, x: Tensor) -> Tensor:
        """Rows back at their place, zero at ignored ones."""
        if self.kept is None:
            return x
        return x.new_zeros((self.x.shape[0], *x.shape[1:])).index_copy_(0, self.kept, x)

    def rows(self, grad: Tensor | None = None, log_sum: Tensor | None = None) -> Rows:
        """Nothing is known of them yet but what is given."""
        summed, total = self.x.new_empty((2, self.count), dtype=torch.float64)
        top, picked = self.x.new_empty((2, self.count), dtype=self.real)
        # These may be results of an op, which do not share memory.
        log_sum = torch.empty_like(top) if log_sum is None else log_sum
        grad = top if grad is None else grad  # not read
        return Rows(self.target, summed, total, top, picked, log_sum, torch.empty_like(top), grad)

    def sizes(self, whole: bool = False) -> tuple[int, int]:
        """Rows and columns of a tile at most, multiples of 16."""
        if whole and self.classes <= MOST_CLASSES:
            return max(LEAST_ROWS, WHOLE // self.classes // 16 * 16), MOST_CLASSES
        rows = min(TILE, 16 * max(-(-self.count // 16), 1))
        return rows, TILE * TILE // rows // 16 * 16

    def measure(self, rows: Rows) -> None:
        """log_sum and loss of rows."""
        height, width = self.sizes()
        buffer = self._buffer(height, width)
        for first, last in _cuts(self.count, height):
            self._measure(self._inputs(first, last), rows.part(first, last), width, buffer)

    def add_gradients(self, rows: Rows, into: Gradients, measure: bool) -> None:
        """Gradients of rows whose log_sum is known, or is to be measured on the way."""
        height, width = self.sizes(whole=measure)
        buffer = self._buffer(height, width)
        in_one_go = measure and width >= self.classes
        if in_one_go:
            self.weight = self._classes(0, self.classes)  # converted once
        for first, last in _cuts(self.count, height):
            x, part = self._inputs(first, last), rows.part(first, last)
            if measure and not in_one_go:
                self._measure(x, part, width, buffer)
            own = None if into.x is None else into.x[first:last]
            for start, end in _cuts(self.classes, width):
                weight = self._classes(start, end)
                slopes = self._tile(x, weight, part, start, buffer, measure=in_one_go, slopes=True)
                if own is not None:
                    own.addmm_(slopes, weight, alpha=self.scale)
                if into.weight is not None:
                    into.weight[start:end].addmm_(slopes.t(), x, alpha=self.scale)
                if into.bias is not None:
                    into.bias[start:end] += slopes.sum(0)

    def _measure(self, x: Tensor, rows: Rows, width: int, buffer: Tensor) -> None:
        for start, end in _cuts(self.classes, width):
            self._tile(x, self._classes(start, end), rows, start, buffer, measure=True, slopes=False)

    def _tile(
        self, x: Tensor, weight: Tensor, rows: Rows, first: int, buffer: Tensor, measure: bool, slopes: bool
    ) -> Tensor:
        size = x.shape[0], weight.shape[0]
        logits = buffer[: size[0] * size[1]].view(size)
        logits.addmm_(x, weight.t(), beta=0, alpha=self.scale)
        bias = None if self.bias is None else self.bias[first : first + size[1]]
        self.run(logits, bias, rows, Step(first, self.classes, measure, slopes, self.smoothing))
        return logits

    def _inputs(self, first: int, last: int) -> Tensor:
        x = self.x[first:last] if self.kept is None else self.x.index_select(0, self.kept[first:last])
        return x.to(self.real)

    def _classes(self, start: int, end: int) -> Tensor:
        return self.weight[start:end].to(self.real)

    def _buffer(self, height: int, width: int) -> Tensor:
        return self.x.new_empty((min(height, self.count) * min(width, self.classes),), dtype=self.real)

    def gradients(self, wanted: list[bool]) -> Gradients:
        def zeros(*size: int) -> Tensor:
            return self.x.new_zeros(size, dtype=self.real)

        x, weight, bias = wanted
        return Gradients(
            zeros(self.count, self.x.shape[1]) if x else None,
            zeros(*self.weight.shape) if weight else None,
            zeros(self.classes) if bias and self.bias is not None else None,
        )

    def results(self, into: Gradients, dtype: torch.dtype) -> tuple[Tensor, ...]:
        x = None if into.x is None else self.among_ignored(into.x)
        # Results of an op share no memory, not even none.
        return tuple(
            self.x.new_empty(0, dtype=dtype) if g is None else g.to(dtype) for g in (x, into.weight, into.bias)
        )


# --- the loss of each row ----------------------------------------------------------------------------

_TENSORS = "Tensor x, Tensor weight, Tensor? bias, Tensor target"
_ATTRIBUTES = "float scale, int ignore_index, float label_smoothing"


def loss(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, scale: float, ignore_index: int,
    label_smoothing: float, run: Tile = tile,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Loss and log_sum of each row; float32 where the inputs are of 16 bits."""
    with as_given(x):
        problem = Problem(x, weight, bias, target, scale, ignore_index, label_smoothing, run)
        rows = problem.rows()
        problem.measure(rows)
        return problem.among_ignored(rows.loss), problem.among_ignored(rows.log_sum)


def loss_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, log_sum: Tensor, scale: float,
    ignore_index: int, label_smoothing: float, wanted: list[bool], run: Tile = tile,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients of x, weight and bias, from that of each row's loss; empty where not wanted."""
    with as_given(x):
        problem = Problem(x, weight, bias, target, scale, ignore_index, label_smoothing, run)
        kept = [problem.only_kept(t).to(problem.real).contiguous() for t in (grad, log_sum)]
        into = problem.gradients(wanted)
        problem.add_gradients(problem.rows(*kept), into, measure=False)
        return problem.results(into, x.dtype)


def _fake(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    loss, log_sum = (x.new_empty((x.shape[0],), dtype=accumulator(x.dtype)) for _ in range(2))
    return loss, log_sum


def _backward_fake(grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    return _gradients_fake(x, weight, bias, rest[-1], x.dtype)


def _gradients_fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, wanted: list[bool], dtype: torch.dtype
) -> tuple[Tensor, ...]:
    pairs = zip((x, weight, bias), wanted, strict=True)
    return tuple(x.new_empty(t.shape if want and t is not None else (0,), dtype=dtype) for t, want in pairs)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.attributes = inputs[4:]
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*inputs[:4], output[1])


def _backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
    wanted = list(ctx.needs_input_grad[:3])
    found = ops.linear_cross_entropy_backward(grad, *ctx.saved_tensors, *ctx.attributes, wanted)
    return (*(g if want else None for g, want in zip(found, wanted, strict=True)), *[None] * 4)


# --- losses added up: gradients along with the loss --------------------------------------------------


def total(*arguments: Any) -> Tensor:
    """Sum of the losses, times `share` where given, or their mean; gradients come along where somebody may ask."""
    training = torch.is_grad_enabled()
    wanted = [training and t is not None and t.requires_grad for t in arguments[:3]]
    return ops.linear_cross_entropy_ahead(*arguments, wanted)[0]


def ahead(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, share: Tensor | None, scale: float,
    ignore_index: int, label_smoothing: float, mean: bool, wanted: list[bool], run: Tile = tile,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Total, losses of rows, and gradients of the total; in float32 where the inputs are of 16 bits."""
    with as_given(x):
        problem = Problem(x, weight, bias, target, scale, ignore_index, label_smoothing, run)
        share = None if share is None else problem.only_kept(share).to(problem.real).contiguous()
        into = problem.gradients(wanted)
        if any(wanted):
            one = 1.0 / max(problem.count, 1) if mean else 1.0
            grad = share if share is not None else x.new_full((problem.count,), one, dtype=problem.real)
            rows = problem.rows(grad)
            problem.add_gradients(rows, into, measure=True)
        else:
            rows = problem.rows()
            problem.measure(rows)
        each = rows.loss if share is None else rows.loss * share
        # The mean of nothing is nan, as in eager.
        whole = each.mean() if mean else each.sum()
        return whole, problem.among_ignored(rows.loss), *problem.results(into, problem.real)


def _ahead_fake(x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    dtype = accumulator(x.dtype)
    whole, losses = (x.new_empty(size, dtype=dtype) for size in ((), (x.shape[0],)))
    return whole, losses, *_gradients_fake(x, weight, bias, rest[-1], dtype)


def _ahead_save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.wanted, ctx.dtypes = inputs[-1], (inputs[0].dtype, None if inputs[4] is None else inputs[4].dtype)
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*output[1:])


def _ahead_backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
    losses, *found = ctx.saved_tensors
    needed, (dtype, share_dtype) = ctx.needs_input_grad, ctx.dtypes
    for need, have in zip(needed, ctx.wanted, strict=False):
        require(have or not need, "linear_cross_entropy_ahead: a gradient is asked for that `wanted` does not name")
    gradients = [(g * grad).to(dtype) if need else None for g, need in zip(found, needed, strict=False)]
    share = (losses * grad).to(share_dtype) if needed[4] else None
    return *gradients, None, share, *[None] * 5


# --- FLOPs: logits that are computed anew do not count -----------------------------------------------


def _flops(x: Tensor, weight: Tensor, *rest: Any, out_val: Any = None) -> Any:
    return 2 * x.shape[0] * weight.shape[0] * weight.shape[1]


def _backward_flops(grad: Tensor, x: Tensor, weight: Tensor, *rest: Any, out_val: Any = None) -> Any:
    return sum(rest[-1][:2]) * _flops(x, weight)


def _ahead_flops(x: Tensor, weight: Tensor, *rest: Any, out_val: Any = None) -> Any:
    return (1 + sum(rest[-1][:2])) * _flops(x, weight)


def _compiled(op: Callable[..., Any]) -> Callable[..., Any]:
    """The op with tiles in C++."""
    return lambda library, *arguments: op(*arguments, run=partial(cpu.tile, library))


_CONTRACT = Contract(
    nonzero="V",
    x=Array("T D", REAL),
    weight=Array("V D", As("x")),
    bias=Array("V", As("x")),
    target=Array("T", INT64, Range("V", but="ignore_index")),
    label_smoothing=Number(0.0, 1.0),
)
_WANTED = Flags(("x", "weight", "bias"))
_SUMMED = _CONTRACT.extended(
    Rule("share is None or not mean", "a mean is of losses without a share"), share=Array("T", REAL)
)

declare(
    f"linear_cross_entropy({_TENSORS}, {_ATTRIBUTES}) -> (Tensor loss, Tensor log_sum)",
    _CONTRACT,
    reference=loss,
    fake=_fake,
    cpu=_compiled(loss),
    backward=_backward,
    save=_save,
    flops=_flops,
)
declare(
    f"linear_cross_entropy_backward(Tensor grad, {_TENSORS}, Tensor log_sum, {_ATTRIBUTES}, bool[] wanted) "
    "-> (Tensor, Tensor, Tensor)",
    _CONTRACT.extended(grad=Array("T", REAL), log_sum=Array("T", REAL), wanted=_WANTED),
    reference=loss_backward,
    fake=_backward_fake,
    cpu=_compiled(loss_backward),
    flops=_backward_flops,
)
declare(
    f"linear_cross_entropy_ahead({_TENSORS}, Tensor? share, {_ATTRIBUTES}, bool mean, bool[] wanted) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _SUMMED.extended(wanted=_WANTED),
    reference=ahead,
    fake=_ahead_fake,
    cpu=_compiled(ahead),
    backward=_ahead_backward,
    save=_ahead_save,
    flops=_ahead_flops,
)
compose(
    f"linear_cross_entropy_total({_TENSORS}, Tensor? share, {_ATTRIBUTES}, bool mean) -> Tensor", _SUMMED, total, _flops
)
