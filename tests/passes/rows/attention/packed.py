"""A normal form lowered to `jagged_attention` on rows that are really packed, against eager."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from turbogr_compile.passes.rows.attention.builder import Layout, Packed
from turbogr_compile.passes.rows.attention.checks import failed
from turbogr_compile.passes.rows.attention.facts import values_of
from turbogr_compile.passes.rows.attention.formula import KEY, QUERY, Formula, Index, Size
from turbogr_compile.passes.rows.attention.grid import symbols_in
from turbogr_compile.passes.rows.attention.language import Refused
from turbogr_compile.passes.rows.attention.lower import lowered
from turbogr_compile.passes.rows.attention.normal import NormalForm
from turbogr_compile.passes.rows.attention.numbers import ASSUMES_BOUNDED, ASSUMES_EXP, BOUND

from .harness import Executor, gradients


class Rows:
    """Packed rows of one side: sequence and column of each."""

    def __init__(self, kept: Tensor) -> None:
        self.sequence, self.column = kept.nonzero().unbind(1)
        self.offsets = torch.cat([torch.zeros(1, dtype=torch.long), kept.sum(1).cumsum(0)])


class RealBuilder:
    """Reads tensors by advanced indexing, and calls ops at once."""

    def __init__(self, form: NormalForm, values: dict[fx.Node, Any], queries: Rows, keys: Rows) -> None:
        self.form, self.values, self.symbols = form, values, symbols_in(values)
        self.rows = {QUERY: queries, KEY: keys}
        self.query_offsets, self.key_offsets = queries.offsets, keys.offsets
        self.query_columns, self.key_columns = queries.column, keys.column

    def number(self, size: Any) -> int:
        return int(size.subs(self.symbols)) if hasattr(size, "subs") else int(size)

    def _coordinates(self, layout: Layout, sizes: dict[str, Size]) -> dict[str, Tensor]:
        """Of each axis, as a tensor of as many dims as the layout has."""
        found = {}
        for d, group in enumerate(layout):
            packed = isinstance(group, Packed)
            axes = self.form.sequences if packed else group
            lengths = [self.number(sizes[a] if a in sizes else self.form.sizes[a]) for a in axes]
            flat = self.rows[group.side].sequence if packed else torch.arange(math.prod(lengths))
            at = dict(zip(axes, torch.unravel_index(flat, lengths) if axes else (), strict=True))
            if packed:
                at[group.side] = self.rows[group.side].column
            view = [-1 if i == d else 1 for i in range(len(layout))]
            found |= {axis: x.view(view) for axis, x in at.items()}
        return found

    def truth(self, table: Any, layout: Layout) -> None:
        return None

    def positions(self, formula: Formula, layout: Layout, sizes: dict[str, Size]) -> Tensor:
        at = self._coordinates(layout, sizes)
        total = torch.full([1] * len(layout), self.number(formula.const))
        for axis, c in formula.coefs:
            total = total + self.number(c) * at[axis]
        return total

    def read(self, node: fx.Node, index: Index, layout: Layout, sizes: dict[str, Size]) -> Tensor:
        x = torch.as_tensor(self.values[node])
        if not index:
            return x.reshape([1] * len(layout))
        at = [self.positions(i, layout, sizes).clamp(0, s - 1) for i, s in zip(index, x.shape, strict=True)]
        return x[tuple(at)]

    def constant(self, tensor: Tensor) -> Tensor:
        return tensor

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        return target(*args, **kwargs)

    def seed(self) -> Tensor:
        return torch.zeros((), dtype=torch.long)


def compare_packed(module: fx.GraphModule, form: NormalForm, inputs: Sequence[Any], tolerance: float = 1e-8) -> str:
    """As `harness.compare`, of the packed call; 'refused …' where the op cannot say it."""
    given = [x.detach().clone().requires_grad_() if isinstance(x, Tensor) and x.requires_grad else x for x in inputs]
    values = values_of(module, given)
    if failed(form.checks, values) is not None or form.dropout is not None:
        return "not run"
    executor = Executor(form, values)
    dense = executor.run()
    if ASSUMES_BOUNDED in form.assumptions and not float(dense.scores.detach().abs().max()) * abs(form.scale) <= BOUND:
        return "outside"
    grid = executor.grid
    places = [grid.axes.index(a) for a in (*form.sequences, QUERY)]
    others = [d for d in range(len(grid.axes)) if d not in places]
    allowed = dense.allowed.expand([*grid.shape[:-1], 1]).permute([*places, *others]).flatten(len(places)).all(-1)
    sequences = math.prod(allowed.shape[:-1])
    keys = Rows(torch.ones(sequences, grid.shape[-1], dtype=torch.bool))
    chosen = allowed.reshape(sequences, -1)
    if not bool(chosen.any()):
        return "blind"
    builder = RealBuilder(form, values, Rows(chosen), keys)
    try:
        got, _ = lowered(form, builder)
    except Refused as why:
        return f"refused: {why.reason}"
    layout: Layout = (Packed(QUERY), form.heads, executor.width)
    eager = builder.read(form.node, form.result, layout, {}).expand(got.shape)
    if not bool(torch.isfinite(eager).all()):
        return "nan" if ASSUMES_EXP in form.assumptions else "DIFFERENT: eager is not finite"
    error = float((got - eager).detach().abs().max()) / max(1.0, float(eager.detach().abs().max()))
    if not error <= tolerance:
        return f"DIFFERENT packed values by {error:.1e}"
    leaves = [x for x in given if isinstance(x, Tensor) and x.requires_grad]
    return gradients(got, eager, torch.ones_like(got, dtype=torch.bool), leaves, tolerance)
