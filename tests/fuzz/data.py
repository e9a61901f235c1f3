"""Inputs that generated programs may read: batches of every kind, parameters, buffers; each from a seed.

The first batch is the one a program is compiled for. Later ones differ from it in every respect that a data loader, or
an enemy of the compiler, may choose: other lengths, other ends, no item at all, numbers in pads that nobody should
read.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

IGNORED = -100
LONGEST = 16  # columns of tables and triangles where the number of columns is open


@dataclass(frozen=True)
class Sizes:
    """B sequences of N columns, D features in H heads, V ids; K candidates, M columns of a second sequence."""

    B: int = 3
    N: int = 6
    D: int = 4
    H: int = 2
    V: int = 9
    K: int = 3
    M: int = 5
    pad: int = 0
    open: bool = False  # is N a symbol of the compiled graph?
    many: bool = False  # is B one?

    @property
    def columns(self) -> int:
        """Of parameters and buffers."""
        return LONGEST if self.open else self.N


@dataclass(frozen=True)
class Batch:
    """Which positions hold an item, by three accounts that usually agree."""

    sizes: Sizes
    valid: torch.Tensor
    lens: torch.Tensor
    mask: torch.Tensor
    kind: str
    seed: int

    def noise(self, name: str) -> torch.Generator:
        return torch.Generator().manual_seed(hash_of(name) + 7919 * self.seed)


def hash_of(name: str) -> int:
    return sum((i + 1) * ord(c) for i, c in enumerate(name)) * 104729 % 1_000_003


# --- which positions are items ---------------------------------------------------------------------------


def _lengths(s: Sizes, g: torch.Generator, least: int = 1, most: int | None = None) -> torch.Tensor:
    most = max(least, s.N if most is None else most)
    return torch.randint(least, most + 1, (s.B,), generator=g)


def _prefix(s: Sizes, lens: torch.Tensor) -> torch.Tensor:
    return torch.arange(s.N) < lens[:, None]


def _right(s: Sizes, g: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    lens = _lengths(s, g, 1, max(1, s.N - 1))
    return lens, _prefix(s, lens)


def _left(s: Sizes, g: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    lens, valid = _right(s, g)
    return lens, valid.flip(1)


def _holes(s: Sizes, g: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    valid = torch.rand(s.B, s.N, generator=g) < 0.6
    return valid.sum(1), valid


def _full(s: Sizes, g: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.full((s.B,), s.N), torch.ones(s.B, s.N, dtype=torch.bool)


def _some_empty(s: Sizes, g: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    lens = _lengths(s, g, 1, max(1, s.N - 1)) * (torch.arange(s.B) % 2)
    return lens, _prefix(s, lens)


def _empty(s: Sizes, g: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(s.B, dtype=torch.long), torch.zeros(s.B, s.N, dtype=torch.bool)


def _one_each(s: Sizes, g: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    lens = torch.ones(s.B, dtype=torch.long)
    return lens, _prefix(s, lens)


KINDS: dict[str, Callable[[Sizes, torch.Generator], tuple[torch.Tensor, torch.Tensor]]] = {
    "right": _right, "left": _left, "holes": _holes, "full": _full, "some-empty": _some_empty, "empty": _empty,
    "one-each": _one_each, "disagree": _right, "stray": _right, "huge-pads": _right, "nan-pads": _right,
    "inf-pads": _left, "blind": _holes, "all-pairs": _left, "no-pairs": _right, "wide": _right, "narrow": _left,
    "bad-id": _right, "late": _left, "more": _right, "fewer": _left, "grey": _right, "masked-out": _left,
    "masked-in": _right, "long": _right, "same-time": _right, "bad-target": _right,
    "turned": _right,
}  # fmt: skip
SANE = (
    "right",
    "right",
    "right",
    "right",
    "left",
    "holes",
    "one-each",
)  # of the first batch
LATER = tuple(k for k in KINDS if k not in ("bad-id", "bad-target", "wide", "narrow", "more", "fewer", "turned"))
OTHER_WIDTHS = {"wide": 3, "narrow": -2}  # only where N is open
OTHER_COUNTS = {"more": 2, "fewer": -1}  # only where B is


def make_batch(kind: str, seed: int, sizes: Sizes) -> Batch:
    if sizes.open and kind in OTHER_WIDTHS:
        sizes = replace(sizes, N=max(2, sizes.N + OTHER_WIDTHS[kind]))
    if sizes.many and kind in OTHER_COUNTS:
        sizes = replace(sizes, B=max(2, sizes.B + OTHER_COUNTS[kind]))
    g = torch.Generator().manual_seed(seed)
    lens, valid = KINDS[kind](sizes, g)
    mask = valid
    if kind in ("masked-out", "masked-in"):
        mask = torch.full_like(valid, kind == "masked-in")
    if kind == "long":
        lens = lens + sizes.N * (torch.arange(len(lens)) % 2)
    if kind == "disagree":
        mask = valid ^ (torch.rand(valid.shape, generator=g) < 0.25)
        lens = (lens + torch.randint(-1, 2, lens.shape, generator=g)).clamp(0, sizes.N)
    return Batch(sizes, valid, lens, mask, kind, seed)


# --- tensors of a batch ----------------------------------------------------------------------------------


def _ints(b: Batch, name: str, low: int, high: int, *shape: int) -> torch.Tensor:
    return torch.randint(low, max(high, low + 1), shape, generator=b.noise(name))


def _floats(b: Batch, name: str, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=b.noise(name), dtype=torch.float64) * 0.7


def _ids(b: Batch) -> torch.Tensor:
    s = b.sizes
    items = _ints(b, "ids", 1, s.V - 1, s.B, s.N)
    ids = torch.where(b.valid, items, s.pad)
    if b.kind == "bad-id" and not bool(b.valid.all()):
        ids[tuple((~b.valid).nonzero()[-1].tolist())] = s.V + 90
    return ids


def _spoiled(b: Batch, x: torch.Tensor) -> torch.Tensor:
    """With what only these kinds of batches have in their pads."""
    number = {"huge-pads": 30.0, "nan-pads": math.nan, "inf-pads": math.inf}.get(b.kind)
    return x if number is None else x.masked_fill(~b.valid.reshape(b.valid.shape + (1,) * (x.dim() - 2)), number)


def _pairs(b: Batch) -> torch.Tensor:
    s = b.sizes
    if b.kind in ("all-pairs", "no-pairs"):
        return torch.full((s.B, s.N, s.N), b.kind == "all-pairs")
    seen = (torch.rand(s.B, s.N, s.N, generator=b.noise("pairs")) < 0.7) | torch.eye(s.N, dtype=torch.bool)
    if b.kind == "blind":
        seen[:, : (s.N + 1) // 2] = torch.ones(s.N, s.N, dtype=torch.bool).triu(1)[: (s.N + 1) // 2]
    return seen


def _times(b: Batch) -> torch.Tensor:
    step = 500 if b.kind in ("late", "bad-id") else 1 if b.kind == "same-time" else 12
    return _ints(b, "times", 0, step, b.sizes.B, b.sizes.N).cumsum(1)


def _targets(b: Batch, ignored: int) -> torch.Tensor:
    s = b.sizes
    labelled = b.valid
    if b.kind in ("stray", "disagree"):
        labelled = b.valid | (torch.rand(b.valid.shape, generator=b.noise("stray")) < 0.4)
    targets = torch.where(labelled, _ints(b, "tgt", 1, s.V, s.B, s.N), ignored)
    if b.kind == "bad-target" and not bool(b.valid.all()):
        targets[tuple((~b.valid).nonzero()[-1].tolist())] = s.V + 90
    return targets


def _last(b: Batch) -> torch.Tensor:
    where = torch.arange(b.sizes.N) * b.valid
    return where.amax(1)


def _weights(b: Batch) -> torch.Tensor:
    w = torch.rand(b.sizes.B, b.sizes.N, generator=b.noise("wts"), dtype=torch.float64) + 0.5
    return _spoiled(b, w * b.valid if b.kind != "stray" else w)


def _grey(b: Batch, x: torch.Tensor, number: float) -> torch.Tensor:
    """Masks of numbers, some of which are neither zero nor one in these batches."""
    some = torch.rand(x.shape, generator=b.noise("grey")) < 0.4
    return x.masked_fill(some & (x != 0), number) if b.kind == "grey" else x


BATCH: dict[str, Callable[[Batch], torch.Tensor]] = {
    "ids": _ids,
    "lens": lambda b: b.lens,
    "mask": lambda b: b.mask,
    "maskf": lambda b: _grey(b, b.mask.double(), 0.25),
    "maski": lambda b: _grey(b, b.mask.long(), 2),
    "masku": lambda b: _grey(b, b.mask.byte(), 255),
    "feats": lambda b: _spoiled(b, _floats(b, "feats", b.sizes.B, b.sizes.N, b.sizes.D) * b.valid[..., None]),
    "raw": lambda b: _spoiled(b, _floats(b, "raw", b.sizes.B, b.sizes.N, b.sizes.D)),
    "times": _times,
    "pos": lambda b: torch.rand(b.sizes.B, b.sizes.N, generator=b.noise("pos")).argsort(1),
    "perm": lambda b: torch.rand(b.sizes.N, generator=b.noise("perm")).argsort(),
    "tgt": lambda b: _targets(b, 0),
    "lab": lambda b: _targets(b, IGNORED),
    "label": lambda b: _ints(b, "label", 1, b.sizes.V, b.sizes.B),
    "idx": lambda b: _ints(b, "idx", 0, b.sizes.N, b.sizes.B, b.sizes.K),
    "pairs": _pairs,
    "pairsf": lambda b: _grey(b, _pairs(b).double(), 0.5),
    "wts": _weights,
    "soft": lambda b: _floats(b, "soft", b.sizes.B, b.sizes.N, b.sizes.V).softmax(-1),
    "y": lambda b: _ints(b, "y", 0, 2, b.sizes.B, b.sizes.N).double(),
    "cids": lambda b: _ints(b, "cids", 0, b.sizes.V, b.sizes.B, b.sizes.M) * _ints(b, "c", 0, 2, b.sizes.B, b.sizes.M),
    "neg": lambda b: _ints(b, "neg", 1, b.sizes.V, b.sizes.B, b.sizes.N, b.sizes.K),
    "shared": lambda b: _ints(b, "shared", 1, b.sizes.V, b.sizes.K),
    "last": _last,
    "each": lambda b: torch.arange(b.sizes.B).flip(0) if b.kind == "turned" else torch.arange(b.sizes.B),
    "flat": lambda b: torch.arange(b.sizes.B) * b.sizes.N + _last(b),
    "lastx": lambda b: _last(b)[:, None, None].expand(-1, 1, b.sizes.D),
    "idxx": lambda b: BATCH["idx"](b)[..., None].expand(-1, -1, b.sizes.D),
}
OF_COLUMNS = {  # dims that are columns
    "ids": (1,), "mask": (1,), "maskf": (1,), "maski": (1,), "masku": (1,), "feats": (1,), "raw": (1,), "times": (1,),
    "pos": (1,), "perm": (0,), "tgt": (1,), "lab": (1,), "pairs": (1, 2), "pairsf": (1, 2), "wts": (1,), "soft": (1,),
    "y": (1,), "neg": (1,),
}  # fmt: skip
OF_SEQUENCES = {n: (0,) for n in BATCH if n not in ("perm", "shared")}
WITH_GRADIENT = ("feats",)  # inputs that require a gradient themselves
TABLES = ("E", "E2")
LOUD = (*TABLES, "feats", "raw", "P")  # what scores are made of


# --- parameters and buffers ------------------------------------------------------------------------------

PARAMETERS: dict[str, Callable[[Sizes], tuple[int, ...]]] = {
    "E": lambda s: (s.V, s.D), "E2": lambda s: (s.V, s.D), "P": lambda s: (s.columns, s.D), "Q": lambda s: (s.D, s.D),
    "Kw": lambda s: (s.D, s.D), "Vw": lambda s: (s.D, s.D), "O": lambda s: (s.D, s.D), "W": lambda s: (s.D, s.V),
    "w": lambda s: (s.D,), "rel": lambda s: (2 * s.columns,), "Tb": lambda s: (64,), "gain": lambda s: (s.D,),
    "off": lambda s: (s.D,), "A": lambda s: (s.columns, s.columns), "temp": lambda s: (),
    "Win": lambda s: (3 * s.D, s.D), "Bin": lambda s: (3 * s.D,), "sink": lambda s: (s.H,),
}  # fmt: skip
BUFFERS: dict[str, Callable[[Sizes], torch.Tensor]] = {
    "tri": lambda s: torch.ones(s.columns, s.columns, dtype=torch.bool).tril(),
    "trif": lambda s: torch.full((s.columns, s.columns), -math.inf, dtype=torch.float64).triu(1),
    "ema": lambda s: torch.zeros(s.D, dtype=torch.float64),
    "one": lambda s: torch.ones((), dtype=torch.float64),
}
NAMES = (*BATCH, *PARAMETERS, *BUFFERS)


def fixed(name: str, sizes: Sizes, seed: int, loud: float = 1.0) -> torch.Tensor:
    """A parameter or buffer; `loud` scales embeddings, so that scores leave what finite masks are assumed to hide."""
    if name in BUFFERS:
        return BUFFERS[name](sizes)
    g = torch.Generator().manual_seed(hash_of(name) + seed)
    value = torch.randn(PARAMETERS[name](sizes), generator=g, dtype=torch.float64) * 0.7
    if name == "temp":
        value = value.abs() + 0.5
    return value * (loud if name in TABLES else 1.0)
