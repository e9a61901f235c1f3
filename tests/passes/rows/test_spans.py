"""Ops that run along rows: recurrent layers and their like live on the rows up to those that are read."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import turbogr_compile
from turbogr_compile import Instrument
from turbogr_compile.testing import Flops

SEQUENCES, COLUMNS, SIZE, ITEMS = 4, 12, 6, 20


class Remarks(Instrument):
    explains = True

    def __init__(self):
        self.packed, self.missed = [], []

    def finish(self, run):
        self.packed += [r.text for r in run.remarks if r.id == "packed"]
        self.missed += [r.text for r in run.remarks if r.kind == "missed"]


def batch(lengths):
    """Ids, lengths, a target per sequence and a target per row."""
    g = torch.Generator().manual_seed(sum(lengths))
    lengths = torch.tensor(lengths)
    valid = torch.arange(COLUMNS) < lengths[:, None]
    draw = torch.randint(1, ITEMS, (3, SEQUENCES, COLUMNS), generator=g)
    return draw[0] * valid, lengths, draw[1, :, 0], draw[2] * valid


BATCHES = [batch(n) for n in ([3, 5, 1, 2], [12, 1, 1, 4], [2, 2, 2, 2])]


class Model(nn.Module):
    def __init__(self, layer, readout, width=SIZE):
        super().__init__()
        torch.manual_seed(0)
        self.items, self.layer, self.readout = nn.Embedding(ITEMS, SIZE), layer, readout
        self.out = nn.Linear(width, ITEMS)
        self.double()

    def forward(self, ids, lengths, label, targets):
        return self.readout(self, self.layer(self.items(ids)), lengths, label, targets)


def at_last(model, found, lengths, label, targets):
    x = found[0] if isinstance(found, tuple) else found
    return F.cross_entropy(model.out(x[torch.arange(SEQUENCES), lengths - 1]), label)


def at_every(model, found, lengths, label, targets):
    x = found[0] if isinstance(found, tuple) else found
    return F.cross_entropy(model.out(x).flatten(0, 1), targets.flatten(), ignore_index=0)


def at_end_of_columns(model, found, lengths, label, targets):
    end = found[1][0] if isinstance(found[1], tuple) else found[1]
    return F.cross_entropy(model.out(end[-1]), label)


def stepped(run, model, b):
    model.zero_grad()
    loss = run(*b)
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in model.parameters()]


def compared(model):
    """Compiled and eager on every batch: how much arithmetic the first takes, and what was said."""
    torch._dynamo.reset()
    told = Remarks()
    run = turbogr_compile.compile(model, target="eager", on_error="raise", verify="strict", instruments=(told,))
    for b in BATCHES:
        torch.testing.assert_close(stepped(run, model, b), stepped(model, model, b), rtol=1e-9, atol=1e-12)
    with Flops() as found:
        run(*BATCHES[0])
    with Flops() as padded:
        model(*BATCHES[0])
    return found.total / padded.total, told


LAYERS = {
    "gru": lambda: nn.GRU(SIZE, SIZE, batch_first=True),
    "gru-two-layers": lambda: nn.GRU(SIZE, SIZE, num_layers=2, batch_first=True),
    "gru-without-bias": lambda: nn.GRU(SIZE, SIZE, bias=False, batch_first=True),
    "lstm": lambda: nn.LSTM(SIZE, SIZE, batch_first=True),
    "rnn-relu": lambda: nn.RNN(SIZE, SIZE, nonlinearity="relu", batch_first=True),
    "columns-first": lambda: ColumnsFirst(),
    "from-a-state": lambda: FromState(),
}


class ColumnsFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.GRU(SIZE, SIZE)

    def forward(self, x):
        return self.inner(x.transpose(0, 1))[0].transpose(0, 1)


class FromState(nn.Module):
    """The state before the first row is learned."""

    def __init__(self):
        super().__init__()
        self.inner, self.first = nn.LSTM(SIZE, SIZE, batch_first=True), nn.Parameter(torch.randn(SIZE))

    def forward(self, x):
        first = self.first.repeat(1, x.shape[0], 1)
        return self.inner(x, (first, first.tanh()))[0]


@pytest.mark.parametrize("readout", [at_last, at_every], ids=lambda f: f.__name__)
@pytest.mark.parametrize("layer", LAYERS)
def test_a_recurrent_layer_runs_over_the_rows_that_count(layer, readout):
    share, told = compared(Model(LAYERS[layer](), readout))
    assert told.packed and not told.missed
    assert share < 0.4  # 11 of 48 rows, and a product with every item


class Convolved(nn.Module):
    """Twice, with what it was added."""

    def __init__(self, inner, before=0, behind=0):
        super().__init__()
        self.inner, self.before, self.behind = inner, before, behind

    def forward(self, x):
        for _ in range(2):
            y = self.inner(F.pad(x.mT, (self.before, 0)))
            x = x + y[..., : y.shape[-1] - self.behind].mT.tanh()
        return x


class Thin(nn.Conv2d):
    """A convolution of images that are one row high."""

    def forward(self, x):
        return super().forward(x.unsqueeze(2)).squeeze(2)


class Windows(nn.Module):
    """Weighs the rows around each row."""

    def __init__(self):
        super().__init__()
        self.weigh = nn.Linear(SIZE, 3)

    def forward(self, x):
        near = F.unfold(x.mT.unsqueeze(-1), [3, 1], padding=[1, 0]).mT.reshape(*x.shape, 3)
        return x + (near @ self.weigh(x).softmax(-1).unsqueeze(-1)).squeeze(-1)


CONVOLUTIONS = {
    "same": (lambda: Convolved(nn.Conv1d(SIZE, SIZE, 3, padding=1)), 2),
    "same-by-name": (lambda: Convolved(nn.Conv1d(SIZE, SIZE, 4, padding="same", dilation=2)), 3),
    "causal": (lambda: Convolved(nn.Conv1d(SIZE, SIZE, 3, dilation=2), before=4), 0),
    "causal-cut-off": (lambda: Convolved(nn.Conv1d(SIZE, SIZE, 3, padding=4, dilation=2), behind=4), 0),
    "wider-than-the-batch": (lambda: Convolved(nn.Conv1d(SIZE, SIZE, 3, padding=13, dilation=13)), 9),
    "grouped": (lambda: Convolved(nn.Conv1d(SIZE, SIZE, 3, padding=1, groups=3)), 2),
    "by-channel": (lambda: Convolved(nn.Conv1d(SIZE, SIZE, 3, padding=1, groups=SIZE, bias=False)), 2),
    "thin-images": (lambda: Convolved(Thin(SIZE, SIZE, (1, 3)), before=2), 0),
    "windows": (Windows, 1),
    "one-column": (lambda: Convolved(nn.Conv1d(SIZE, SIZE, 1)), 0),
}


@pytest.mark.parametrize("layer", CONVOLUTIONS)
def test_a_convolution_runs_over_the_rows_that_count_and_their_neighbours(layer):
    make, halo = CONVOLUTIONS[layer]
    share, told = compared(Model(make(), at_every))
    assert told.packed and not [text for text in told.missed if "rows" in text]
    rows = 11 + 4 * halo  # of 48
    assert share <= (rows + 0.01) / 48


def test_a_convolution_over_features_keeps_rows_apart():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Conv1d(2, 2, 3, padding=1)

        def forward(self, x):
            return self.inner(x.reshape(-1, 2, SIZE // 2)).reshape(x.shape)

    share, told = compared(Model(Layer(), at_every))
    assert told.packed and share < 0.24


def test_strides_over_rows_are_not_followed():
    layer = Convolved(nn.Conv1d(SIZE, SIZE, 1, stride=1), 0)

    class Halved(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Conv1d(SIZE, SIZE, 2, stride=2)

        def forward(self, x):
            return x + self.inner(x.mT).repeat_interleave(2, -1).mT

    share, _ = compared(Model(nn.Sequential(layer, Halved()), at_every))
    assert share > 0.4


@pytest.mark.parametrize("layer", ["gru", "lstm"])
def test_the_state_behind_the_last_column_needs_them_all(layer):
    share, _ = compared(Model(LAYERS[layer](), at_end_of_columns))
    assert share == 1


def test_both_directions():
    """Read from the end, rows up to a row are those behind it, pads included."""
    layer = nn.GRU(SIZE, SIZE, batch_first=True, bidirectional=True)
    share, _ = compared(Model(layer, at_last, 2 * SIZE))
    assert 0.5 < share < 1


def test_between_layers_rows_are_dropped_as_elsewhere():
    """Another draw than eager's, and the same graph: no dropout, no difference."""
    layer = nn.GRU(SIZE, SIZE, num_layers=2, dropout=0.5, batch_first=True)
    model = Model(layer, at_last).eval()
    share, told = compared(model)
    assert told.packed and share < 0.4


class Along(nn.Module):
    """A linear layer, and an op along its rows."""

    def __init__(self, op):
        super().__init__()
        self.line, self.op = nn.Linear(SIZE, SIZE), op

    def forward(self, x):
        return self.op(self.line(x))


RUNNING = {
    "cumsum": lambda x: x.cumsum(1),
    "mean so far": lambda x: x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None],
    "cumprod": lambda x: x.cumprod(1),
    "cummax": lambda x: x.cummax(1).values,
    "where the minimum was": lambda x: x.cummin(1).indices + x,
    "columns last": lambda x: x.transpose(1, 2).logcumsumexp(-1).transpose(1, 2),
    "rows first": lambda x: x.transpose(0, 1).cumsum(0).transpose(0, 1),
    "in another type": lambda x: x.cumsum(1, dtype=torch.float32).double(),
}


@pytest.mark.parametrize("readout", [at_last, at_every], ids=lambda f: f.__name__)
@pytest.mark.parametrize("op", RUNNING)
def test_a_running_op_needs_the_rows_up_to_those_that_count(op, readout):
    share, told = compared(Model(Along(RUNNING[op]), readout))
    assert share < 0.4 and told.packed and not told.missed, (share, told.missed)


def test_a_sum_from_the_end_reads_pads():
    model = Model(Along(lambda x: x.flip(1).cumsum(1).flip(1)), at_every)
    share, _ = compared(model)
    assert share > 0.4  # the product with every item is packed, the line is not


# --- rows that a choice hides --------------------------------------------------------------------------


class Hiding(nn.Module):
    """What pads hold is replaced, and then every row is read."""

    def __init__(self, op, pool):
        super().__init__()
        torch.manual_seed(0)
        self.items, self.line, self.out = nn.Embedding(ITEMS, SIZE), nn.Linear(SIZE, SIZE), nn.Linear(SIZE, ITEMS)
        self.op, self.pool = op, pool
        self.double()

    def forward(self, ids, lengths, label, targets):
        x = self.op(self.line(self.items(ids)), (ids == 0)[..., None])
        return F.cross_entropy(self.out(self.pool(x)), label)


FILLED = {
    "masked_fill": lambda x, pad: x.masked_fill(pad, -1e9),
    "minus infinity": lambda x, pad: x.masked_fill(pad, float("-inf")),
    "a number that may be the largest": lambda x, pad: x.masked_fill(pad, 0.1),
    "where": lambda x, pad: torch.where(~pad, x, torch.tensor(-3.0, dtype=x.dtype)),
    "where not": lambda x, pad: torch.where(pad, -3.0, x),
    "from a table": lambda x, pad: torch.where(pad, torch.linspace(0, 1, x.shape[1], dtype=x.dtype)[:, None], x),
}
POOLS = {
    "max": lambda x: x.max(1).values,
    "amax": lambda x: x.amax(1).clamp(min=-5),
    "ordered": lambda x: x.sort(1).values[:, -2:].clamp(min=-5).mean(1),
    "logsumexp": lambda x: x.logsumexp(1),
    "median": lambda x: x.nan_to_num(neginf=-9).median(1).values,
}


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("fill", FILLED)
def test_rows_that_are_replaced_are_not_computed(fill, pool):
    share, told = compared(Hiding(FILLED[fill], POOLS[pool]))
    assert share < 0.45 and told.packed and not told.missed, (share, told.missed)


@pytest.mark.parametrize("shows", ["half of the features", "pads instead"])
def test_rows_that_are_shown_are_computed(shows):
    """The mask is about features, or hides the rows that count."""
    half = torch.arange(SIZE) < SIZE // 2
    hides = {"half of the features": lambda pad: pad & half, "pads instead": lambda pad: ~pad}[shows]
    share, _ = compared(Hiding(lambda x, pad: x.masked_fill(hides(pad), -1.0), POOLS["max"]))
    assert share > 0.75
