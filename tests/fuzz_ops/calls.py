"""Calls of ops, made from their contracts: valid ones, almost valid ones, and ones that are neither.

Calls come in families, since most of the time goes into making a valid one and computing its reference: first the valid
call, then its tensors elsewhere in memory, for which the same result is right, then calls with an argument or two
changed, then one of anything.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from turbogr_compile.kernels import contract as words
from turbogr_compile.kernels.contract import Contract, Dim, Shape
from turbogr_compile.kernels.declare import CONTRACTS, REFERENCES
from turbogr_compile.kernels.recurrence import CELLS

ops = torch.ops.turbogr
# Ops that need tables of their own or ranks, that torch's own ops are made for, or that answer with an error by design.
ELSEWHERE = {"sharded_lookup", "sharded_push", "fetch_rows", "keep_rows", "keep_sent", "stale_rows", "grouped_mm"} | {
    "own_lookup",
    "half_of_table",
    "own_keep",
    "own_keep_dense",
    "own_keep_scores",
    "own_table",
}
ELSEWHERE |= {"leave_rows", "left_rows"}
OPS = sorted(set(CONTRACTS) - ELSEWHERE)
SIZES = (0, 1, 1, 2, 2, 3, 3, 4, 5, 7, 8, 9, 15, 16, 17, 24, 33, 40, 65)
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.bool)
COLUMNS = 6  # of sequences, in masks and biases
NUMBERS = (math.nan, math.inf, -math.inf, 0.0, -0.0, -1.0, 1e-300, 1e300, 1e-8, 2.0)
FAMILY = ("valid", "again", "again", "again", "almost", "almost", "almost", "hostile")
WHOLES = (0, 1, -1, 2, 3, 2**31, -(2**31), 2**53, 2**62, 2**63 - 1, -(2**63))


@dataclass
class Call:
    """One call; `kind` says how it was made, not whether the contract holds."""

    op: str
    kind: str
    arguments: list[Any]
    like: Call | None = None  # one of the same numbers, and so of the same result
    result: Any = None  # that of the reference, once it is known
    finite: bool | None = None  # whether all numbers are, once it is known


def call(case: int) -> Call:
    """Everything follows from the number of the case."""
    family, member = divmod(case, len(FAMILY))
    maker, kind = Maker(case), FAMILY[member]
    if kind == "hostile":
        return maker.hostile()
    valid = first(family)
    if kind == "again":
        return Call(valid.op, kind, [maker.moved(x) for x in valid.arguments], valid)
    return valid if kind == "valid" else maker.almost(valid)


@lru_cache(maxsize=1)
def first(family: int) -> Call:
    return Maker(family * len(FAMILY)).valid()


@lru_cache(maxsize=1)
def pool() -> Tensor:
    """Random numbers to cut from: making them anew would be a third of a call."""
    return torch.randn(1 << 18, generator=torch.Generator().manual_seed(0))


class Maker:
    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)

    def valid(self) -> Call:
        op = self.chance.choice(OPS)
        return Call(op, "valid", self.arguments(op, CONTRACTS[op], schema(op)))

    def almost(self, valid: Call) -> Call:
        arguments, kinds = list(valid.arguments), [str(a.type) for a in schema(valid.op).arguments]
        for _ in range(self.chance.choice((1, 1, 1, 2))):
            at = self.chance.randrange(len(arguments))
            arguments[at] = self.changed(arguments[at], kinds[at])
        return Call(valid.op, "almost", arguments)

    def hostile(self) -> Call:
        op = self.chance.choice(OPS)
        return Call(op, "hostile", [self.anything(str(a.type)) for a in schema(op).arguments])

    # --- valid ---

    def arguments(self, op: str, contract: Contract, schema: Any) -> list[Any]:
        """Arguments of which the contract holds; where rules that are not of sizes stand against it, the last try."""
        for _ in range(20):
            found = _Valid(self, contract, schema).arguments()
            try:
                contract.check(*found)
            except (ValueError, IndexError):
                continue
            return derived(op, found)
        return found

    def numbers(self, *size: int) -> Tensor:
        count, numbers = math.prod(size), pool()
        if count > len(numbers):
            return torch.randn(size, generator=torch.Generator().manual_seed(self.chance.getrandbits(60)))
        start = self.chance.randint(0, len(numbers) - count)
        return numbers[start : start + count].clone().view(size)  # with an end of its own, for the sanitizer

    def wholes(self, below: int, *size: int) -> list[int]:
        return self.chance.choices(range(max(below, 1)), k=math.prod(size))

    def moved(self, x: Any) -> Any:
        if isinstance(x, list):
            return [self.moved(part) for part in x]
        return self.laid_out(x) if isinstance(x, Tensor) else x

    def laid_out(self, x: Tensor) -> Tensor:
        """The same numbers, elsewhere in memory."""
        way = self.chance.randrange(6)
        if way == 0 and x.dim() >= 2:
            return x.transpose(0, -1).contiguous().transpose(0, -1)
        if way == 1 and x.dim():
            return torch.stack([x, x], -1)[..., 0]
        if way == 2 and x.dim():
            return torch.cat([x[:1], x, x[:1]])[min(1, x.shape[0]) : min(1, x.shape[0]) + x.shape[0]]
        return x

    # --- not valid ---

    def changed(self, x: Any, kind: str) -> Any:
        if isinstance(x, Tensor):
            return self.changed_tensor(x)
        if "List" in kind:
            return self.chance.choice(([], [*x, *x[:1]], x[1:], [*x[:1], *x])) if x else x
        return self.anything(kind)

    def changed_tensor(self, x: Tensor) -> Any:
        chance = self.chance
        way = chance.randrange(9)
        if way == 0:
            return None
        if way == 1:
            return x.to("meta")
        if way == 2:
            return x.to(chance.choice(DTYPES))
        if way == 3:
            return x[None] if chance.random() < 0.5 or not x.dim() else x[0] if x.shape[0] else x.reshape(-1)
        if way in (4, 5) and x.dim():
            dim = chance.randrange(x.dim())
            more = x.narrow(dim, 0, 1) if x.shape[dim] else x.new_zeros([*x.shape[:dim], 1, *x.shape[dim + 1 :]])
            return torch.cat([x, more], dim) if way == 4 else x.narrow(dim, 0, max(x.shape[dim] - 1, 0)).clone()
        if way == 6:
            return x.new_zeros([0 if chance.random() < 0.5 else size for size in x.shape])
        if x.numel() and x.dtype in (torch.int64, torch.int32):
            x = x.clone(memory_format=torch.contiguous_format)
            worst = chance.choice([v for v in WHOLES if x.dtype == torch.int64 or abs(v) < 2**31])
            x.view(-1)[chance.randrange(x.numel())] = worst
        elif x.numel() and x.is_floating_point():
            x = x.clone(memory_format=torch.contiguous_format)
            x.view(-1)[chance.randrange(x.numel())] = float(torch.tensor(chance.choice(NUMBERS)).to(x.dtype))
        return x

    def anything(self, kind: str) -> Any:
        chance = self.chance
        if "Tensor" in kind and "List" in kind:
            return [self.any_tensor() for _ in range(chance.randrange(4))]
        if "Tensor" in kind:
            return None if chance.random() < 0.2 else self.any_tensor()
        if "List" in kind:
            value = (lambda: chance.random() < 0.5) if "bool" in kind else (lambda: chance.choice((*WHOLES, 3, 4)))
            return [value() for _ in range(chance.randrange(6))]
        if "float" in kind:
            return chance.choice(NUMBERS)
        if "bool" in kind:
            return chance.random() < 0.5
        if "int" in kind.lower():
            return chance.choice(WHOLES)
        return chance.choice(("", "softmax", "silu", "bce", "gru", "lstm", "\0", "x" * 99))

    def any_tensor(self) -> Tensor:
        size = [self.chance.choice((0, 1, 2, 3, 5)) for _ in range(self.chance.randrange(5))]
        return self.laid_out((self.numbers(*size) * 3).to(self.chance.choice(DTYPES)))


class _Valid:
    """One attempt at arguments for a contract: sizes first, then tensors of those sizes."""

    def __init__(self, maker: Maker, contract: Contract, schema: Any) -> None:
        self.maker, self.chance, self.contract, self.schema = maker, maker.chance, contract, schema
        self.sizes: dict[str, Any] = {}
        self.found: dict[str, Any] = {}
        self.dtypes: dict[str, torch.dtype] = {}

    def arguments(self) -> list[Any]:
        types = {a.name: str(a.type) for a in self.schema.arguments}
        # Numbers may be sizes of tensors.
        late = (words.Array, words.Parts)
        order = sorted(self.contract.arguments.items(), key=lambda item: isinstance(item[1], late))
        for name in types:
            if name not in self.contract.arguments:
                self.found[name] = self.free(types[name])
        absent = self.absent({name for name, kind in types.items() if kind.startswith("Optional")})
        for name, what in order:
            if isinstance(what, late) and not self.found.get(""):
                self.found[""] = self.aim(absent)
            self.found[name] = None if name in absent else self.make(name, what)
        return [self.found[name] for name in types]

    def absent(self, optional: set[str]) -> set[str]:
        """Optional arguments that are not given; some come together."""
        absent = {name for name in sorted(optional) if self.chance.random() < 0.5}
        for rule in self.contract.rules:
            if isinstance(rule, words.Rule) and rule.message.endswith(" come together"):
                names = set(rule.message.removesuffix(" come together").split(" and "))
                absent = absent | names if self.chance.random() < 0.5 else absent - names
        return absent

    def aim(self, absent: set[str]) -> bool:
        """Sizes that rules tie to each other, which chance would seldom find."""
        for rule in self.contract.rules:
            if isinstance(rule, words.Entries):
                self.sizes[rule.what.below] = self.chance.choice((1, COLUMNS, COLUMNS + 3))
            elif isinstance(rule, words.Distances):
                self.sizes[rule.below] = COLUMNS + self.chance.randrange(3)
        known = self.contract.arguments
        if "sink" in known and self.found["activation"] != "softmax":
            absent.add("sink")
        if "log_sum" in known and self.found.get("activation") is not None:
            softmax = self.found["activation"] == "softmax"
            self.sizes["L"] = [self.size("Tq"), self.size("G") * self.size("M")] if softmax else [0]
        if "query" in known and "table" in known:
            query = torch.float32 if "half" in known and "half" not in absent else self.chance.choice(words.REAL)
            narrow = query is torch.float32 and ("half" not in known or "half" in absent) and self.chance.random() < 0.3
            self.dtypes |= {"query": query, "table": self.chance.choice(words.HALF) if narrow else query}
        if "half" in known:
            absent |= {"places", "scales"} if "half" in absent else set()
            self.sizes["N"] = self.size("V") if "places" in absent else self.size("N")
            self.sizes["S"] = self.chance.choice([n for n in range(9) if words.equal_blocks(self.size("N"), n)])
        if "share" in known and self.found.get("mean"):
            absent.add("share")
        if self.contract.op.startswith("recurrence"):
            kind, states = self.found["kind"], self.size("S")
            self.sizes["P"] = CELLS[kind].gates * self.size("H")
            self.sizes["Q"] = CELLS[kind].kept * self.size("H")
            columns = self.chance.choice(SIZES[:10])
            self.sizes["B"] = [states, columns] if "offsets" in absent else [self.chance.choice(SIZES)]
            (absent.discard if kind == "lstm" else absent.add)("cell")
        return True

    def free(self, kind: str) -> Any:
        """What the contract leaves free."""
        if "float" in kind:
            return self.chance.choice((1.0, 0.5, -1.5, 2.0))
        if "int" in kind.lower():
            return self.chance.choice((0, 1, -1, -100, 3, 7, 1000))
        return self.chance.random() < 0.5

    def size(self, name: str) -> int:
        if name in self.found:
            return int(self.found[name])
        if name not in self.sizes:
            least = 1 if name in self.contract.nonzero else 0
            self.sizes[name] = max(least, self.chance.choice(SIZES))
        return self.sizes[name]

    def rest(self, name: str) -> list[int]:
        if name not in self.sizes:
            self.sizes[name] = [self.chance.choice(SIZES[:10]) for _ in range(self.chance.randrange(3))]
        return self.sizes[name]

    def dim(self, word: str) -> int:
        if word == "_":
            return self.chance.choice(SIZES)
        if word.isdigit():
            return int(word)
        dim = Dim.parse(word)
        if dim.one and self.chance.random() < 0.4:
            return 1
        factor = int(dim.factor) if dim.factor.isdigit() else self.size(dim.factor) if dim.factor else 1
        if dim.more < 0 and self.size(dim.name) == 0:
            self.sizes[dim.name] = 1
        return factor * self.size(dim.name) + dim.more

    def shape(self, dims: str) -> list[int]:
        shape = Shape.parse(dims)
        rest = [] if shape.rest is None else self.rest(shape.rest) if shape.rest else []
        return [*(self.dim(word) for word in shape.front), *rest, *(self.dim(word) for word in shape.back)]

    def limit(self, text: str) -> int:
        name, _, index = text.partition("[")
        if name in self.sizes and index:
            rest = self.sizes[name]
            return rest[0] if rest else 0
        return self.size(name)

    def make(self, name: str, what: Any) -> Any:
        make = {"Sizes": self.cuts}.get(type(what).__name__)
        return (make or getattr(self, type(what).__name__.lower()))(name, what)

    def array(self, name: str, what: words.Array) -> Tensor:
        shape, dtype = self.shape(what.dims), self.dtypes.get(name) or self.dtype(what.dtype)
        x = self.filled(name, shape, dtype, what.entries)
        if name == "hidden_weight":  # states that grow from row to row would double every rounding
            x = x / max(shape)
        return self.maker.laid_out(x)

    def dtype(self, dtype: Any) -> torch.dtype:
        if isinstance(dtype, words.As):
            like = self.found.get(dtype.argument)
            like = torch.float32 if like is None else like.dtype
            return torch.float32 if dtype.sums and like in words.HALF else like
        if dtype is None:
            return self.chance.choice((torch.float32, torch.float32, torch.float16, torch.int64, torch.bool))
        return dtype[0] if self.chance.random() < 0.6 else self.chance.choice(dtype)

    def filled(self, name: str, shape: list[int], dtype: torch.dtype, entries: Any) -> Tensor:
        count = math.prod(shape)
        if isinstance(entries, words.Range):
            most = COLUMNS if entries.within else 40
            below = self.limit(entries.below) if entries.below else min(entries.most, most)
            x = self.maker.wholes(below, count)
            if entries.within:  # columns ascend in the batches that there are, and need not
                x = sorted(x) if self.chance.random() < 0.5 else x
            if entries.but and self.chance.random() < 0.5:
                x = [self.found[entries.but] if self.chance.random() < 0.3 else n for n in x]
            return torch.tensor(x, dtype=dtype).view(shape)
        if isinstance(entries, words.Ascending):
            top = self.limit(entries.rows) if entries.rows else 50
            x = sorted(self.maker.wholes(top + 1, count))
            if entries.rows and count and (entries.whole or self.chance.random() < 0.5):
                x[0], x[-1] = (0, top) if count > 1 else (0, 0)
            return torch.tensor(x, dtype=dtype).view(shape)
        if dtype == torch.bool:
            return self.maker.numbers(*shape) > -0.5
        if not dtype.is_floating_point:
            return (self.maker.numbers(*shape) * 4).to(dtype)
        return self.maker.numbers(*shape).to(dtype)

    def parts(self, name: str, what: words.Parts) -> list[Tensor]:
        like = self.found[what.like]
        sizes = self.found[what.sizes]
        return [self.maker.laid_out(self.maker.numbers(*like.shape[:-1], size).to(like.dtype)) for size in sizes]

    def number(self, name: str, what: words.Number) -> float:
        low, high = -2.0 if what.low is None else what.low, 2.0 if what.high is None else what.high
        return self.chance.choice((low, high, self.chance.uniform(low, high), 0.0 if low <= 0 <= high else low))

    def whole(self, name: str, what: words.Whole) -> int:
        high = min(what.high, 12)
        if what.below:
            high = self.size(what.below) - 1
        return self.chance.randint(what.low, max(high, what.low))

    def word(self, name: str, what: words.Word) -> str:
        return self.chance.choice(what.choices)

    def flags(self, name: str, what: words.Flags) -> list[bool]:
        return [self.chance.random() < 0.7 for _ in what.of]

    def cuts(self, name: str, what: words.Sizes) -> list[int]:
        total = self.size(what.total)
        cuts = sorted(self.chance.randint(0, total) for _ in range(self.chance.randrange(3)))
        return [b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True)]


@cache
def schema(op: str) -> Any:
    return getattr(ops, op).default._schema


# --- what a backward is given by its forward ---------------------------------------------------------


DERIVED = {
    "jagged_attention_backward", "norm_gate_backward", "linear_cross_entropy_backward", "sampled_softmax_backward",
    "recurrence_backward", "segment_softmax_backward",
}  # fmt: skip


def derived(op: str, given: list[Any]) -> list[Any]:
    """With results of the forward where a backward takes them: only then are kernel and reference to agree."""
    names = [a.name for a in schema(op).arguments]
    by = dict(zip(names, given, strict=True))

    def forward(name: str) -> Any:
        wanted = [a.name for a in schema(name).arguments]
        return REFERENCES[name](*(by[w] for w in wanted))

    if op == "jagged_attention_backward":
        by["result"], by["log_sum"] = forward("jagged_attention")
    elif op == "norm_gate_backward":
        by["eps"] = 1e-5
        _, by["mean"], by["rstd"] = forward("norm_gate")
    elif op in ("linear_cross_entropy_backward", "sampled_softmax_backward"):
        _, by["log_sum"] = forward(op.removesuffix("_backward"))
    elif op == "recurrence_backward":
        by["input_bias"] = by["hidden_bias"] = None
        by["states"], _, by["kept"] = forward("recurrence")
    elif op == "segment_softmax_backward":
        by["x"] = by["out"]
        by["out"] = forward("segment_softmax")
    return [by[name] for name in names]
