"""Numbers as torch computes them, and the bounds that rules about numbers rest on.

Constants are folded by the op itself, in the storage dtype and with the operand's rank. Coefficients are products of
scalars inside of an op, so they are folded in the precision that ops compute in: `half * 0.1` is not `half *
half(0.1)`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from ..calls import called, is_tensor, rank_of
from .calls import Call
from .language import (
    Average,
    Data,
    Drop,
    Function,
    Leaf,
    Number,
    Position,
    Product,
    Refused,
    RowStat,
    Score,
    Sum,
    Unknown,
    Weight,
    number,
    of_scores,
)

if TYPE_CHECKING:
    from .evaluate import Evaluator

aten = torch.ops.aten

BOUND = 4096.0  # scores with their biases are taken to lie within ± this
NOTHING = 746.0  # exp(-746) is 0 in fp64, exp(-104) in fp32
LOW = -(2 * BOUND + NOTHING)  # this or less removes a score: against any visible one it is 746 lower
FACTOR = 1e3  # a term with a larger coefficient is not known to be of the size of scores
DIGITS = 1e12  # coefficients beyond 1e±12 lose digits on the way
_PEAK = {torch.float64: 4096.0, torch.float32: 4096.0, torch.float16: 16.0, torch.bfloat16: 16.0}

ASSUMES_BOUNDED = f"scores with their biases lie within ±{BOUND:g}"
ASSUMES_PARAMETERS = f"biases made from parameters lie within ±{BOUND:g}"
ASSUMES_EXP = "exponentials of a softmax that is written out do not overflow"


def peak_of(dtype: torch.dtype) -> float:
    """What may be added to a score and taken away again: in fp32, digits down to 5e-4 survive it."""
    return _PEAK.get(dtype, 0.0)


def computed_in(dtype: torch.dtype) -> torch.dtype:
    """The precision of an op's inside."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def exact_up_to(dtype: torch.dtype) -> int:
    """Whole numbers of this magnitude and less are themselves in a dtype."""
    if dtype.is_floating_point:
        return int(2 / torch.finfo(dtype).eps)
    return int(torch.iinfo(dtype).max)


def is_lowest(value: float, dtype: torch.dtype) -> bool:
    """The lowest number of a dtype, which lies so far below its next that it removes a score of any size."""
    info = torch.finfo(dtype)
    return value <= info.min and -info.min * info.eps / 2 > NOTHING


def folded(call: Call) -> Number:
    """The op itself, on tensors of one element."""

    def small(node: fx.Node) -> Any:
        leaf = call.leaves[node]
        assert isinstance(leaf, Number)
        if not is_tensor(node):
            return leaf.value  # a size that turned out to be a number
        return torch.full((1,) * rank_of(node), leaf.value, dtype=leaf.dtype)

    args, kwargs = fx.map_arg((call.node.args, call.node.kwargs), small)
    kwargs = {name: given for name, given in kwargs.items() if name != "device"}
    try:
        result = called(call.node)(*args, **kwargs)
    except (RuntimeError, TypeError, ValueError) as error:
        raise Unknown(f"{call.name} does not run on numbers: {error}") from None
    if result.dtype != call.dtype:
        raise Unknown(f"{call.name} gives {result.dtype} for numbers, {call.dtype} in the graph")
    return Number.of(result.reshape(-1))


def calculated(target: Any, dtype: torch.dtype, *values: Any, **more: Any) -> float:
    """An op on numbers of a dtype; plain scalars stay scalars."""
    args = [torch.full((1,), v[0], dtype=dtype) if isinstance(v, tuple) else v for v in values]
    return float(target(*args, **more).to(dtype).item())


# --- sums ----------------------------------------------------------------------------------------------


def columns(leaf: Number | Sum) -> tuple[dict[Product, float], float]:
    if isinstance(leaf, Number):
        return {}, float(leaf.value)
    return dict(leaf.terms), leaf.const


def linear(terms: Mapping[Product, float], const: float, dtype: torch.dtype, peak: float) -> Number | Sum:
    """A sum in normal form. 0·x is 0 for finite x, which what a blind query averages may not be."""
    kept = []
    for factors, c in terms.items():
        if not math.isfinite(c):
            raise Refused("a coefficient that is not finite", "·".join(map(str, factors)))
        if c == 0 and not any(isinstance(f, Average) and f.may_be_nan for f in factors):
            continue
        if c != 0 and not 1 / DIGITS <= abs(c) <= DIGITS:
            raise Refused("a factor so large or small that digits are lost", f"{c:g}")
        kept.append((factors, c))
    if not kept or math.isnan(const):
        return number(const, dtype)
    finite = abs(const) if math.isfinite(const) else 0.0
    kept.sort(key=lambda term: [str(f) for f in term[0]])
    return Sum(tuple(kept), const, dtype, max(peak, finite))


def _peak(leaf: Number | Sum) -> float:
    const = columns(leaf)[1]
    own = abs(const) if math.isfinite(const) else 0.0
    return max(own, leaf.peak if isinstance(leaf, Sum) else 0.0)


def added(target: Any, x: Number | Sum, y: Number | Sum, dtype: torch.dtype, **more: Any) -> Number | Sum:
    """target(x, y), an addition or a subtraction."""
    (terms, a), (others, b) = columns(x), columns(y)
    wide = computed_in(dtype)
    sums = {
        factors: calculated(target, wide, (terms.get(factors, 0.0),), (others.get(factors, 0.0),), **more)
        for factors in {**terms, **others}
    }
    const = calculated(target, dtype, (a,), (b,), **more)
    if math.isfinite(a) and math.isfinite(b):
        _stays_finite(const, sums, x)
    return linear(sums, const, dtype, max(_peak(x), _peak(y)))


def scaled(target: Any, x: Number | Sum, factor: float, dtype: torch.dtype) -> Number | Sum:
    """target(x, factor), a product or a quotient."""
    if isinstance(x, Sum) and factor == 0 and not math.isfinite(x.const):
        raise Refused("zero times infinity", x)
    terms, const = columns(x)
    wide = computed_in(dtype)
    scaled_terms = {factors: calculated(target, wide, (c,), factor) for factors, c in terms.items()}
    by = abs(calculated(target, wide, (1.0,), factor))
    peak = x.peak * min(1.0, by) if isinstance(x, Sum) else 0.0
    product = calculated(target, dtype, (const,), factor)
    if math.isfinite(const):
        _stays_finite(product, terms, x)
    return linear(scaled_terms, product, dtype, peak)


def _stays_finite(const: float, terms: Mapping[Product, float], x: Number | Sum) -> None:
    """A constant that overflows beside a statistic of its row need not: in a blind row the two cancel."""
    if not math.isfinite(const) and any(isinstance(f, RowStat) for factors in terms for f in factors):
        raise Refused("a constant that overflows beside a statistic of its row", x)


def cast(ev: Evaluator, leaf: Leaf, dtype: torch.dtype) -> Any:
    """A leaf in another dtype; a table where positions become truth values."""
    if isinstance(leaf, Number):
        return Number.of(torch.full((1,), leaf.value, dtype=leaf.dtype).to(dtype))
    if leaf.dtype == dtype:
        return leaf
    if isinstance(leaf, Position):
        return ev.compare("ne", leaf.formula) if dtype == torch.bool else ev.position(leaf.formula, dtype)
    if not dtype.is_floating_point or not leaf.dtype.is_floating_point:
        raise Unknown(f"{leaf.dtype} as {dtype}")
    if torch.finfo(dtype).eps > torch.finfo(leaf.dtype).eps:
        if not of_scores(leaf) and leaf.const == 0:
            raise Unknown("rounded data")  # the node itself is the term
        ev.assume(f"what is rounded to {str(dtype).removeprefix('torch.')} on the way changes nothing that matters")
    const = torch.full((1,), leaf.const, dtype=leaf.dtype).to(dtype).item()
    if math.isfinite(leaf.const):
        _stays_finite(const, dict(leaf.terms), leaf)
    return linear(dict(leaf.terms), const, dtype, leaf.peak)


# --- bounds --------------------------------------------------------------------------------------------


def rely_on_size(ev: Evaluator, leaf: Leaf) -> None:
    """That data in a sum is of the size of scores: checked where the batch makes it, assumed of parameters."""
    for factors, c in leaf.terms if isinstance(leaf, Sum) else ():
        if all(isinstance(f, Data) for f in factors):
            if abs(c) > FACTOR:
                raise Refused("not known to be small, nor to be a mask", leaf)
            ev.rely_on_term(factors, c)
        for f in factors:
            if isinstance(f, Function):
                rely_on_size(ev, f.inner)


def bounds(ev: Evaluator, leaf: Leaf) -> tuple[float, float] | None:
    """Within which a value lies: exact for weights, assumed for scores.

    A statistic of a row is bounded as its scores are, except where the row is blind: then it is what they were filled
    with.
    """
    if isinstance(leaf, Number):
        return leaf.value, leaf.value
    if isinstance(leaf, Position):
        return None
    rely_on_size(ev, leaf)
    if len(leaf.terms) == 1 and len(leaf.terms[0][0]) == 1 and isinstance(leaf.terms[0][0][0], (Weight, Average)):
        c = leaf.terms[0][1]
        return leaf.const + min(0.0, c), leaf.const + max(0.0, c)
    if any(isinstance(f, (Weight, Average, Drop, RowStat)) for f in leaf.factors):
        return None
    return leaf.const - BOUND, leaf.const + BOUND


def is_exactly_bounded(leaf: Leaf) -> bool:
    """By what it is, not by what is assumed of scores."""
    return isinstance(leaf, Sum) and any(isinstance(f, (Weight, Average)) for f in leaf.factors)


def score_terms(leaf: Sum) -> tuple[tuple[Product, float], ...]:
    """The terms that are made of the pair's own score; statistics of its row are not among them."""
    return tuple(t for t in leaf.terms if any(isinstance(f, (Score, Function, Weight, Average, Drop)) for f in t[0]))


def without(leaf: Sum, terms: Any) -> Sum:
    return replace(leaf, terms=tuple(t for t in leaf.terms if t not in terms))
