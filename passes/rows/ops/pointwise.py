"""Pointwise ops: each element is made from the elements of the operands at its own index."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from .... import _torch
from ....graph.nodes import tensor, zeros_of
from ..calls import COPIES, VIEWS, arg, is_tensor, op, rank_of, tensors, value_of
from ..declaration import EVERY, Declaration, row_family, row_op
from ..hiding import shown
from ..zeros import NOWHERE_KNOWN
from .packing import first_packed

if TYPE_CHECKING:
    from ..axes import Dims, Typing
    from ..emit import Emitter
    from ..program import RowSet
    from ..rowwise import Rowwise
    from ..spaces import Space
    from ..zeros import Support, Zeros

aten = torch.ops.aten
# Torch does not tag them as pointwise.
_ALSO = (
    "_to_copy", "to", "detach", "alias", "contiguous", "lift_fresh_copy", "zeros_like", "ones_like", "full_like",
    "type_as", "copy", "fill", "log_sigmoid", "softplus", "nan_to_num", "logical_or", "logical_not",
    "floor_divide", "square", "gelu", "clone", "hardswish", "rsub",
)  # fmt: skip
_POLYNOMIALS = tuple(
    f"special_{kind}"
    for kind in (
        *(f"{shifted}chebyshev_polynomial_{which}" for shifted in ("", "shifted_") for which in "tuvw"),
        "hermite_polynomial_h", "hermite_polynomial_he", "laguerre_polynomial_l", "legendre_polynomial_p",
    )
)  # fmt: skip
# Their fakes can neither broadcast to, nor cast, rows that only the batch counts.
_PLAIN = (
    "addcdiv", "addcmul", "lerp", "special_airy_ai", "special_spherical_bessel_j0",
    *(f"special_{shifted}chebyshev_polynomial_{which}" for shifted in ("", "shifted_") for which in "tuvw"),
    "special_hermite_polynomial_h", "special_hermite_polynomial_he", "special_laguerre_polynomial_l",
    "special_legendre_polynomial_p",
    *(f"special_{kind}{order}" for kind in ("bessel_j", "bessel_y", "modified_bessel_i", "modified_bessel_k",
      "scaled_modified_bessel_k") for order in (0, 1)),
)  # fmt: skip


def broadcast(t: Typing, n: fx.Node) -> Dims | list[Dims | None]:
    if is_tensor(n):
        return t.broadcast(tensors(n), rank_of(n))
    several: list[Dims | None] = [t.broadcast(tensors(n), result.dim()) for result in n.meta["val"]]
    return several


def aligned(r: Rowwise, n: fx.Node, s: Space) -> str | None:
    if is_tensor(n):
        return r.aligned(n, s)
    x, *others = tensors(n)
    same = all(r.typing.atoms(y) == r.typing.atoms(x) for y in others)
    return None if same and r.covers(x, s) else f"{op(n)} of values with other rows"


def packed(e: Emitter, n: fx.Node, chosen: RowSet) -> fx.Node:
    if is_tensor(n):
        return e.pointwise(n, chosen)
    args, kwargs = fx.map_arg((n.args, n.kwargs), lambda x: e.packed(x, chosen) if is_tensor(x) else x)
    return e.call(n.target, *args, **kwargs)


def zero_of_zeros(z: Zeros, n: fx.Node) -> Support:
    """Where all operands are zero, the result is what the op makes of zeros."""
    operands = [x for x in n.all_input_nodes if not is_tensor(x) or z.meanings.constant(x) is None]
    if not is_tensor(n) or not operands or not all(is_tensor(x) for x in operands):
        return NOWHERE_KNOWN
    found = frozenset.intersection(*[z.support(x) for x in operands])
    return found if found and _makes_zero(z, n) else NOWHERE_KNOWN


def _makes_zero(z: Zeros, n: fx.Node) -> bool:
    """The op itself, called on zeros of the operands' ranks and dtypes, and on the constants among its operands.

    A zero may be negative, and some ops tell: every choice of signs must give zero. Users' ops are not called: nobody
    knows what else they do.
    """
    target: Any = n.target
    loose = [x for x in tensors(n) if z.meanings.constant(x) is None]
    if target.namespace != "aten" or _torch.is_random(n) or sum(_has_sign(x) for x in loose) > 3:
        return False
    for signs in itertools.product(*(zeros_of(value_of(x)) for x in loose)):
        chosen = dict(zip(loose, signs, strict=True))

        def real(x: fx.Node, chosen: dict[fx.Node, complex] = chosen) -> torch.Tensor:
            value, constant = tensor(x), z.meanings.constant(x)
            assert value is not None
            number = chosen.get(x, 0) if constant is None else constant
            return torch.full([1] * value.dim(), number, dtype=value.dtype)

        args, kwargs = fx.map_arg((n.args, n.kwargs), real)
        kwargs = {k: v for k, v in kwargs.items() if k not in ("device", "memory_format", "pin_memory")}
        try:
            with _torch.outside_compilation(), torch.no_grad():
                if bool((target(*args, **kwargs) != 0).any()):
                    return False
        except (RuntimeError, TypeError, ValueError, ZeroDivisionError):
            return False
    return True


def _has_sign(x: fx.Node) -> bool:
    return len(zeros_of(value_of(x))) > 1


def _either_zero(z: Zeros, n: fx.Node) -> Support:
    return z.factor(n.args[0]) | z.factor(n.args[1])


def _numerator_zero(z: Zeros, n: fx.Node) -> Support:
    return z.support(n.args[0]) if _never_zero(z, n.args[1]) else NOWHERE_KNOWN


def _first_zero(z: Zeros, n: fx.Node) -> Support:
    return z.support(n.args[0])


def _filled(z: Zeros, n: fx.Node) -> Support:
    """where(mask, x, 0), masked_fill(x, mask, 0)."""
    (value, other), choices = (n.args[1:3] if op(n) == "where" else (n.args[0], n.args[2])), shown(n, z.meanings)
    if op(n) == "where" and z.meanings.constant(value) == 0:
        value, other, choices = other, value, choices[::-1]
    if z.meanings.constant(other) != 0 or not choices:
        return NOWHERE_KNOWN
    return z.support(value) | choices[0][1]


_NEVER_NEGATIVE = {"linalg_norm", "linalg_vector_norm", "norm", "abs", "square", "relu", "exp", "sigmoid", "sqrt"}


def _never_zero(z: Zeros, value: Any) -> bool:
    while op(value) in VIEWS | COPIES:
        value = value.args[0]
    if not isinstance(value, fx.Node):
        return isinstance(value, (int, float)) and value != 0
    constant = z.meanings.constant(value)
    if constant is not None:
        return constant != 0
    if op(value) in ("clamp", "clamp_min"):
        most = arg(value, "max")  # which wins over the least
        return _is_above_zero(arg(value, "min"), value) and (most is None or _is_above_zero(most, value))
    plain = op(value) == "add" and not value.kwargs and len(value.args) == 2
    more = plain and _is_above_zero(value.args[1], value)
    return op(value) in ("exp", "sigmoid", "softplus") or (more and _never_negative(value.args[0]))


def _is_above_zero(number: Any, like: fx.Node) -> bool:
    """In the type of a value: 1e-12 is nothing to a half type."""
    if not isinstance(number, (int, float)) or number <= 0:
        return False
    dtype = value_of(like).dtype
    return not dtype.is_floating_point or bool(torch.tensor(number, dtype=dtype) > 0)


def _never_negative(value: Any) -> bool:
    """Whole numbers wrap around, unless they count."""
    while op(value) in ("_to_copy", "to") and value_of(value).is_floating_point():
        value = value.args[0]
    of = tensor(value.args[0]) if op(value) in {"sum", *_NEVER_NEGATIVE} else None
    return of is not None and (of.dtype == torch.bool if op(value) == "sum" else of.dtype.is_floating_point)


def _spread(e: Emitter, n: fx.Node, chosen: RowSet) -> fx.Node:
    """On operands of the result's size, and of its type where they are integers, or have no dims and count less."""
    sizes, result = e.kept_sizes(n, chosen.space.axes), tensor(n)
    assert result is not None

    def full(x: fx.Node) -> Any:
        y, value = e.operand(x, n, chosen), tensor(x)
        loose = value is not None and (not value.dtype.is_floating_point or value.dim() == 0)
        if value is not None and value.dtype != result.dtype and loose:
            y = e.call(aten.to.dtype, y, result.dtype)
        has_rows = any(a in chosen.space.axes for a in e.typing.flat(x))
        if has_rows and e.kept_sizes(x, chosen.space.axes) == sizes:
            return y
        return e.call(aten.expand.default, y, [e.count_of(chosen), *[e.size(size) for size in sizes]])

    args, kwargs = fx.map_arg((n.args, n.kwargs), full)
    return e.call(n.target, *args, **kwargs)


def _channel_slopes(t: Typing, n: fx.Node) -> Dims:
    """One slope per channel, which is dim 1; or one for all."""
    x, slopes = t.dims(n.args[0]), t.dims(n.args[1])
    if len(x) > 1 and slopes:
        t.join(x[1], slopes[0])
    return list(x)


def _slopes_mix(r: Rowwise, n: fx.Node, s: Space) -> str | None:
    x: Any = n.args[0]
    if not r.covers(x, s) or not r.free(n.args[1], s):
        return "slopes that depend on rows"
    slopes: Any = n.args[1]
    many = bool(r.typing.flat(slopes))
    first = r.typing.atoms(x)[0]
    kept = not many or (rank_of(x) > 1 and bool(first) and set(first) <= set(s.axes))
    return None if kept else "slopes per channel of values whose first dim is not rows"


POINTWISE: dict[str, Any] = {"models": EVERY, "axes": broadcast, "mixes": aligned, "packed": packed}


def _tagged(target: torch._ops.OpOverload) -> bool:
    return torch.Tag.pointwise in target.tags and torch.Tag.nondeterministic_seeded not in target.tags


row_family(_tagged, Declaration(EVERY, broadcast, aligned, zero_of_zeros, None, packed))
row_op(*_ALSO, zeros=zero_of_zeros, **POINTWISE)
row_op("dropout", zeros=_first_zero, **POINTWISE)
row_op("empty_like", **POINTWISE)  # holds anything, zeros included
row_op("mul", "bitwise_and", "logical_and", zeros=_either_zero, **POINTWISE)
row_op("div", zeros=_numerator_zero, **POINTWISE)
row_op("where.self", "where.ScalarSelf", "where.ScalarOther", "where.Scalar", "masked_fill", zeros=_filled, **POINTWISE)
row_op(*_PLAIN, zeros=zero_of_zeros, **{**POINTWISE, "packed": _spread})
row_op("prelu", models=("self", "weight"), axes=_channel_slopes, mixes=_slopes_mix, packed=first_packed)
