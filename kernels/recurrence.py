"""Recurrent layers over rows: GRU, LSTM and plain cells, one layer in one direction.

Rows are packed, sequence by sequence, or a padded batch. Products with the input, and those of the gradients of both
weights, are made for all rows at once; only the product with the last state is made column by column.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .contract import INT64, REAL, Array, As, Ascending, Contract, Rule, Word
from .declare import as_given, declare, runs

ops = torch.ops.turbogr
State = tuple[Tensor, Tensor | None]  # hidden, and the cell of an LSTM


@dataclass(frozen=True)
class Cell:
    """One column of a recurrence.

    gates    blocks of the weights
    kept     blocks that the backward needs of each row
    forward  (products with the input, products with the state, state) -> (new state, what the backward needs)
    backward (gradients of the new state, what it needs, state) -> (gradients of the products with the input, of those
             with the state, and of the state beside those products)
    """

    gates: int
    kept: int
    forward: Callable[[Tensor, Tensor, State], tuple[State, Tensor]]
    backward: Callable[[State, Tensor, State], tuple[Tensor, Tensor, State]]


def _gru(x: Tensor, h: Tensor, state: State) -> tuple[State, Tensor]:
    size = state[0].shape[1]
    r, z = (x[:, : 2 * size] + h[:, : 2 * size]).sigmoid().split(size, 1)
    inner = h[:, 2 * size :]
    n = (x[:, 2 * size :] + r * inner).tanh()
    return ((state[0] - n) * z + n, None), torch.cat([r, z, n, inner], 1)


def _gru_backward(grad: State, kept: Tensor, state: State) -> tuple[Tensor, Tensor, State]:
    (g, _), (r, z, n, inner) = grad, kept.chunk(4, 1)
    dn = g * (1 - z) * (1 - n * n)
    dz = g * (state[0] - n) * z * (1 - z)
    dr = dn * inner * r * (1 - r)
    return torch.cat([dr, dz, dn], 1), torch.cat([dr, dz, dn * r], 1), (g * z, None)


def _lstm(x: Tensor, h: Tensor, state: State) -> tuple[State, Tensor]:
    assert state[1] is not None
    i, f, g, o = (x + h).chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cell = f * state[1] + i * g
    return (o * cell.tanh(), cell), torch.cat([i, f, g, o, cell], 1)


def _lstm_backward(grad: State, kept: Tensor, state: State) -> tuple[Tensor, Tensor, State]:
    assert state[1] is not None
    i, f, g, o, cell = kept.chunk(5, 1)
    bent = cell.tanh()
    dc = grad[0] * o * (1 - bent * bent)
    dc = dc if grad[1] is None else dc + grad[1]
    gates = (dc * g * i * (1 - i), dc * state[1] * f * (1 - f), dc * i * (1 - g * g), grad[0] * bent * o * (1 - o))
    both = torch.cat(gates, 1)
    return both, both, (torch.zeros_like(dc), dc * f)


def _tanh(x: Tensor, h: Tensor, state: State) -> tuple[State, Tensor]:
    y = (x + h).tanh()
    return (y, None), y


def _tanh_backward(grad: State, kept: Tensor, state: State) -> tuple[Tensor, Tensor, State]:
    d = grad[0] * (1 - kept * kept)
    return d, d, (torch.zeros_like(d), None)


def _relu(x: Tensor, h: Tensor, state: State) -> tuple[State, Tensor]:
    y = (x + h).relu()
    return (y, None), y


def _relu_backward(grad: State, kept: Tensor, state: State) -> tuple[Tensor, Tensor, State]:
    d = grad[0] * (kept > 0)
    return d, d, (torch.zeros_like(d), None)


CELLS = {
    "gru": Cell(3, 4, _gru, _gru_backward),
    "lstm": Cell(4, 5, _lstm, _lstm_backward),
    "tanh": Cell(1, 1, _tanh, _tanh_backward),
    "relu": Cell(1, 1, _relu, _relu_backward),
}


class Columns:
    """Rows in the order in which a recurrence takes them: column by column, longest sequence first."""

    def __init__(self, x: Tensor, offsets: Tensor | None) -> None:
        if offsets is None:
            sequences, columns = x.shape[:2]
            pairs = [(s * columns, (s + 1) * columns) for s in range(sequences)]
        else:
            pairs = runs(offsets)
        starts, ends = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).unbind(1)
        lengths, self.order = (ends - starts).sort(descending=True, stable=True)
        longest = int(lengths[0]) if len(pairs) else 0
        alive = torch.arange(longest)[:, None] < lengths
        self.sizes: list[int] = alive.sum(1).tolist()  # sequences that have a row in each column
        self.rows = (starts[self.order] + torch.arange(longest)[:, None])[alive]

    def __len__(self) -> int:
        return len(self.rows)


def recurrence(
    x: Tensor, hidden: Tensor, cell: Tensor | None, input_weight: Tensor, hidden_weight: Tensor,
    input_bias: Tensor | None, hidden_bias: Tensor | None, offsets: Tensor | None, kind: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """States of all rows, cells of all rows (of an LSTM), and what the backward needs, in the order of columns.

    x is (rows, features) with offsets of sequences, or (sequences, columns, features); rows that belong to no sequence
    are zero, and come last in what the backward needs. The state before the first row is (sequences, size).
    """
    how, size = CELLS[kind], hidden.shape[1]
    with as_given(x):
        columns = Columns(x, offsets)
        flat = x.reshape(-1, x.shape[-1])
        products = torch.nn.functional.linear(flat[columns.rows], input_weight, input_bias)
        state: State = (hidden[columns.order], None if cell is None else cell[columns.order])
        states, cells, kept = [], [], []
        at = 0
        for count in columns.sizes:
            state = state[0][:count], None if state[1] is None else state[1][:count]
            turned = torch.nn.functional.linear(state[0], hidden_weight, hidden_bias)
            state, needed = how.forward(products[at : at + count], turned, state)
            states.append(state[0])
            kept.append(needed)
            if state[1] is not None:
                cells.append(state[1])
            at += count
        shape = (*x.shape[:-1], size)
        kept.append(x.new_zeros(flat.shape[0] - len(columns), how.kept * size))
        out, none = x.new_zeros(flat.shape[0], size), x.new_zeros(0)
        return (
            _placed(states, columns, out).reshape(shape),
            _placed(cells, columns, torch.zeros_like(out)).reshape(shape) if cell is not None else none,
            torch.cat(kept),
        )


def _placed(parts: list[Tensor], columns: Columns, rows: Tensor) -> Tensor:
    if parts:
        rows[columns.rows] = torch.cat(parts)
    return rows


def recurrence_backward(
    grad: Tensor, grad_cells: Tensor | None, x: Tensor, hidden: Tensor, cell: Tensor | None, input_weight: Tensor,
    hidden_weight: Tensor, offsets: Tensor | None, kind: str, states: Tensor, kept: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x, the first hidden state and cell, both weights and both biases."""
    how, size = CELLS[kind], hidden.shape[1]
    with as_given(x):
        columns = Columns(x, offsets)
        flat = x.reshape(-1, x.shape[-1])[columns.rows]
        own = grad.reshape(-1, size)[columns.rows]
        own_cells = grad_cells.reshape(-1, size)[columns.rows] if grad_cells is not None and cell is not None else None
        before, before_cells = _before(columns, hidden, cell, states, kept, size)
        inputs, turned = x.new_zeros(len(columns), how.gates * size), x.new_zeros(len(columns), how.gates * size)
        carried, carried_cell = torch.zeros_like(hidden), None if cell is None else torch.zeros_like(cell)
        end = len(columns)
        for count in reversed(columns.sizes):
            here = slice(end - count, end)
            g = own[here] + carried[:count]
            c = None if carried_cell is None else carried_cell[:count]
            c = c if own_cells is None or c is None else c + own_cells[here]
            state = before[here], None if before_cells is None else before_cells[here]
            inputs[here], turned[here], beside = how.backward((g, c), kept[here], state)
            carried[:count] = turned[here] @ hidden_weight + beside[0]
            if carried_cell is not None and beside[1] is not None:
                carried_cell[:count] = beside[1]
            end -= count
        dx = torch.zeros_like(x).reshape(-1, x.shape[-1])
        dx[columns.rows] = inputs @ input_weight
        first, first_cell = torch.zeros_like(hidden), x.new_zeros(0) if cell is None else torch.zeros_like(cell)
        first[columns.order] = carried
        if carried_cell is not None:
            first_cell[columns.order] = carried_cell
        return (
            dx.reshape(x.shape), first, first_cell, inputs.mT @ flat, turned.mT @ before, inputs.sum(0), turned.sum(0),
        )  # fmt: skip


def _before(
    columns: Columns, hidden: Tensor, cell: Tensor | None, states: Tensor, kept: Tensor, size: int
) -> tuple[Tensor, Tensor | None]:
    """The state that each row starts from: that of the row before, or the first one."""
    first = columns.sizes[0] if columns.sizes else 0
    earlier = _earlier(columns)
    h = torch.cat([hidden[columns.order[:first]], states.reshape(-1, size)[columns.rows[earlier]]])
    if cell is None:
        return h, None
    return h, torch.cat([cell[columns.order[:first]], kept[earlier, -size:]])


def _earlier(columns: Columns) -> Tensor:
    """For each row from the second column on, the place of the row before it."""
    places, at = [], 0
    for count, following in zip(columns.sizes, columns.sizes[1:], strict=False):
        places.append(torch.arange(at, at + following))
        at += count
    return torch.cat(places) if places else torch.arange(0)


# --- declarations ------------------------------------------------------------------------------------


def _fake(
    x: Tensor, hidden: Tensor, cell: Tensor | None, input_weight: Tensor, hidden_weight: Tensor,
    input_bias: Tensor | None, hidden_bias: Tensor | None, offsets: Tensor | None, kind: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    size, rows = hidden.shape[1], x.shape[0] if offsets is not None else x.shape[0] * x.shape[1]
    shape = (*x.shape[:-1], size)
    cells = x.new_empty(shape) if cell is not None else x.new_empty(0)
    return x.new_empty(shape), cells, x.new_empty(rows, CELLS[kind].kept * size)


def _backward_fake(
    grad: Tensor, grad_cells: Tensor | None, x: Tensor, hidden: Tensor, cell: Tensor | None, input_weight: Tensor,
    hidden_weight: Tensor, offsets: Tensor | None, kind: str, states: Tensor, kept: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    bias = x.new_empty(input_weight.shape[0])
    first_cell = x.new_empty(0) if cell is None else torch.empty_like(cell)
    return (
        torch.empty_like(x), torch.empty_like(hidden), first_cell, torch.empty_like(input_weight),
        torch.empty_like(hidden_weight), bias, torch.empty_like(bias),
    )  # fmt: skip


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, hidden, cell, input_weight, hidden_weight, input_bias, hidden_bias, offsets, kind = inputs
    ctx.save_for_backward(x, hidden, cell, input_weight, hidden_weight, offsets, output[0], output[2])
    ctx.kind, ctx.biases = kind, (input_bias is not None, hidden_bias is not None)
    ctx.mark_non_differentiable(output[2])
    if cell is None:
        ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None, grad_cells: Tensor | None, _: Any) -> tuple[Any, ...]:
    x, hidden, cell, input_weight, hidden_weight, offsets, states, kept = ctx.saved_tensors
    grad = torch.zeros_like(states) if grad is None else grad
    dx, first, first_cell, wi, wh, bi, bh = ops.recurrence_backward(
        grad, grad_cells, x, hidden, cell, input_weight, hidden_weight, offsets, ctx.kind, states, kept
    )
    biased = ctx.biases
    return (
        dx, first, None if cell is None else first_cell, wi, wh, bi if biased[0] else None, bh if biased[1] else None,
        None, None,
    )  # fmt: skip


def _flops(x: Any, hidden: Any, cell: Any, input_weight: Any, hidden_weight: Any, *rest: Any, **more: Any) -> int:
    rows = x.numel() // x.shape[-1]
    return 2 * rows * (input_weight.numel() + hidden_weight.numel())


def _backward_flops(grad: Any, grad_cells: Any, *forward: Any, **more: Any) -> int:
    return 2 * _flops(*forward)


_GATES = {kind: cell.gates for kind, cell in CELLS.items()}
_KEPT = {kind: cell.kept for kind, cell in CELLS.items()}
_CONTRACT = Contract(
    Rule("(cell is not None) == (kind == 'lstm')", "an LSTM has a cell, and nothing else has", first=True),
    Rule("len(x.shape) == (3 if offsets is None else 2)", "x has 2 dims with offsets and 3 without, not {x.dim()}"),
    Rule("offsets is not None or not unlike(B[:1], (S,))", "x has {B[0]} sequences, and hidden {S}"),
    Rule(f"P == {_GATES}[kind] * H", "input_weight has {P} rows, which is no block of {H} for each gate"),
    nonzero="F H",
    kind=Word(tuple(CELLS)),
    x=Array("...B F", REAL),
    hidden=Array("S H", As("x")),
    cell=Array("S H", As("x")),
    input_weight=Array("P F", As("x")),
    hidden_weight=Array("P H", As("x")),
    offsets=Array("S+1", INT64, Ascending("B[0]")),
)

declare(
    "recurrence(Tensor x, Tensor hidden, Tensor? cell, Tensor input_weight, Tensor hidden_weight, "
    "Tensor? input_bias, Tensor? hidden_bias, Tensor? offsets, str kind) -> (Tensor, Tensor, Tensor)",
    _CONTRACT.extended(input_bias=Array("P", As("x")), hidden_bias=Array("P", As("x"))),
    reference=recurrence, fake=_fake, backward=_backward, save=_save, flops=_flops,
)  # fmt: skip
declare(
    "recurrence_backward(Tensor grad, Tensor? grad_cells, Tensor x, Tensor hidden, Tensor? cell, Tensor input_weight, "
    "Tensor hidden_weight, Tensor? offsets, str kind, Tensor states, Tensor kept) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _CONTRACT.extended(
        Rule(f"Q == {_KEPT}[kind] * H", "kept has {Q} columns, which is no block of {H} for each number that is kept"),
        Rule(
            "not unlike((K,), (B[0] if len(B) == 1 else B[0] * B[1],))", "kept has {K} rows, which are not those of x"
        ),
        grad=Array("...B H", As("x")),
        grad_cells=Array("...B H", As("x")),
        states=Array("...B H", As("x")),
        kept=Array("K Q", As("x")),
    ),
    reference=recurrence_backward, fake=_backward_fake, flops=_backward_flops,
)  # fmt: skip
