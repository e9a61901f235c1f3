"""Recurrent layers over rows, against torch's own layers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import turbogr_compile.kernels  # noqa: F401  (defines the ops)

ops = torch.ops.turbogr
LAYERS = {
    "gru": nn.GRU, "lstm": nn.LSTM, "tanh": nn.RNN, "relu": lambda *a, **k: nn.RNN(*a, nonlinearity="relu", **k),
}  # fmt: skip
LENGTHS = [3, 0, 5, 1, 5]


def layer(kind, bias=True):
    torch.manual_seed(0)
    return LAYERS[kind](4, 3, bias=bias, batch_first=True).double()


def weights(made):
    found = dict(made.named_parameters())
    return [found["weight_ih_l0"], found["weight_hh_l0"], found.get("bias_ih_l0"), found.get("bias_hh_l0")]


def states(kind):
    hidden = torch.randn(len(LENGTHS), 3, dtype=torch.float64, requires_grad=True)
    return hidden, torch.randn_like(hidden).requires_grad_() if kind == "lstm" else None


def expected(made, x, hidden, cell):
    first = hidden[None] if cell is None else (hidden[None], cell[None])
    return made(x, first)


def gradients(loss, *tensors):
    return torch.autograd.grad(loss, [t for t in tensors if t is not None])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", LAYERS)
def test_a_padded_batch(kind, bias):
    made, (hidden, cell) = layer(kind, bias), states(kind)
    x = torch.randn(len(LENGTHS), 6, 4, dtype=torch.float64, requires_grad=True)
    out, cells, _ = ops.recurrence(x, hidden, cell, *weights(made), None, kind)
    wanted, last = expected(made, x, hidden, cell)
    torch.testing.assert_close(out, wanted)
    share, inputs = torch.randn_like(out), (x, hidden, cell, *weights(made))
    loss, same = (out * share).sum(), (wanted * share).sum()
    if kind == "lstm":
        torch.testing.assert_close(cells[:, -1], last[1][0])
        loss, same = loss + (cells[:, -1] ** 2).sum(), same + (last[1] ** 2).sum()
    torch.testing.assert_close(gradients(loss, *inputs), gradients(same, *inputs))


@pytest.mark.parametrize("kind", LAYERS)
def test_packed_rows(kind):
    """Each sequence alone; rows behind the last sequence are zero."""
    made, (hidden, cell) = layer(kind), states(kind)
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0)
    x = torch.randn(int(offsets[-1]) + 2, 4, dtype=torch.float64, requires_grad=True)
    out, _, _ = ops.recurrence(x, hidden, cell, *weights(made), offsets, kind)
    parts = []
    for s, length in enumerate(LENGTHS):
        if length:
            own = slice(int(offsets[s]), int(offsets[s + 1]))
            one = expected(made, x[None, own], hidden[s : s + 1], None if cell is None else cell[s : s + 1])
            parts.append(one[0][0])
    wanted = torch.cat([*parts, x.new_zeros(2, 3)])
    torch.testing.assert_close(out, wanted)
    share, inputs = torch.randn_like(out), (x, hidden, cell, *weights(made))
    found = gradients((out * share).sum(), *inputs)
    torch.testing.assert_close(found, gradients((wanted * share).sum(), *inputs))


@pytest.mark.parametrize("kind", LAYERS)
def test_the_declaration(kind):
    made, (hidden, cell) = layer(kind), states(kind)
    x = torch.randn(len(LENGTHS), 6, 4, dtype=torch.float64, requires_grad=True)
    args = (x, hidden, cell, *weights(made), None, kind)
    torch.library.opcheck(ops.recurrence.default, args, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("kind", LAYERS)
def test_the_backward_is_given_a_row_for_each_of_x(kind):
    """Also for those that belong to no sequence: what is kept is as large as the fake says."""
    made, (hidden, cell) = layer(kind), states(kind)
    offsets = torch.tensor([1, *LENGTHS]).cumsum(0)
    x = torch.randn(int(offsets[-1]) + 2, 4, dtype=torch.float64)
    args = (x, hidden, cell, *weights(made), offsets, kind)
    torch.library.opcheck(ops.recurrence.default, args, test_utils=("test_schema", "test_faketensor"))
    out, _, kept = ops.recurrence(*args)
    assert kept.shape[0] == x.shape[0]
    given = (torch.ones_like(out), None, x, hidden, cell, *weights(made)[:2], offsets, kind, out)
    ops.recurrence_backward(*given, kept)
    for wrong in (kept[:-1], kept[:0], torch.cat([kept, kept])):
        with pytest.raises(ValueError, match=f"kept has {len(wrong)} rows, which are not those of x"):
            ops.recurrence_backward(*given, wrong)


def test_no_rows():
    made, (hidden, _) = layer("gru"), states("gru")
    x = torch.zeros(0, 4, dtype=torch.float64, requires_grad=True)
    out, _, _ = ops.recurrence(x, hidden, None, *weights(made), torch.zeros(6, dtype=torch.int64), "gru")
    assert out.shape == (0, 3)
    assert not torch.autograd.grad(out.sum() + hidden.sum() * 0, weights(made)[0])[0].any()


def test_wrong_calls_are_named():
    made, (hidden, _) = layer("gru"), states("gru")
    x = torch.zeros(5, 6, 4, dtype=torch.float64)
    with pytest.raises(ValueError, match="kind must be one of gru, lstm, tanh, relu"):
        ops.recurrence(x, hidden, None, *weights(made), None, "mlp")
    with pytest.raises(ValueError, match="an LSTM has a cell"):
        ops.recurrence(x, hidden, hidden, *weights(made), None, "gru")
    with pytest.raises(ValueError, match=r"input_weight.shape\[1\] must be 3"):
        ops.recurrence(x[..., :3], hidden, None, *weights(made), None, "gru")
