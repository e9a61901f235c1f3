"""From a contract to the source of its check: straight-line Python, and the names that it finds there."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch

from . import entries, said, sizes, words
from .sizes import Dim, Shape
from .words import HALF, INT64, REAL, Array, As, Ascending, Parts, Range, Rule

if TYPE_CHECKING:
    from .contract import Contract

# Names in the source of a check that are neither arguments nor sizes.
LOCALS = frozenset(("native", "s", "part", "size", "device", "checks", "error"))
_WORD = re.compile(r"[A-Za-z_]\w*")


class Refused(Exception):
    """By a check before a kernel, which does not say why."""


class Writer:
    """One check. A name of a size is a local variable, None where it is not known.

    Of the flavours, `native` runs before kernels, in every step: it asks as little as it can, and whatever does not
    hold, or cannot be asked, is for `known` to explain, which runs where there is no kernel as well. `symbolic` looks
    at no entries, and sizes need not be numbers.
    """

    def __init__(self, contract: Contract, flavour: str) -> None:
        self.contract, self.known, self.native = contract, flavour != "symbolic", flavour == "native"
        self.lines: list[str] = []
        self.depth = 1
        self.sure: set[str] = set()  # sizes that are set here, whatever is absent
        self.maybe: set[str] = set()  # sizes that may be set
        self.kept: set[str] = set()  # arguments in one piece
        self.placed = False  # the device is known

    def text(self, signature: list[str]) -> str:
        contract = self.contract
        rules = [rule for rule in contract.rules if isinstance(rule, Rule)]
        for rule in rules:
            if rule.first:
                self.rule(rule)
        for name, what in contract.arguments.items():
            self.argument(name, what)
        for rule in rules:
            if not rule.first:
                self.rule(rule)
        if self.native:
            self.entries_natively()
        elif self.known:
            self.entries()
        unset = sorted(self._names() - (self.sure if self.known else set()))
        self.lines.insert(0, f"    {' = '.join(unset)} = None" if unset else "    pass")
        head = f"def check(native, {', '.join(signature)}):"
        if not self.native:
            return "\n".join([head, *self.lines, ""])
        names = ", ".join(argument.partition("=")[0] for argument in signature)
        explained = ["    except Exception as error:", f"        explain(error, {names})"]
        return "\n".join([head, "    try:", *(f"    {line}" for line in self.lines), *explained, ""])

    def add(self, line: str) -> None:
        self.lines.append("    " * self.depth + line)

    def refuse(self, test: str, said: str) -> None:
        self.add(f"if {test}: {'raise Refused' if self.native else said}")

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
        texts = [what.dims for what in self.contract.arguments.values() if isinstance(what, (Array, Parts))]
        texts += [what.entries.rows for what in self.contract.arguments.values() if _ascends(what)]
        texts += [rule.holds + rule.message for rule in self.contract.rules if isinstance(rule, Rule)]
        return sum(rest in _WORD.findall(text) for text in texts) > 1

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
        """To a kernel torch hands strided tensors of a CPU; None has no dtype, and so fails."""
        if name not in self.contract.optional and not (self.native and what.dtype):
            self.refuse(f"{name} is None", f"absent(fail, {name!r})")
        if not self.native:
            self.refuse(f"{name}.layout is not strided", f"other_layout(fail, {name!r}, {name})")
            if not what.anywhere:
                self.device(name)
        self.dtype(name, what.dtype)
        self.sizes_of(name, Shape.parse(what.dims))

    def device(self, name: str) -> None:
        if self.placed:
            self.refuse(f"{name}.device != device", f"elsewhere(fail, {name!r}, {name}, device)")
        else:
            self.add(f"device = {name}.device")
            self.placed = name not in self.contract.optional

    def dtype(self, name: str, dtype: tuple[torch.dtype, ...] | As | None) -> None:
        if isinstance(dtype, As):
            wanted = f"WIDE.get({dtype.argument}.dtype)" if dtype.sums else f"{dtype.argument}.dtype"
            self.refuse(f"{name}.dtype is not {wanted}", f"other_dtype(fail, {name!r}, {name}, ({wanted},))")
        elif dtype is not None:
            one, some = str(dtype[0]).removeprefix("torch."), _dtypes(dtype)
            test = f"{name}.dtype is not {one}" if len(dtype) == 1 else f"{name}.dtype not in {some}"
            self.refuse(test, f"other_dtype(fail, {name!r}, {name}, {some})")

    def sizes_of(self, name: str, shape: Shape) -> None:
        if self.native and (sizes := self._all_sure(shape)):
            self.refuse(f"{name}.shape != {sizes}", "")
            return
        rest = shape.rest if shape.rest and self._used(shape.rest) else None
        if shape.rest is not None and not shape.fixed and rest is None:
            return
        self.add(f"s = {name}.shape")
        if shape.fixed or shape.rest is None:
            test = f"len(s) {'!=' if shape.rest is None else '<'} {shape.fixed}"
            self.refuse(test, f"other_rank(fail, {name!r}, {name}, {shape.fixed}, {shape.rest is not None})")
        for place, word in shape.places():
            if word != "_":
                self.size(name, place, word)
        if rest is not None:
            start, stop = len(shape.front) or "", -len(shape.back) or ""
            self.rest(name, rest, f"s[{start}:{stop}]" if shape.fixed else "s")

    def _all_sure(self, shape: Shape) -> str:
        """The whole shape, to be compared at once, where each size is known; or nothing."""
        known = self.sure | set(self.contract.arguments)
        if shape.rest is not None and shape.rest not in self.sure:
            return ""
        sizes = []
        for word in [*shape.front, f"*{shape.rest}", *shape.back] if shape.rest else shape.front:
            if not word.startswith("*") and not word.isdigit():
                if word == "_":
                    return ""
                dim = Dim.parse(word)
                if dim.one or not known.issuperset(dim.names):
                    return ""
                word = dim.text
            sizes.append(word)
        return f"({', '.join(sizes)},)" if sizes != [f"*{shape.rest}"] else f"{shape.rest}"

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
        self.refuse(test, f"other_size(fail, {name!r}, {name}, {place}, {value}, {word!r})")

    def find(self, name: str, place: int, dim: Dim, word: str) -> None:
        """Set a size by that of a tensor."""
        size, wrong = f"s[{place}]", f"no_such_size(fail, {name!r}, {name}, {place}, {word!r})"
        if not self.known:
            conditions = [f"type({size}) is int", *(f"{n} is not None" for n in dim.names[1:])]
            self.add(f"if {' and '.join(conditions)}:")
            self.depth += 1
        value = f"{size}{-dim.more:+d}" if dim.more else size
        if dim.factor:
            self.refuse(f"({value}) % {dim.factor} != 0", wrong)
            value = f"({value}) // {dim.factor}"
        self.add(f"{dim.name} = {value}")
        least = int(dim.name in self.contract.nonzero)
        if least or dim.more > 0:
            self.refuse(f"{dim.name} < {least}", wrong)
        if not self.known:
            self.depth -= 1
        self.sure.add(dim.name)

    def rest(self, name: str, rest: str, value: str) -> None:
        if rest in self.sure:
            self.refuse(f"unlike({value}, {rest})", f"other_sizes(fail, {name!r}, {name}, {rest})")
        else:
            self.add(f"{rest} = {value}")
            self.sure.add(rest)

    def parts(self, name: str, what: Parts) -> None:
        self.refuse(f"len({name}) != len({what.sizes})", f"other_number(fail, {name!r}, {name}, {what.sizes})")
        self.add(f"for part, size in zip({name}, {what.sizes}):")
        self.depth += 1
        if self.native:
            self.sure.add("size")
            self.array("part", Array(what.dims.replace("_", "size"), As(what.like)))
        else:
            self.array("part", Array(what.dims, As(what.like)))
            wrong = f"other_size(fail, {name!r}, part, -1, size, 'its entry of {what.sizes}')"
            self.refuse("unlike(part.shape[-1:], (size,))", wrong)
        self.depth -= 1

    def number(self, name: str, what: words.Number) -> None:
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
            self.refuse(test, f"other_number_of(fail, {name!r}, {name}, {what!r})")

    def whole(self, name: str, what: words.Whole) -> None:
        high = f"{what.below} - 1" if what.below else repr(what.high)
        plain = [] if self.known else [f"type({name}) is int"]
        test = self.when(
            [what.below] if what.below else [], " and ".join([*plain, f"not {what.low} <= {name} <= {high}"])
        )
        self.refuse(test, f"outside(fail, {name!r}, {name}, {what.low}, {high})")

    def word(self, name: str, what: words.Word) -> None:
        self.refuse(f"{name} not in {what.choices!r}", f"no_choice(fail, {name!r}, {name}, {what.choices!r})")

    def flags(self, name: str, what: words.Flags) -> None:
        self.refuse(f"len({name}) != {len(what.of)}", f"other_flags(fail, {name!r}, {name}, {what.of!r})")

    def sizes(self, name: str, what: words.Sizes) -> None:
        plain = "" if self.known else f"all(type(size) is int for size in {name}) and "
        self.refuse(f"{plain}min({name}, default=-1) < 0", f"negative_sizes(fail, {name!r}, {name})")
        test = self.when([what.total], f"{plain}sum({name}) != {what.total}")
        self.refuse(test, f"other_total(fail, {name!r}, {name}, {what.total})")

    def rule(self, rule: Rule) -> None:
        sizes = [word for word in dict.fromkeys(_WORD.findall(rule.holds)) if word in self._names()]
        self.refuse(self.when(sizes, f"not ({rule.holds})"), f"fail(f{rule.message!r})")

    # --- entries ---

    def entries(self) -> None:
        for needed, some in self._by_need(self.looked_at).items():
            self.add(f"{f'if {needed} is not None: ' if needed else ''}look(fail, {', '.join(some)})")

    def entries_natively(self) -> None:
        """One native call, with what each check is about (as entries.py lists it) as numbers one behind the other."""
        checks = self._by_need(self.numbers)
        if not checks:
            return
        always = ", ".join(checks.pop("", []))
        self.add(f"checks = {_packed(always)}")
        for needed, some in checks.items():
            self.add(f"if {needed} is not None: checks += {_packed(', '.join(some))}")
        self.refuse(f"native(checks, {'len(checks)' if checks else 8 * _count(always)}) is not None", "")

    def _by_need(self, of: Callable[..., str]) -> dict[str, list[str]]:
        """What `of` makes of each thing that is said of entries, by the optional argument that it is about, or ""."""
        found: dict[str, list[str]] = {}
        for name, what in self.contract.arguments.items():
            if isinstance(what, Array) and what.entries is not None:
                found.setdefault(name if name in self.contract.optional else "", []).append(of(name, what.entries))
        for rule in self.contract.rules:
            if isinstance(rule, words.Entries):
                found.setdefault(rule.table, []).append(of(rule.argument, rule.what, rule.table))
            elif isinstance(rule, words.Distances):
                found.setdefault(rule.table, []).append(of(rule.queries, rule, rule.table))
        return found

    def looked_at(self, name: str, what: Range | Ascending | words.Distances, table: str = "") -> str:
        if isinstance(what, Ascending):
            return f"entries.Ascending({name!r}, {name}, {what.rows or None}, {what.whole})"
        if isinstance(what, words.Distances):
            others = f"{what.keys}, {what.query_offsets}, {what.key_offsets}"
            return f"entries.Distances({name}, {others}, {what.below}, {table!r})"
        limit = what.below or repr(what.most)
        limit = f"None if {limit} == 1 else {limit}" if what.or_one else limit
        return (
            f"entries.Range({name!r}, {name}, {limit}, {what.but or None}, {what.within or None}, {table!r}, "
            f"{what.error.__name__})"
        )

    def numbers(self, name: str, what: Range | Ascending | words.Distances, table: str = "") -> str:
        if isinstance(what, words.Distances):
            pointers = [self.pointer(x) for x in (name, what.keys, what.query_offsets, what.key_offsets)]
            return _listed(entries.DISTANCES, *pointers, self.count(what.query_offsets), what.below)
        width = "8" if self.contract.arguments[name].dtype == INT64 else f"{name}.element_size()"
        data = self.pointer(name), self.count(name), width
        if isinstance(what, Ascending):
            return _listed(entries.ASCENDING, *data, what.rows or -1, 2 if what.whole else 1 if what.rows else 0)
        limit = what.below or repr(what.most)
        limit = f"LAST if {limit} == 1 else {limit}" if what.or_one else limit
        if what.but:
            return _listed(entries.RANGE_BUT, *data, limit, what.but)
        if what.within:
            return _listed(entries.RANGE_WITHIN, *data, limit, self.pointer(what.within), self.count(what.within))
        return _listed(entries.RANGE, *data, limit)

    def pointer(self, name: str) -> str:
        """Where an argument begins; in one piece, which is alive until the check has returned."""
        if name in self.contract.optional:
            return f"({name}_ := {name}.contiguous()).data_ptr()"
        if name not in self.kept:
            self.kept.add(name)
            self.add(f"{name}_ = {name}.contiguous()")
            self.add(f"{name}_at = {name}_.data_ptr()")
        return f"{name}_at"

    def count(self, name: str) -> str:
        """Entries of an argument; the size of one that has a single size is known already."""
        dims = self.contract.arguments[name].dims.split()
        if len(dims) == 1 and dims[0][0].isalpha() and Dim.parse(dims[0]).name in self.sure:
            return Dim.parse(dims[0]).text
        return f"{name}.numel()"


def _listed(*numbers: object) -> str:
    return ", ".join(map(str, numbers))


def _count(listed: str) -> int:
    return listed.count(",") + bool(listed)


def _packed(listed: str) -> str:
    return f"packed[{_count(listed)}]({listed})"


def _ascends(what: Any) -> bool:
    return isinstance(what, Array) and isinstance(what.entries, Ascending)


def _dtypes(wanted: tuple[torch.dtype, ...]) -> str:
    return "REAL" if wanted is REAL else f"({', '.join(str(dtype).removeprefix('torch.') for dtype in wanted)},)"


SPACE: Mapping[str, Any] = {
    **{name: value for room in (said, sizes) for name, value in vars(room).items() if isinstance(value, FunctionType)},
    "torch": torch,
    "entries": entries,
    "look": entries.look,
    "Refused": Refused,
    "Number": words.Number,
    "HALF": HALF,
    "REAL": REAL,
    **{str(dtype).removeprefix("torch."): dtype for dtype in (*REAL, torch.int64, torch.int32, torch.bool)},
    "strided": torch.strided,
    "cpu": torch.device("cpu"),
    "LAST": entries.LAST,
    "WIDE": {torch.float32: torch.float32, torch.float64: torch.float64, **dict.fromkeys(HALF, torch.float32)},
    "packed": [struct.Struct(f"{n}q").pack for n in range(64)],
}
