"""Pointwise ops on leaves that are not all numbers; one rule per family of ops.

Where all operands are numbers the op itself gives the answer, and no rule is asked. A rule raises Unknown where it
cannot tell (the value is data then, unless scores are in it), and Refused where it can tell that no kernel computes
it.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from ..calls import called, is_tensor
from .calls import Call, Rules, value
from .formula import Formula
from .indexing import COPIES, broadcast
from .language import (
    NO,
    YES,
    Average,
    Data,
    Function,
    Leaf,
    Number,
    Position,
    Refused,
    RowStat,
    Score,
    Sum,
    Test,
    Unknown,
    Weight,
    just,
    number,
    of_scores,
    product,
)
from .numbers import (
    ASSUMES_BOUNDED,
    LOW,
    added,
    bounds,
    cast,
    exact_up_to,
    is_exactly_bounded,
    linear,
    scaled,
)
from .table import of_atom

if TYPE_CHECKING:
    from .evaluate import Evaluator

aten = torch.ops.aten
RULES = Rules()

_TO = {"add": aten.add.Tensor, "sub": aten.sub.Tensor, "rsub": aten.rsub.Tensor}
# Flat where their argument is far below everything, or above: what they give there is found by calling them.
# Where a function grows it is not flat, even if rounding makes it give one number: its slope is not zero.
_FLAT_BELOW = {"silu", "sigmoid", "exp", "tanh", "relu", "gelu", "softplus"}
_FLAT_ABOVE = {"sigmoid", "tanh"}
_MIRRORED = {"eq": "eq", "ne": "ne", "lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}


def evaluated(ev: Evaluator, call: Call) -> Any:
    """A pointwise call on leaves of which one at least is no number."""
    rule = RULES.get(call.name)
    touches_scores = any(of_scores(leaf) for leaf in call.leaves.values())
    if rule is not None:
        try:
            call.args = ev.arguments(call.node, rule.models)
            return rule.apply(ev, call)
        except Unknown as why:
            if touches_scores:
                raise Refused(f"{call.name} of scores", why, call.node) from None
            if call.dtype == torch.bool:
                raise
    if touches_scores:
        if len(call.leaves) == 1:
            return function(ev, call)
        raise Refused(f"{call.name} of scores and something else", ", ".join(map(str, call.leaves.values())), call.node)
    if call.dtype == torch.bool or call.node in ev.after:
        raise Unknown(call.name)  # what takes the place of a score is no tensor that the graph has without scores
    return just(Data(call.node, call.index), call.dtype)


def function(ev: Evaluator, call: Call) -> Number | Sum:
    """A function of one score: a number where the score is far below everything (or above)."""
    ((operand, x),) = call.leaves.items()
    others = [a for a in (*call.node.args, *call.node.kwargs.values()) if a is not operand]
    if any(isinstance(a, fx.Node) for a in others) or not isinstance(x, Sum):
        raise Refused(f"{call.name} of scores and something else", x, call.node)
    if not call.dtype.is_floating_point:
        raise Refused(f"{call.name} of scores gives {call.dtype}", x, call.node)
    flat = (x.const <= LOW and call.name in _FLAT_BELOW) or (x.const >= -LOW and call.name in _FLAT_ABOVE)
    limit = _limit(ev, call, x) if flat else None
    if limit is not None:
        return limit
    text = [repr(a) for a in call.node.args[1:]] + [f"{k}={v}" for k, v in sorted(call.node.kwargs.items())]
    return just(Function(call.name, tuple(text), x), call.dtype)


def _limit(ev: Evaluator, call: Call, x: Sum) -> Number | None:
    """What a function gives for any score that x may stand for, where that is one number."""
    found = bounds(ev, x)
    if found is None:
        return None

    def at(v: float) -> Number:
        arguments = (torch.full((1,), v, dtype=x.dtype), *call.node.args[1:])
        return Number.of(called(call.node)(*arguments, **call.node.kwargs).reshape(-1))

    low, high = at(found[0]), at(found[1])
    if x.const == -math.inf:
        return low
    if low.value != high.value:
        return None
    ev.assume(ASSUMES_BOUNDED)
    return low


# --- sums and products ---------------------------------------------------------------------------------


def _summand(ev: Evaluator, call: Call, name: str) -> Any:
    """An operand as a number, a sum, or a plain scalar; positions count as data."""
    leaf, given = call.operand(name), call.args[name]
    if isinstance(leaf, Position):
        return just(_as_data(ev, given, call), leaf.dtype)
    return leaf


def _as_data(ev: Evaluator, node: fx.Node, call: Call, inverse: bool = False) -> Data:
    """An operand as the tensor, or the size, that it is."""
    return Data(ev.first(node), broadcast(node, call.index) if is_tensor(node) else (), inverse)


def _in(ev: Evaluator, leaf: Any, dtype: torch.dtype) -> Number | Sum:
    if not isinstance(leaf, (Number, Sum)):
        return number(leaf, dtype)
    if isinstance(leaf, Sum) and not leaf.dtype.is_floating_point:
        return replace(leaf, dtype=dtype)
    found: Number | Sum = cast(ev, leaf, dtype)
    return found


def _formula(x: Any) -> Formula | None:
    """Positions and whole numbers."""
    if isinstance(x, Position):
        return x.formula
    v = x.value if isinstance(x, Number) else x
    if isinstance(v, (bool, int, float)) and math.isfinite(v) and float(v).is_integer():
        return Formula((), int(v))
    return None


def _needs_float(call: Call) -> None:
    if not call.dtype.is_floating_point:
        raise Unknown("whole numbers of data")


@RULES.of("add", "sub", "rsub", models=("self", "other", "alpha"))
def _add(ev: Evaluator, call: Call) -> Leaf:
    alpha = call.args["alpha"]
    if isinstance(alpha, fx.Node):
        raise Unknown("a factor that is a size")
    given = [call.operand(name) for name in ("self", "other")]
    formulas = [_formula(x) for x in given]
    if any(isinstance(x, Position) for x in given) and None not in formulas and isinstance(alpha, int):
        left, right = formulas if call.name != "rsub" else formulas[::-1]
        assert left is not None and right is not None
        return ev.position(left + right.times(alpha if call.name == "add" else -alpha), call.dtype)
    _needs_float(call)
    x, y = (_in(ev, _summand(ev, call, name), call.dtype) for name in ("self", "other"))
    return added(_TO[call.name], x, y, call.dtype, **({"alpha": alpha} if alpha != 1 else {}))


@RULES.of("neg", models=("self",))
def _neg(ev: Evaluator, call: Call) -> Leaf:
    x = call.operand("self")
    if isinstance(x, Position):
        return ev.position(x.formula.times(-1), x.dtype)
    _needs_float(call)
    return scaled(aten.mul.Tensor, x, -1, x.dtype)


@RULES.of("abs", models=("self",))
def _abs(ev: Evaluator, call: Call) -> Any:
    x = call.operand("self")
    if isinstance(x, Position):
        return ev.test(x.formula, x, ev.position(x.formula.times(-1), x.dtype))
    if of_scores(x):
        return function(ev, call)
    raise Unknown("abs")


@RULES.of("mul", models=("self", "other"))
def _mul(ev: Evaluator, call: Call) -> Leaf:
    given = [call.operand(name) for name in ("self", "other")]
    formulas = [_formula(x) for x in given]
    if sum(isinstance(x, Position) for x in given) == 1 and None not in formulas:
        at, by = (x for x in sorted(formulas, key=lambda f: not f.coefs))  # type: ignore[union-attr]
        assert at is not None and by is not None
        return ev.position(at.times(by.const), call.dtype)
    _needs_float(call)
    x, y = (_summand(ev, call, name) for name in ("self", "other"))
    names = ["self", "other"]
    if not isinstance(x, Sum) or (isinstance(y, Sum) and not of_scores(x)):
        x, y, names = y, x, names[::-1]
    if not isinstance(y, Sum):
        factor = y.value if isinstance(y, Number) else y
        if not math.isfinite(factor):
            raise Refused("a sum times infinity", x, call.node)
        return scaled(aten.mul.Tensor, _in(ev, x, call.dtype), factor, call.dtype)
    if not of_scores(x):
        raise Unknown("a product of data")  # the node itself is the term: taken apart, it would lose digits
    if of_scores(y):
        return _of_two_scores(call, x, y)
    return _times_data(ev, call, x, y, names[1])


def _times_data(ev: Evaluator, call: Call, x: Sum, y: Sum, name: str, inverse: bool = False) -> Leaf:
    """Scores times, or divided by, one tensor; a sum is one tensor, the operand's own node."""
    if x.const != 0:
        raise Refused("masked scores times a tensor", f"({x}) · ({y})", call.node)
    found, node = y.single, call.args[name]
    if not isinstance(found, Data) or found.inverse:
        found = _as_data(ev, node, call)
    factor = replace(found, inverse=inverse)
    ev.rely_on_factor(factor)
    return linear({product(*factors, factor): c for factors, c in x.terms}, 0.0, call.dtype, x.peak)


def _of_two_scores(call: Call, x: Sum, y: Sum) -> Leaf:
    for a, b in ((x, y), (y, x)):
        f = b.single
        if isinstance(f, Function) and f.name == "sigmoid" and replace(f.inner, peak=0.0) == replace(a, peak=0.0):
            return just(Function("silu", (), a), call.dtype)
    if x == y:
        return just(Function("pow", ("2",), x), call.dtype)
    raise Refused("scores times scores", f"({x}) · ({y})", call.node)


@RULES.of("div", models=("self", "other"))
def _div(ev: Evaluator, call: Call) -> Leaf:
    x, y = (_summand(ev, call, name) for name in ("self", "other"))
    _needs_float(call)
    if of_scores(y):
        raise Refused("something divided by scores", f"({x}) / ({y})", call.node)
    if not isinstance(y, Sum):
        by = y.value if isinstance(y, Number) else y
        if not isinstance(x, Sum) or not x.dtype.is_floating_point:
            raise Unknown("a quotient of data")
        if by == 0 or not math.isfinite(by):
            raise Refused("divided by zero or infinity", x, call.node)
        return scaled(aten.div.Tensor, _in(ev, x, call.dtype), by, call.dtype)
    if isinstance(x, Number) and x.is_zero:
        node = call.args["other"]
        ev.rely_on_factor(_as_data(ev, node, call, inverse=True))
        return number(0.0, call.dtype)
    if not of_scores(x):
        raise Unknown("a quotient of data")
    return _times_data(ev, call, x, y, "other", inverse=True)


@RULES.of("addcmul", models=("self", "tensor1", "tensor2", "value"))
def _addcmul(ev: Evaluator, call: Call) -> Leaf:
    x, y, z = (_summand(ev, call, name) for name in ("self", "tensor1", "tensor2"))
    if not isinstance(y, Number) or not isinstance(z, Number):
        raise Unknown("a product of data")
    _needs_float(call)
    small = [torch.full((1,), v.value, dtype=v.dtype) for v in (y, z)]
    more = torch.addcmul(torch.zeros(1, dtype=call.dtype), *small, value=call.args["value"])
    return added(aten.add.Tensor, _in(ev, x, call.dtype), Number.of(more), call.dtype)


# --- comparisons ---------------------------------------------------------------------------------------


@RULES.of("eq", "ne", "lt", "le", "gt", "ge", models=("self", "other"))
def _compare(ev: Evaluator, call: Call) -> Any:
    x, y = (call.operand(name) for name in ("self", "other"))
    name, formulas = call.name, [_formula(x), _formula(y)]
    if isinstance(x, Position) or isinstance(y, Position):
        if formulas[0] is not None and formulas[1] is not None:
            _check_exact(ev, call, formulas[0], formulas[1])
            return ev.compare(name, formulas[0] - formulas[1])
        raise Unknown("positions against data")
    if of_scores(x) or of_scores(y):
        raise Refused("scores are compared", f"{x} {name} {y}", call.node)
    if not isinstance(x, Sum):
        x, y, name = y, x, _MIRRORED[name]
    found = x.single
    if isinstance(y, Sum) or not isinstance(found, Data) or found.inverse:
        raise Unknown("a comparison of sums")
    return compared_data(found, name, y)


def _check_exact(ev: Evaluator, call: Call, *formulas: Formula) -> None:
    """Numbers are compared in the type that both sides are promoted to, where one may wrap or be rounded."""
    sides = [call.args[name] for name in ("self", "other")]
    common = torch.result_type(*(value(x) if is_tensor(x) else 0 if isinstance(x, fx.Node) else x for x in sides))
    for formula in formulas:
        ev.position(formula, common)


def compared_data(x: Data, name: str, y: Any) -> Any:
    """A tensor against a number, in the form that all spellings of a test share."""
    dtype, wanted = value(x.node).dtype, y.value if isinstance(y, Number) else y
    if wanted != wanted:
        raise Unknown("a comparison with NaN")
    if dtype.is_floating_point:
        rounded = torch.full((1,), wanted, dtype=dtype).item()
        if isinstance(y, Number) and rounded != wanted:
            raise Unknown("a number between two of the tensor's")
        wanted = rounded
        return _tested(x, "eq", wanted, False) if name == "ne" else _tested(x, name, wanted, True)
    info = torch.iinfo(dtype) if dtype != torch.bool else None
    if info is None or not float(wanted).is_integer() or not info.min <= wanted <= info.max:
        raise Unknown("a whole number against something else")
    common = y.dtype if isinstance(y, Number) else torch.result_type(value(x.node), y)
    if common.is_floating_point and abs(wanted) >= exact_up_to(common):
        raise Unknown("whole numbers that are rounded")
    how, holds = {"ne": ("eq", False), "lt": ("ge", False), "le": ("gt", False)}.get(name, (name, True))
    return _tested(x, how, int(wanted), holds)


def _tested(x: Data, how: str, wanted: Any, holds: bool) -> Any:
    return of_atom(Test(x.node, x.index, how, wanted), *((YES, NO) if holds else (NO, YES)))


# --- choices and casts ---------------------------------------------------------------------------------


@RULES.of("_to_copy", "to", models=("self", "dtype"))
@RULES.of("type_as", models=("self", "other"))
def _cast(ev: Evaluator, call: Call) -> Any:
    x = call.operand("self")
    if of_scores(x) and not call.dtype.is_floating_point:
        raise Refused(f"scores are cast to {call.dtype}", x, call.node)
    if isinstance(x, Sum) and call.dtype == torch.bool:
        found = x.single
        if not isinstance(found, Data) or found.inverse:
            raise Unknown("a sum as a truth value")
        return _tested(found, "eq", 0 if not x.dtype.is_floating_point else 0.0, False)
    return cast(ev, x, call.dtype)


@RULES.of(*sorted(COPIES), models=("self",))
def _same(ev: Evaluator, call: Call) -> Leaf:
    leaf: Leaf = call.operand("self")
    return leaf


@RULES.of("copy", models=("self", "src"))
def _copied(ev: Evaluator, call: Call) -> Any:
    return cast(ev, call.operand("src"), call.dtype)


@RULES.of("detach", models=("self",))
def _detach(ev: Evaluator, call: Call) -> Leaf:
    x: Leaf = call.operand("self")
    if not isinstance(x, Sum):
        return x
    if any(isinstance(f, Data) and ev.gradients_reach(f.node) for f in x.factors):
        raise Unknown("gradients stop")
    if not of_scores(x) or all(isinstance(f, RowStat) and f.kind != "sum" for f in x.factors):
        return x  # what is taken from all scores of a query cancels, and so does its gradient; a divisor does not
    if not all(isinstance(f, (Score, Data)) for f in x.factors):
        raise Refused("gradients stop", x, call.node)
    terms = (
        (product(*(replace(f, detached=True) if isinstance(f, Score) else f for f in factors)), c)
        for factors, c in x.terms
    )
    return replace(x, terms=tuple(terms))


@RULES.of("where", models=("condition", "self", "other"))
def _where(ev: Evaluator, call: Call) -> Any:
    condition = call.operand("condition")
    if not isinstance(condition, Number):
        raise Unknown("a condition")
    picked = call.operand("self" if condition.value else "other")
    return cast(ev, picked, call.dtype) if _is_leaf(picked) else number(picked, call.dtype)


@RULES.of("masked_fill", models=("self", "mask", "value"))
def _masked_fill(ev: Evaluator, call: Call) -> Any:
    mask, filler = call.operand("mask"), call.operand("value")
    if not isinstance(mask, Number):
        raise Unknown("a condition")
    if not mask.value:
        return call.operand("self")
    if _is_leaf(filler):
        return cast(ev, filler, call.dtype)
    return Number.of(torch.zeros(1, dtype=call.dtype).masked_fill(torch.tensor([True]), filler))


def _is_leaf(x: Any) -> bool:
    return isinstance(x, (Number, Position, Sum))


# --- clamps --------------------------------------------------------------------------------------------


@RULES.of("nan_to_num", models=("self", "nan", "posinf", "neginf"))
def _nan_to_num(ev: Evaluator, call: Call) -> Leaf:
    x = call.operand("self")
    if isinstance(x, Position):
        return x
    if any(isinstance(f, (Average, Weight)) and f.may_be_nan for f in x.factors):
        raise Refused("numbers that may be NaN are cleaned", x, call.node)
    if not of_scores(x):
        raise Unknown("data may hold NaN")
    if not math.isfinite(x.const):
        more = [call.args[name] for name in ("nan", "posinf", "neginf")]
        return Number.of(torch.nan_to_num(torch.full((1,), x.const, dtype=x.dtype), *more))
    return x


@RULES.of("clamp", models=("self", "min", "max"))
@RULES.of("clamp_min", models=("self", "min"))
@RULES.of("clamp_max", models=("self", "max"))
def _clamp(ev: Evaluator, call: Call) -> Any:
    low, high = (call.scalar(name) if name in call.args else None for name in ("min", "max"))
    return _clamped(ev, call, call.operand("self"), low, high)


@RULES.of("maximum", "minimum", "max", "min", models=("self", "other"))
def _extreme(ev: Evaluator, call: Call) -> Any:
    x, y = (call.operand(name) for name in ("self", "other"))
    upwards = call.name in ("maximum", "max")
    formulas = [_formula(x), _formula(y)]
    if formulas[0] is not None and formulas[1] is not None:
        leaves = [ev.position(f, call.dtype) for f in formulas]  # type: ignore[arg-type]
        return ev.test(formulas[0] - formulas[1], *(leaves if upwards else leaves[::-1]))
    if isinstance(x, Number):
        x, y = y, x
    if not isinstance(y, Number):
        raise Unknown("two unknowns")
    return _clamped(ev, call, x, y.value if upwards else None, None if upwards else y.value)


def _clamped(ev: Evaluator, call: Call, x: Leaf, low: Any, high: Any) -> Any:
    """x within [low, high]: itself, or a limit, where bounds tell."""
    if isinstance(x, Position):
        return _clamped_position(ev, call, x, low, high)
    if not isinstance(x, Sum) or not of_scores(x):
        raise Unknown("data")
    found = bounds(ev, x)
    if found is None:
        raise Refused(f"{call.name} of scores", x, call.node)
    if low is not None and high is not None:
        low = min(low, high)  # where the limits cross, torch takes the upper one
    if x.const == -math.inf:
        return number(-math.inf if low is None else low, call.dtype)
    for limit, free, reached in (
        (low, low is not None and low <= found[0], low is not None and low >= found[1]),
        (high, high is not None and high >= found[1], high is not None and high <= found[0]),
    ):
        if limit is None:
            continue
        if not free and not reached:
            raise Refused(f"{call.name} of scores at {limit:g}", x, call.node)
        if not is_exactly_bounded(x) and (reached or abs(limit) < torch.finfo(call.dtype).max):
            ev.assume(ASSUMES_BOUNDED)
        if not free:
            return number(limit, call.dtype)
    return cast(ev, x, call.dtype)


def _clamped_position(ev: Evaluator, call: Call, x: Position, low: Any, high: Any) -> Any:
    if low is not None and high is not None:
        raise Unknown("positions between two limits")
    limit = _formula(low if low is not None else high)
    if limit is None:
        raise Unknown("positions against a fraction")
    leaves = [ev.position(f, call.dtype) for f in (x.formula, limit)]
    return ev.test(x.formula - limit, *(leaves if low is not None else leaves[::-1]))
