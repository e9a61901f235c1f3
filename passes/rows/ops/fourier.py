"""Complex numbers as pairs of real ones, and Fourier transforms along features."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import fx

from ..calls import operand
from ..declaration import row_op
from .derived import Line
from .packing import first_packed

if TYPE_CHECKING:
    from ..axes import Dims, Typing
    from ..rowwise import Rowwise
    from ..spaces import Space


def _pairs(t: Typing, n: fx.Node) -> Dims:
    return [*t.dims(n.args[0]), t.axes.fresh(2)]


def _numbers(t: Typing, n: fx.Node) -> Dims:
    return list(t.dims(n.args[0])[:-1])


def _other_rows(r: Rowwise, n: fx.Node, s: Space) -> str | None:
    return None if r.covers(operand(n), s) else "complex numbers of a value with other rows"


def _pairs_mix(r: Rowwise, n: fx.Node, s: Space) -> str | None:
    return "complex numbers made of rows" if r.on_rows(operand(n), -1, s) else _other_rows(r, n, s)


row_op("view_as_real", models=("self",), axes=_pairs, mixes=_other_rows, packed=first_packed)
row_op("view_as_complex", models=("self",), axes=_numbers, mixes=_pairs_mix, packed=first_packed)
for transform, flags in (("_fft_c2c", "forward"), ("_fft_r2c", "onesided"), ("_fft_c2r", "last_dim_size")):
    beside = Line(f"{transform}.default", "beside dim", ("self",), (), (), "hand")
    row_op(transform, models=("self", "dim", "normalization", flags),
           axes=beside.axes, mixes=beside.mixes, packed=beside.packed)  # fmt: skip
