"""A program traced, its attention recognised, and the normal form run densely against what eager computes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from turbogr_compile.capture.trace import trace
from turbogr_compile.graph.nodes import TRAINABLE
from turbogr_compile.graph.phases import Phase
from turbogr_compile.passes.rows.attention.bias import ByBucket, ByCase, ByDistance, ByTime, Dense
from turbogr_compile.passes.rows.attention.checks import SeesKey, failed
from turbogr_compile.passes.rows.attention.facts import GraphFacts, values_of
from turbogr_compile.passes.rows.attention.find import is_candidate
from turbogr_compile.passes.rows.attention.formula import DEPTH, KEY, QUERY
from turbogr_compile.passes.rows.attention.grid import Grid
from turbogr_compile.passes.rows.attention.language import Refused, Sum
from turbogr_compile.passes.rows.attention.normal import HIDDEN, Blindness, NormalForm
from turbogr_compile.passes.rows.attention.numbers import ASSUMES_BOUNDED, ASSUMES_EXP, BOUND
from turbogr_compile.passes.rows.attention.recognise import recognise

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu, "sigmoid": torch.sigmoid, "relu": torch.relu, "squared_relu": lambda x: torch.relu(x) ** 2,
    "tanh": torch.tanh, "exp": torch.exp, "gelu": F.gelu, "softplus": F.softplus,
}  # fmt: skip


def traced(program: Callable[..., Any], inputs: Sequence[Any], like: Sequence[Any] | None = None) -> fx.GraphModule:
    """As capture makes it; `like` are fake inputs with symbolic sizes."""
    module = trace(program, list(like) if like is not None else list(inputs), Phase.PRE_GRAD)
    for node, given in zip(module.graph.find_nodes(op="placeholder"), inputs, strict=True):
        if isinstance(given, Tensor) and given.requires_grad:
            node.meta[TRAINABLE] = True
    return module


def attentions(module: fx.GraphModule, inputs: Sequence[Any] | None) -> list[NormalForm | Refused]:
    facts = GraphFacts(module, inputs)
    found = [recognise(n, facts) for n in module.graph.nodes if n.op == "call_function" and is_candidate(n)]
    return [x for x in found if x is not None]


def one_attention(program: Callable[..., Any], inputs: Sequence[Any], seen: bool = True) -> NormalForm | Refused:
    (found,) = attentions(traced(program, inputs), inputs if seen else None)
    return found


# --- a normal form, run densely ------------------------------------------------------------------------


@dataclass
class Dense_:
    """The result of an attention, (batch axes…, queries, width…), and for which queries checks allow it."""

    result: Tensor
    allowed: Tensor
    scores: Tensor


class Executor:
    def __init__(self, form: NormalForm, values: dict[fx.Node, Any]) -> None:
        self.form, self.values = form, values
        self.batch = tuple(a for a in form.axes if a not in (QUERY, KEY))
        self.grid = self._grid(QUERY, KEY)
        self.width = tuple(sorted({a for i in form.value.index for a in i.axes if a.startswith("e")}))

    def _grid(self, *axes: str) -> Grid:
        return Grid((*self.batch, *axes), self.form.sizes, self.values)

    def _operand(self, operand: Any, *axes: str) -> Tensor:
        grid = self._grid(*axes)
        return grid.tensor(operand.node, operand.index).expand(grid.shape)

    def run(self) -> Dense_:
        form, grid = self.form, self.grid
        q, k = self._operand(form.query, QUERY, DEPTH), self._operand(form.key, KEY, DEPTH)
        score = q @ k.transpose(-1, -2)
        dtype = score.dtype
        raw = score
        score = form.scale * (score if form.cap is None else torch.tanh(form.cap * score))
        for f in form.score_factors:
            score = score * grid.factor(f, dtype)
        for bias in form.biases:
            score = score + self.bias(bias, dtype)
        visible = grid.truth(form.visibility).expand(grid.shape)
        weights = self._activated(score, visible) * form.post_scale
        for f in form.post_factors:
            weights = weights * grid.factor(f, dtype)
        for table in (form.queries_kept, form.values_kept):
            if table is not None:
                weights = torch.where(grid.truth(table), weights, 0.0)
        v = self._operand(form.value, KEY, *self.width)
        result = (weights.to(v.dtype) @ v.flatten(len(self.batch) + 1)).unflatten(-1, v.shape[len(self.batch) + 1 :])
        return Dense_(result, self.allowed(), raw)

    def _activated(self, score: Tensor, visible: Tensor) -> Tensor:
        form, grid = self.form, self.grid
        if form.activation != "softmax":
            return torch.where(visible, ACTIVATIONS[form.activation](torch.where(visible, score, 0.0)), 0.0)
        low = torch.where(visible, score, -math.inf)
        blind = ~visible.any(-1, keepdim=True)
        if form.sink is not None:
            sink = grid.sum(form.sink, score.dtype).expand([*grid.shape[:-1], 1])
            weights = torch.cat([low, sink], -1).softmax(-1)[..., :-1]
        else:
            weights = torch.where(blind, 0.0, low).softmax(-1)
        return torch.where(visible, weights, 0.0)

    def bias(self, bias: Any, dtype: torch.dtype) -> Tensor:
        grid = self.grid
        match bias:
            case Dense():
                return grid.product(bias.factors, bias.coef, dtype)
            case ByDistance():
                return grid.product((bias.data,), bias.coef, dtype)
            case ByBucket():
                return bias.coef * self._bucket(bias).to(dtype)
            case ByTime():
                q, k = (grid.tensor(t.node, t.index) for t in (bias.gap.query, bias.gap.key))
                bucket = (
                    torch.searchsorted(torch.tensor(bias.bounds), (q - k).abs().contiguous(), right=True) + bias.first
                )
                return bias.coef * self._rows(bias.table, bucket, bias.rest).to(dtype)
            case ByCase():
                return self.cases(bias.sums, dtype)
        raise TypeError(bias)

    def _bucket(self, bias: ByBucket) -> Tensor:
        q, k = (self.grid.along[a] for a in (QUERY, KEY))
        at = bias.entries[(*(self.grid.along[a] for a in bias.axes), q - k + bias.entries.shape[-1] // 2)]
        return at if bias.table is None else self._rows(bias.table, at, bias.rest)

    def _rows(self, table: fx.Node, at: Tensor, rest: Any) -> Tensor:
        return self.values[table][(at, *(self.grid.formula(i) for i in rest))]

    def cases(self, table: Any, dtype: torch.dtype) -> Tensor:
        found = torch.zeros([1] * len(self.grid.axes), dtype=dtype)
        for bits, leaf in table.rows.items():
            if leaf is not HIDDEN:
                assert isinstance(leaf, Sum)
                found = torch.where(self.grid.case(table, bits), self.grid.sum(leaf, dtype), found)
        return found

    def allowed(self) -> Tensor:
        """Queries that the check for blind ones lets through."""
        found = torch.ones([*self.grid.shape[:-1], 1], dtype=torch.bool)
        for check in self.form.checks:
            if isinstance(check, SeesKey):
                found = found & (~self.grid.blind(check.visible) | self.grid.truth(check.exempt))
        return found

    def eager(self) -> Tensor:
        grid = self._grid(QUERY, *self.width)
        return grid.tensor(self.form.node, self.form.result).expand(grid.shape)


# --- against eager -------------------------------------------------------------------------------------


def compare(module: fx.GraphModule, form: NormalForm, inputs: Sequence[Any], tolerance: float = 1e-9) -> str:
    """'same', or why nothing is claimed of the batch ('check…', 'blind', 'nan', 'outside'), or 'DIFFERENT …'."""
    given = [x.detach().clone().requires_grad_() if isinstance(x, Tensor) and x.requires_grad else x for x in inputs]
    values = values_of(module, given)
    broken = failed(form.checks, values)
    if broken is not None:
        return f"check: {broken}"
    executor = Executor(form, values)
    if form.dropout is not None:
        return "random"
    got, eager = executor.run(), executor.eager()
    largest = float(got.scores.detach().abs().max()) * abs(form.scale) if got.scores.numel() else 0.0
    if ASSUMES_BOUNDED in form.assumptions and not largest <= BOUND:
        return "outside"
    rows = got.allowed.reshape(got.allowed.shape[:-1] + (1,) * len(executor.width)).expand(eager.shape)
    if not bool(rows.any()):
        return "blind"
    if not bool(torch.isfinite(eager[rows]).all()):
        return "nan" if ASSUMES_EXP in form.assumptions else "DIFFERENT: eager is not finite"
    size = max(1.0, float(eager[rows].detach().abs().max()))
    error = float((got.result - eager)[rows].detach().abs().max()) / size
    if not error <= tolerance:
        return f"DIFFERENT values by {error:.1e}"
    return gradients(
        got.result, eager, rows, [x for x in given if isinstance(x, Tensor) and x.requires_grad], tolerance
    )


def gradients(got: Tensor, eager: Tensor, rows: Tensor, leaves: list[Tensor], tolerance: float) -> str:
    if not leaves:
        return "same"
    slope = torch.randn(eager.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(eager.dtype)

    def of(x: Tensor) -> list[Tensor]:
        loss = (torch.where(rows, x, 0.0) * slope).sum()
        found = torch.autograd.grad(loss, leaves, allow_unused=True, retain_graph=True)
        return [torch.zeros_like(x) if g is None else g for g, x in zip(found, leaves, strict=True)]

    mine, theirs = of(got), of(eager)
    if not all(bool(torch.isfinite(g).all()) for g in theirs):
        return "nan"
    size = max(1.0, math.sqrt(sum(float(g.norm()) ** 2 for g in theirs)))
    for at, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        error = float((a - b).norm()) / size
        if not error <= 10 * tolerance:
            return f"DIFFERENT gradient {at} by {error:.1e}"
    return "same"


__all__ = [
    "Blindness",
    "Executor",
    "NormalForm",
    "Refused",
    "attentions",
    "compare",
    "gradients",
    "one_attention",
    "traced",
]
