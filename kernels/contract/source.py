"""From a contract to the source of its check: straight-line Python, and the names that it finds there."""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch

from . import entries, said, sizes
from .sizes import Dim, Shape
from .words import (
    HALF,
    INT64,
    REAL,
    Array,
    As,
    Ascending,
    Distances,
    Entries,
    Flags,
    Number,
    Parts,
    Range,
    Rule,
    Sizes,
    Whole,
    Word,
)

if TYPE_CHECKING:
    from .contract import Contract

_WORD = re.compile(r"[A-Za-z_]\w*")


class Writer:
    """One check. A name of a size is a local variable, None where it is not known.

    Of the flavours, `native` runs in front of kernels of a CPU, which only strided tensors reach, and in every step: it
    asks as little as it can. `known` has sizes that are numbers, `symbolic` looks at no entries.
    """

    def __init__(self, contract: Contract, flavour: str) -> None:
        self.contract, self.known, self.native = contract, flavour != "symbolic", flavour == "native"
        self.lines: list[str] = []
        self.depth = 1
        self.sure: set[str] = set()  # sizes that are set here, whatever is absent
        self.maybe: set[str] = set()  # sizes that may be set
        self.kept: set[str] = set()  # arguments in one piece
        self.placed = False  # the device is known

    def text(self, signature: str) -> str:
        contract = self.contract
        rules = [rule for rule in contract.rules if isinstance(rule, Rule)]
        self.add(f"{' = '.join(sorted(self._names()))} = None" if self._names() else "pass")
        for rule in rules:
            if rule.first:
                self.rule(rule)
        for name, what in contract.arguments.items():
            self.argument(name, what)
        for rule in rules:
            if not rule.first:
                self.rule(rule)
        if self.known:
            self.entries()
        return f"def check(native, {signature}):\n" + "\n".join(self.lines) + "\n"

    def add(self, line: str) -> None:
        self.lines.append("    " * self.depth + line)

    def _names(self) -> set[str]:
        found: set[str] = set()
        for what in self.contract.arguments.values():
            if isinstance(what, (Array, Parts)):
                shape = Shape.parse(what.dims)
                found |= {name for _, word in shape.places() if word != "_" for name in Dim.parse(word).names}
                found |= {shape.rest} if shape.rest else set()
        return found - set(self.contract.arguments)

    def _used(self, rest: str) -> bool:
        """Whether anything but one tensor speaks of these sizes."""
        words = [what.dims for what in self.contract.arguments.values() if isinstance(what, (Array, Parts))]
        words += [what.entries.rows for what in self.contract.arguments.values() if _ascends(what)]
        words += [rule.holds + rule.message for rule in self.contract.rules if isinstance(rule, Rule)]
        return sum(rest in _WORD.findall(text) for text in words) > 1

    def when(self, names: list[str], condition: str) -> str:
        """The condition, where the sizes it speaks of are numbers."""
        sizes = dict.fromkeys(name for name in names if name not in self.contract.arguments)
        unsure = [name for name in sizes if not (self.known and name in self.sure)]
        numbers = [] if self.known else [name for name in names if name in self.contract.arguments]
        tests = [f"{name} is not None" for name in unsure] + [f"type({name}) is int" for name in numbers]
        return " and ".join([*tests, condition])

    # --- arguments ---

    def argument(self, name: str, what: Any) -> None:
        optional = name in self.contract.optional
        if optional:
            self.add(f"if {name} is not None:")
            self.depth += 1
        before = set(self.sure)
        getattr(self, type(what).__name__.lower())(name, what)
        if optional:
            self.depth -= 1
            self.maybe |= self.sure - before
            self.sure = before

    def array(self, name: str, what: Array) -> None:
        if name not in self.contract.optional:
            self.add(f"if {name} is None: absent(fail, {name!r})")
        self.dtype(name, what.dtype)
        if not what.anywhere:
            if self.native:
                self.add(f"if not {name}.is_cpu: elsewhere(fail, {name!r}, {name}, cpu)")
            elif self.placed:
                self.add(f"if {name}.device != device: elsewhere(fail, {name!r}, {name}, device)")
            else:
                self.add(f"device = {name}.device")
                self.placed = name not in self.contract.optional
        self.sizes_of(name, Shape.parse(what.dims), what.dims)

    def dtype(self, name: str, dtype: tuple[torch.dtype, ...] | As | None) -> None:
        if isinstance(dtype, As):
            wanted = f"WIDE.get({dtype.argument}.dtype)" if dtype.sums else f"{dtype.argument}.dtype"
            self.add(f"if {name}.dtype is not {wanted}: other_dtype(fail, {name!r}, {name}, ({wanted},))")
        elif dtype is not None:
            one, some = str(dtype[0]).removeprefix("torch."), _dtypes(dtype)
            test = f"{name}.dtype is not {one}" if len(dtype) == 1 else f"{name}.dtype not in {some}"
            self.add(f"if {test}: other_dtype(fail, {name!r}, {name}, {some})")
        if not self.native:
            self.add(f"if {name}.layout is not strided: other_layout(fail, {name!r}, {name})")

    def sizes_of(self, name: str, shape: Shape, dims: str) -> None:
        self.add(f"s = {name}.shape")
        test = f"len(s) != {shape.fixed}" if shape.rest is None else f"len(s) < {shape.fixed}"
        self.add(f"if {test}: other_rank(fail, {name!r}, {name}, {shape.fixed}, {shape.rest is not None})")
        for place, word in shape.places():
            if word != "_":
                self.size(name, place, word)
        if shape.rest and self._used(shape.rest):
            start, stop = len(shape.front), -len(shape.back) or None
            self.rest(name, shape.rest, f"s[{start}:{'' if stop is None else stop}]")

    def size(self, name: str, place: int, word: str) -> None:
        if word.isdigit():
            self.compare(name, place, [], word, word)
            return
        dim = Dim.parse(word)
        if dim.name in self.sure or dim.one or dim.name in self.contract.arguments:
            self.compare(name, place, dim.names, dim.text, word, dim.one)
        elif dim.name in self.maybe:
            self.add(f"if {dim.name} is None:")
            self.depth += 1
            self.find(name, place, dim, word)
            self.depth -= 1
            self.compare(name, place, dim.names, dim.text, word)
        else:
            self.find(name, place, dim, word)

    def compare(self, name: str, place: int, names: list[str], value: str, word: str, one: bool = False) -> None:
        size = f"s[{place}]"
        test = f"{size} != {value}" + (f" and {size} != 1" if one else "")
        plain = [] if self.known else [f"type({size}) is int"]
        test = self.when(names, " and ".join([*plain, test]))
        self.add(f"if {test}: other_size(fail, {name!r}, {name}, {place}, {value}, {word!r})")

    def find(self, name: str, place: int, dim: Dim, word: str) -> None:
        """Set a size by that of a tensor."""
        size, wrong = f"s[{place}]", f"no_such_size(fail, {name!r}, {name}, {place}, {word!r})"
        if not self.known:
            conditions = [f"type({size}) is int", *(f"{n} is not None" for n in dim.names[1:])]
            self.add(f"if {' and '.join(conditions)}:")
            self.depth += 1
        value = f"{size}{-dim.more:+d}" if dim.more else size
        if dim.factor:
            self.add(f"if ({value}) % {dim.factor} != 0: {wrong}")
            value = f"({value}) // {dim.factor}"
        self.add(f"{dim.name} = {value}")
        least = int(dim.name in self.contract.nonzero)
        if least or dim.more > 0:
            self.add(f"if {dim.name} < {least}: {wrong}")
        if not self.known:
            self.depth -= 1
        self.sure.add(dim.name)

    def rest(self, name: str, rest: str, value: str) -> None:
        if rest in self.sure:
            test = f"{value} != {rest}" if self.known else f"unlike({value}, {rest})"
            self.add(f"if {test}: other_sizes(fail, {name!r}, {name}, {rest})")
        else:
            self.add(f"{rest} = {value}")
            self.sure.add(rest)

    def parts(self, name: str, what: Parts) -> None:
        self.add(f"if len({name}) != len({what.sizes}): other_number(fail, {name!r}, {name}, {what.sizes})")
        self.add(f"for part, size in zip({name}, {what.sizes}):")
        self.depth += 1
        self.array("part", Array(what.dims, As(what.like)))
        test = "part.shape[-1] != size" if self.known else "unlike(part.shape[-1:], (size,))"
        self.add(f"if {test}: other_size(fail, {name!r}, part, -1, size, 'its entry of {what.sizes}')")
        self.depth -= 1

    def number(self, name: str, what: Number) -> None:
        tests = ["type({0}) in (int, float)"] if not self.known else []
        wrong = []
        if what.low is not None:
            wrong.append(f"{{0}} >= {what.low!r}")
        if what.high is not None:
            wrong.append(f"{{0}} <= {what.high!r}")
        if what.finite:
            wrong.append("{0} - {0} == 0.0")
        if wrong:
            test = " and ".join([*tests, f"not ({' and '.join(wrong)})"]).replace("{0}", name)
            self.add(f"if {test}: other_number_of(fail, {name!r}, {name}, {what!r})")

    def whole(self, name: str, what: Whole) -> None:
        high = f"{what.below} - 1" if what.below else repr(what.high)
        plain = [] if self.known else [f"type({name}) is int"]
        test = self.when(
            [what.below] if what.below else [], " and ".join([*plain, f"not {what.low} <= {name} <= {high}"])
        )
        self.add(f"if {test}: outside(fail, {name!r}, {name}, {what.low}, {high})")

    def word(self, name: str, what: Word) -> None:
        self.add(f"if {name} not in {what.choices!r}: no_choice(fail, {name!r}, {name}, {what.choices!r})")

    def flags(self, name: str, what: Flags) -> None:
        self.add(f"if len({name}) != {len(what.of)}: other_flags(fail, {name!r}, {name}, {what.of!r})")

    def sizes(self, name: str, what: Sizes) -> None:
        plain = "" if self.known else f"all(type(size) is int for size in {name}) and "
        self.add(f"if {plain}min({name}, default=-1) < 0: negative_sizes(fail, {name!r}, {name})")
        test = self.when([what.total], f"{plain}sum({name}) != {what.total}")
        self.add(f"if {test}: other_total(fail, {name!r}, {name}, {what.total})")

    def rule(self, rule: Rule) -> None:
        sizes = [word for word in dict.fromkeys(_WORD.findall(rule.holds)) if word in self._names()]
        self.add(f"if {self.when(sizes, f'not ({rule.holds})')}: fail(f{rule.message!r})")

    # --- entries ---

    def entries(self) -> None:
        """A native call for the checks of entries; where it refuses, or there is none, torch looks and explains.

        Those that depend on an optional tensor have a call of their own.
        """
        checks: dict[str, list[tuple[str, str]]] = {}
        for name, what in self.contract.arguments.items():
            if isinstance(what, Array) and what.entries is not None:
                key = name if name in self.contract.optional else ""
                checks.setdefault(key, []).append(self.entries_of(name, what.entries))
        for rule in self.contract.rules:
            if isinstance(rule, Entries):
                checks.setdefault(rule.table, []).append(self.entries_of(rule.argument, rule.what, rule.table))
            elif isinstance(rule, Distances):
                checks.setdefault(rule.table, []).append(self.distances(rule))
        for needed, some in checks.items():
            native, looked = zip(*some, strict=True)
            given = f"{needed} is not None and " if needed else ""
            call = f"native(packed[{len(some)}]({', '.join(native)}), {len(some)})"
            if self.native:
                self.add(f"if {given}{call} is not None: contract.refused(native, {', '.join(looked)})")
            else:
                self.add(f"{f'if {needed} is not None: ' if needed else ''}contract.refused(None, {', '.join(looked)})")

    def plain(self, name: str) -> str:
        """The argument in one piece, alive until the check has returned."""
        if name not in self.kept:
            self.kept.add(name)
            if not self.native:
                return f"{name}_"
            absent = f"None if {name} is None else " if name in self.contract.optional else ""
            self.add(f"{name}_ = {absent}{name}.contiguous()")
        return f"{name}_"

    def count(self, name: str) -> str:
        """Entries of an argument; the size of one that has a single size is known already."""
        words = self.contract.arguments[name].dims.split()
        if len(words) == 1 and words[0][0].isalpha() and Dim.parse(words[0]).name in self.sure:
            return Dim.parse(words[0]).text
        return f"{name}.numel()"

    def entries_of(self, name: str, what: Range | Ascending, table: str = "") -> tuple[str, str]:
        """Numbers of a native check (as entries.py lists them), and the one by torch."""
        x, dtype = self.plain(name), self.contract.arguments[name].dtype
        width = "8" if dtype == INT64 else f"{x}.element_size()"
        data = f"{x}.data_ptr(), {self.count(name)}, {width}"
        if isinstance(what, Ascending):
            limit, mode = what.rows or "-1", 2 if what.whole else 1 if what.rows else 0
            looked = f"entries.Ascending({name!r}, {name}, {what.rows or None}, {what.whole})"
            return f"{entries.ASCENDING}, {data}, {limit}, {mode}, 0, 0, 0, 0", looked
        limit = what.below or repr(what.most)
        top = f"LAST if {limit} == 1 else {limit}" if what.or_one else limit
        limit = f"None if {limit} == 1 else {limit}" if what.or_one else limit
        skip = f"1, {what.but}" if what.but else "0, 0"
        within = f"{self.plain(what.within)}.data_ptr(), {self.count(what.within)}" if what.within else "0, 0"
        looked = (
            f"{name!r}, {name}, {limit}, {what.but or None}, {what.within or None}, {table!r}, {what.error.__name__}"
        )
        return f"{entries.RANGE}, {data}, {top}, {skip}, {within}, 0", f"entries.Range({looked})"

    def distances(self, rule: Distances) -> tuple[str, str]:
        names = rule.queries, rule.keys, rule.query_offsets, rule.key_offsets
        pointers = ", ".join(f"{self.plain(name)}.data_ptr()" for name in names)
        looked = f"entries.Distances({', '.join(names)}, {rule.below}, {rule.table!r})"
        return f"{entries.DISTANCES}, {pointers}, {self.count(rule.query_offsets)}, {rule.below}, 0, 0, 0", looked


def _ascends(what: Any) -> bool:
    return isinstance(what, Array) and isinstance(what.entries, Ascending)


def _dtypes(wanted: tuple[torch.dtype, ...]) -> str:
    return "REAL" if wanted is REAL else f"({', '.join(str(dtype).removeprefix('torch.') for dtype in wanted)},)"


SPACE: Mapping[str, Any] = {
    **{name: value for room in (said, sizes) for name, value in vars(room).items() if isinstance(value, FunctionType)},
    "torch": torch,
    "entries": entries,
    "Number": Number,
    "HALF": HALF,
    "REAL": REAL,
    **{str(dtype).removeprefix("torch."): dtype for dtype in (*REAL, torch.int64, torch.int32, torch.bool)},
    "strided": torch.strided,
    "cpu": torch.device("cpu"),
    "LAST": entries.LAST,
    "WIDE": {torch.float32: torch.float32, torch.float64: torch.float64, **dict.fromkeys(HALF, torch.float32)},
    "packed": [struct.Struct(f"{entries.FIELDS * n}q").pack for n in range(16)],
}
