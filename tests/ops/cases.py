"""An op as a small padded model: rows come from a table by ids, stand somewhere in an operand, a loss reads the result.

A case is its text: 'nn.functional.glu|float64|3|0|pair:0:1|raw|mask|function' names entry, dtype, sample, the leaves
with rows, where rows stand in them, how they come in, how they are read, and the form of the call.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F

from .probe import only
from .samples import Entry, Sample, call, entries

IDS = 12
ENTRIES = ("raw", "masked", "zero")  # rows as they are, times the mask, with a zero row for the pad
EXITS = ("mask", "where", "last", "all")
TURNS = (
    ("raw", "mask"), ("masked", "all"), ("raw", "last"), ("masked", "mask"), ("zero", "all"), ("raw", "where"),
)  # fmt: skip
MOST_ROWS = 600


@dataclass(frozen=True)
class Place:
    """Where sequences and columns stand in a tensor: two dims, or one that is both ("flat"; "swap": columns first)."""

    kind: str
    first: int
    second: int
    B: int
    N: int

    @property
    def text(self) -> str:
        return f"{self.kind}:{self.first}:{self.second}:{self.B}:{self.N}"

    @staticmethod
    def parse(text: str) -> Place:
        kind, *numbers = text.split(":")
        return Place(kind, *(int(n) for n in numbers))

    def rest(self, shape: Sequence[int]) -> list[int]:
        taken = {self.first, self.second} if self.kind == "pair" else {self.first}
        return [s for d, s in enumerate(shape) if d not in taken]

    def put(self, x: torch.Tensor, rest: Sequence[int]) -> torch.Tensor:
        """(B, N, …) to the operand's own shape."""
        if self.kind == "pair":
            y, others = x.reshape(self.B, self.N, *rest), iter(range(2, len(rest) + 2))
            order = [{self.first: 0, self.second: 1}.get(d, -1) for d in range(len(rest) + 2)]
            return y.permute([next(others) if o < 0 else o for o in order])
        x = x.transpose(0, 1) if self.kind == "swap" else x
        return x.reshape(self.B * self.N, *rest).movedim(0, self.first)

    def row(self, b: int, n: int) -> int:
        return n * self.B + b if self.kind == "swap" else b * self.N + n


def places(shape: Sequence[int]) -> list[Place]:
    """Every way in which rows can stand in a tensor of this shape."""
    found = [
        Place("pair", i, j, shape[i], shape[j])
        for i, j in itertools.permutations(range(len(shape)), 2)
        if shape[i] >= 1 and shape[j] >= 2
    ]
    for d, size in enumerate(shape):
        b = next((b for b in (2, 3, 5, 7) if size % b == 0 and size // b >= 2), None)
        if b is not None:
            found += [Place(kind, d, 0, b, size // b) for kind in ("flat", "swap")]
    return [p for p in found if p.B * p.N <= MOST_ROWS]


@dataclass(frozen=True)
class Case:
    entry: Entry
    dtype: torch.dtype
    sample: Sample
    rows: tuple[int, ...]  # leaves that hold rows
    place: Place
    comes: str
    read: str
    form: str

    @property
    def text(self) -> str:
        rows = "+".join(map(str, self.rows))
        parts = [self.entry.name, str(self.dtype)[6:], self.sample.number, rows, self.place.text]
        return "|".join(map(str, [*parts, self.comes, self.read, self.form]))

    @staticmethod
    def parse(text: str) -> Case:
        name, dtype, number, rows, place, comes, read, form = text.split("|")
        entry, kind = entries()[name], getattr(torch, dtype)
        sample = entry.samples(kind)[int(number)]
        leaves = tuple(int(r) for r in rows.split("+"))
        return Case(entry, kind, sample, leaves, Place.parse(place), comes, read, form)

    @cached_property
    def rest(self) -> list[int]:
        return self.place.rest(self.sample.leaves[self.rows[0]].shape)

    # --- the function and what it is called with ---

    def tensors(self) -> dict[str, torch.Tensor]:
        """Tables of the leaves with rows, and the other floating leaves, as parameters; other tensors as they are."""
        g, width = torch.Generator().manual_seed(self.sample.number), math.prod(self.rest)
        found = {}
        for i, leaf in self.sample.tensors():
            if i not in self.rows:
                floating = leaf.is_floating_point()
                found[f"c{i}"] = leaf.detach().clone().requires_grad_() if floating else leaf.detach()
                continue
            flat = leaf.detach().flatten()
            table = flat[torch.randint(0, flat.numel(), (IDS, width), generator=g)]
            if leaf.is_complex():
                table = torch.view_as_real(table.resolve_conj()).flatten(1)
            table = table.double() - 0.5 if leaf.dtype == torch.bool else table.double()
            if self.comes == "zero":
                table[0] = 0
            found[f"t{i}"] = table.clone().requires_grad_()
        return found

    def value(self, ids: torch.Tensor, given: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        leaves = list(self.sample.leaves)
        for i, leaf in self.sample.tensors():
            leaves[i] = self._rowed(ids, given[f"t{i}"], leaf) if i in self.rows else given[f"c{i}"]
        return call(self.entry.form(self.form), leaves, self.sample.spec)

    def _rowed(self, ids: torch.Tensor, table: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
        x = F.embedding(ids, table)
        if self.comes == "masked":
            x = x * (ids != 0).unsqueeze(-1)
        if leaf.is_complex():
            x = torch.view_as_complex(x.reshape(self.place.B, self.place.N, -1, 2))
        x = x > 0 if leaf.dtype == torch.bool else x.to(leaf.dtype)
        return self.place.put(x, self.rest)

    # --- reading the result ---

    def found(self) -> list[Any]:
        """Where rows are in each result, by disturbing ids: a Place, or None where rows are mixed."""
        given = self.tensors()
        ids = torch.randint(1, IDS, (self.place.B, self.place.N), generator=torch.Generator().manual_seed(5))
        base = self.value(ids, given)
        spots = list(itertools.product(range(self.place.B), range(self.place.N)))
        changed = []
        for b, n in spots[:: max(1, len(spots) // 12)]:
            seen = [torch.zeros(y.shape, dtype=torch.bool) for y in base]
            for other in (1, 2, 3):
                now = ids.clone()
                now[b, n] = (ids[b, n] + other) % IDS
                ys = self.value(now, given)
                if [y.shape for y in ys] != [y.shape for y in base]:
                    raise ValueError("the data decides the shape")
                seen = [s | ((x != y) & ~((x != x) & (y != y))) for s, x, y in zip(seen, base, ys, strict=True)]
            changed.append((b, n, seen))
        return [self._where(y, [(b, n, s[k]) for b, n, s in changed]) for k, y in enumerate(base)]

    def _where(self, y: torch.Tensor, changed: list[tuple[int, int, torch.Tensor]]) -> Place | None:
        p = self.place
        for d in sorted(range(y.dim()), key=lambda d: d != p.first):  # rows that change nothing are where they were
            if p.kind != "pair" and y.shape[d] == p.B * p.N and all(only(m, d, p.row(b, n)) for b, n, m in changed):
                return Place(p.kind, d, 0, p.B, p.N)
        dims = [(i, j) for i, j in itertools.permutations(range(y.dim()), 2) if y.shape[i] == p.B and y.shape[j] == p.N]
        for i, j in sorted(dims, key=lambda at: at != (p.first, p.second)):
            if all(only(m, i, b) and only(m, j, n) for b, n, m in changed):
                return Place("pair", i, j, p.B, p.N)
        return None

    def loss(self, ids: torch.Tensor, given: dict[str, torch.Tensor], at: Sequence[Place | None]) -> torch.Tensor:
        total = torch.zeros(())
        for number, (y, place) in enumerate(zip(self.value(ids, given), at, strict=True)):
            y = torch.view_as_real(y.resolve_conj()) if y.is_complex() else y
            y = y.to(torch.float64)
            weights = torch.linspace(-1 - number, 1.5, y.numel()).reshape(y.shape)
            total = total + self._read(y * weights, place, ids != 0)
        return total

    def _read(self, y: torch.Tensor, place: Place | None, valid: torch.Tensor) -> torch.Tensor:
        if place is None or self.read == "all":
            return y.sum()
        if self.read == "last":
            z = y.movedim((place.first, place.second), (0, 1)) if place.kind == "pair" else y.movedim(place.first, 0)
            if place.kind != "pair":
                z = z.reshape(place.N, place.B, -1).transpose(0, 1) if place.kind == "swap" else z
                z = z.reshape(place.B, place.N, -1)
            return z[torch.arange(place.B), (valid.sum(1) - 1).clamp(min=0)].sum()
        shape = [1] * y.dim()
        if place.kind == "pair":
            shape[place.first], shape[place.second] = place.B, place.N
            mask = (valid if place.first < place.second else valid.transpose(0, 1)).reshape(shape)
        else:
            shape[place.first] = place.B * place.N
            mask = (valid.transpose(0, 1) if place.kind == "swap" else valid).reshape(shape)
        return torch.where(mask, y, 0.0).sum() if self.read == "where" else (y * mask).sum()


def batches(B: int, N: int) -> list[torch.Tensor]:
    """Right padding, holes with an empty sequence, full, one row, left padding."""
    g, column = torch.Generator().manual_seed(3), torch.arange(N)
    lengths = torch.randint(1, max(N, 2), (B,), generator=g)
    items = [torch.randint(1, IDS, (B, N), generator=g) for _ in range(4)]
    holes = items[1] * (torch.rand(B, N, generator=g) < 0.5)
    holes[0] = 0
    one = torch.zeros(B, N, dtype=torch.long)
    one[B - 1, N // 2] = 5
    return [items[0] * (column < lengths[:, None]), holes, items[2], one, items[3] * (column >= (N - lengths)[:, None])]
