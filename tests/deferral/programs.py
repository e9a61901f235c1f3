"""Small models, batches, and the judge: the same user code around the eager model and around the compiled one."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree

from turbogr_compile.deferral.model import GRAPHS
from turbogr_compile.deferral.record import WAITING

V, D = 50, 16
LENGTHS, WIDTH = [3, 9, 5, 2], 12


def batch(lengths=LENGTHS, width=WIDTH, vocabulary=V, seed=0):
    generator = torch.Generator().manual_seed(seed)
    valid = torch.arange(width) < torch.tensor(lengths)[:, None]
    ids = torch.randint(1, vocabulary, valid.shape, generator=generator) * valid
    has_next = torch.arange(width) < torch.tensor(lengths)[:, None] - 1
    return ids, ids.roll(-1, 1) * has_next


IDS, Y = batch()
MASK = Y != 0


class SASRec(nn.Module):
    def __init__(self, vocabulary=V, dim=D, columns=160, drop=0.0, layers=1):
        super().__init__()
        self.items, self.places = nn.Embedding(vocabulary, dim, padding_idx=0), nn.Embedding(columns, dim)
        layer = nn.TransformerEncoderLayer(dim, 4, 2 * dim, drop, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(dim, vocabulary)

    def forward(self, ids):
        n = ids.shape[1]
        future = torch.ones(n, n, dtype=torch.bool).triu(1)
        x = self.items(ids) + self.places(torch.arange(n))
        return self.head(self.body(x, mask=future, src_key_padding_mask=ids == 0))


class Broken(SASRec):
    """A graph break in the middle."""

    def __init__(self, **settings):
        super().__init__(**{**settings, "layers": 2})

    def forward(self, ids):
        n = ids.shape[1]
        future, pad = torch.ones(n, n, dtype=torch.bool).triu(1), ids == 0
        x = self.body.layers[0](self.items(ids) + self.places(torch.arange(n)), future, pad)
        print(end="")
        return self.head(self.body.layers[1](x, future, pad))


class BrokenInALoop(SASRec):
    """A value is looked at in a loop: Dynamo lets the frame run, and what it calls is recorded call by call."""

    def forward(self, ids):
        n = ids.shape[1]
        future, pad = torch.ones(n, n, dtype=torch.bool).triu(1), ids == 0
        return self.head(self.layers(self.items(ids) + self.places(torch.arange(n)), future, pad))

    def layers(self, x, future, pad):
        for layer in self.body.layers:
            if bool(pad.any()):
                x = layer(x, future, pad)
        return x


class Twice(torch.autograd.Function):
    """A function that asks nobody for values, and has a backward of its own."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def cross_entropy(logits, target=Y):
    return F.cross_entropy(logits.view(-1, logits.size(-1)), target.view(-1), ignore_index=0)


def made(kind=SASRec, **settings):
    torch.manual_seed(0)
    return kind(**settings)


def compiled(model, **options):
    # Faults of the compiler are to be seen, and models are tiny: neither validation nor thrift hides anything.
    settings = {"target": "eager", "deferral": True, "verify": "fast", "worth": "always", **options}
    return torch.compile(model, backend="turbogr", options=settings)


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def worst(a: Any, b: Any) -> float:
    """Largest difference of two results, over all tensors and numbers in them."""
    first, second = (pytree.tree_leaves(x, is_leaf=lambda i: i is None) for x in (a, b))
    assert len(first) == len(second), (a, b)
    found = 0.0
    for x, y in zip(first, second, strict=True):
        if x is None or y is None:
            assert x is y
            continue
        x, y = (torch.as_tensor(v).detach().to(torch.float64) for v in (x, y))
        assert x.shape == y.shape, (x.shape, y.shape)
        assert torch.equal(x.isnan(), y.isnan())
        if x.numel():
            found = max(found, (x - y).nan_to_num().abs().max().item())
    return found


class Tower(nn.Module):
    """As little as a model can be: rows of logits out of rows of ids."""

    def __init__(self, vocabulary=V, dim=D, drop=0.0, half=False):
        super().__init__()
        self.half_precision = half  # a pair of its own: its parameters are float32
        self.items, self.places = nn.Embedding(vocabulary, dim, padding_idx=0), nn.Embedding(160, dim)
        self.up, self.drop, self.head = nn.Linear(dim, dim), nn.Dropout(drop), nn.Linear(dim, vocabulary)

    def forward(self, ids):
        x = self.items(ids) + self.places(torch.arange(ids.shape[1]))
        return self.head(self.drop(torch.tanh(self.up(x))))


@cache
def pair(kind, options, settings):
    """Eager model, its twin, and that one compiled: many programs share what is compiled for one."""
    theirs, ours = made(kind, **dict(settings)), made(kind, **dict(settings))
    return theirs, ours, compiled(ours, **dict(options)), copy.deepcopy(theirs.state_dict())


def fresh(kind=Tower, options=(), **settings):
    theirs, ours, called, state = pair(kind, tuple(options), tuple(settings.items()))
    for model in (theirs, ours):
        model.load_state_dict(state)
        model.zero_grad(set_to_none=True)
        model.train().requires_grad_(True)
    for graph in GRAPHS:
        graph.read_raw = 0
    WAITING.clear()
    return theirs, ours, called


def assert_same(code, tolerance=1e-10, kind=Tower, options=(), **settings):
    """`code(model, called)`: values it returns, and gradients it leaves, are eager's."""
    theirs, ours, called = fresh(kind, options, **settings)
    torch.manual_seed(1)
    expected = code(theirs, theirs)
    torch.manual_seed(1)
    found = code(ours, called)
    assert worst(expected, found) <= tolerance
    a, b = gradients(theirs), gradients(ours)
    assert a.keys() == b.keys()
    assert worst(a, b) <= tolerance
    return found
