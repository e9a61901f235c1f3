"""What must hold of the arguments of an op, said once, beside its schema.

    Contract(
        x=Array("R ...F"),                       # at least one dim; what follows the first is called F
        rows=Array("N", INT64, Range("R")),      # int64, one dim, entries from 0 to below R
        count=Whole(0),
    )

A size that is named twice is the same twice. The contract is compiled to straight-line Python, as dataclasses are: it
runs before each kernel and costs about as much as one allocation. From the same words come the checks of the fake, of
the reference and of the twin, and the calls that `make fuzz-ops` generates.

Sizes in `dims`, one word each:

    T       any size, the same wherever the name occurs
    S+1     one more than S; 2*M-1, G*M: the other way round, S and M are found by it and must be whole
    T|1     T, or 1 that stands for each of T
    ...F    any number of sizes
    _       any size

Sizes of fake tensors may be symbols: they are compared only where they are numbers, so that nothing is guarded on.
Entries are looked at in real tensors alone: by turbogr_check (cpu/check.cpp) in front of kernels, by torch elsewhere.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from . import entries

HALF = (torch.float16, torch.bfloat16)
REAL = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
INT64 = (torch.int64,)
BOOL = (torch.bool,)
MOST = 1 << 62  # of a size that is said in numbers: what is computed from it still fits


# --- words of a contract -----------------------------------------------------------------------------


@dataclass(frozen=True)
class As:
    """The dtype of another argument; the dtype of its sums, if these are meant."""

    argument: str
    sums: bool = False


@dataclass(frozen=True)
class Array:
    """A tensor: its sizes, its dtype (None: any), and what holds of its entries."""

    dims: str
    dtype: tuple[torch.dtype, ...] | As | None = REAL
    entries: Range | Ascending | None = None
    anywhere: bool = False  # on any device


@dataclass(frozen=True)
class Parts:
    """A list of tensors, one for each entry of `sizes`, which is their last size."""

    dims: str
    sizes: str
    like: str  # the argument whose dtype they have


@dataclass(frozen=True)
class Number:
    low: float | None = None
    high: float | None = None
    finite: bool = True


@dataclass(frozen=True)
class Whole:
    """An integer; `below` names a size."""

    low: int
    high: int = MOST
    below: str = ""


@dataclass(frozen=True)
class Word:
    choices: tuple[str, ...]


@dataclass(frozen=True)
class Flags:
    """One for each of these."""

    of: tuple[str, ...]


@dataclass(frozen=True)
class Sizes:
    """Some sizes, none negative, that add up to `total`."""

    total: str


@dataclass(frozen=True)
class Range:
    """Entries from 0 to below a size, except those that are `but`, another argument.

    `within` names offsets: rows that belong to no sequence may hold anything. `or_one`: a size of 1 stands for each.
    """

    below: str = ""
    but: str = ""
    within: str = ""
    or_one: bool = False
    most: int = entries.LAST
    error: type[Exception] = IndexError


@dataclass(frozen=True)
class Ascending:
    """Offsets of sequences of rows: from 0 on, up to `rows`, all of them where they are `whole`; or any numbers."""

    rows: str = ""
    whole: bool = False


@dataclass(frozen=True)
class Entries:
    """More that holds of the entries of an argument, where the size that `what.below` names is there."""

    argument: str
    what: Range
    table: str  # the argument that has this size


@dataclass(frozen=True)
class Distances:
    """Columns of queries and keys of a sequence differ by less than a size."""

    queries: str
    keys: str
    query_offsets: str
    key_offsets: str
    below: str
    table: str


@dataclass(frozen=True)
class Rule:
    """A Python expression of arguments and sizes; checked where all these sizes are known.

    `first`: before any size is looked at, so that sizes can rely on it.
    """

    holds: str
    message: str
    first: bool = False


def together(*names: str) -> Rule:
    absent = ", ".join(f"{name} is None" for name in names)
    return Rule(f"len({{{absent}}}) == 1", f"{' and '.join(names)} come together", first=True)


# --- a contract --------------------------------------------------------------------------------------


class Contract:
    """Contract(*rules, name=what it is, ...). Arguments that are not named may be anything.

    Arguments are looked at in the order in which they are written here, each able to rely on those before. `nonzero`
    names sizes that must not be zero.
    """

    def __init__(self, *rules: Rule | Entries | Distances, nonzero: str = "", **arguments: Any) -> None:
        self.rules, self.nonzero, self.arguments = rules, frozenset(nonzero.split()), arguments
        self.op = ""

    def extended(self, *rules: Rule | Entries | Distances, nonzero: str = "", **arguments: Any) -> Contract:
        """The same, and more: that of a backward, which takes the arguments of the forward."""
        more = " ".join([*self.nonzero, nonzero])
        return Contract(*self.rules, *rules, nonzero=more, **{**self.arguments, **arguments})

    def bind(self, schema: str) -> None:
        """Compile it for an op. Every argument of the contract is one of the schema's."""
        found = torch._C.parse_schema(schema)
        self.op, names = found.name, [a.name for a in found.arguments]
        if unknown := set(self.arguments) - set(names):
            raise ValueError(f"{self.op}: the contract names {', '.join(sorted(unknown))}, and the schema does not")
        if taken := set(names) & set(_SPACE):
            raise ValueError(f"{self.op}: arguments of a checked op cannot be called {', '.join(sorted(taken))}")
        self.leading = next((names.index(name) for name, what in self.arguments.items() if _leads(what)), 0)
        self.optional = {a.name for a in found.arguments if str(a.type).startswith("Optional")}
        defaults = {a.name: a.default_value for a in found.arguments if a.has_default_value()}
        signature = ", ".join(f"{name}=defaults[{name!r}]" if name in defaults else name for name in names)
        self.source = {flavour: _Writer(self, flavour).text(signature) for flavour in ("known", "symbolic")}
        space = {**_SPACE, "defaults": defaults, "contract": self, "fail": self.fail}
        functions = []
        for flavour, text in self.source.items():
            exec(compile(text, f"<contract of {self.op}, {flavour}>", "exec"), space)
            functions.append(space["check"])
        self._check, self._symbolic = functions

    # Filled by `bind`. Of the leading argument is the dtype that is computed in: the first tensor of the contract that
    # is floating point, or may be.
    leading: int
    _check: Callable[..., None]
    _symbolic: Callable[..., None]

    def before_kernel(self, native: Any, *arguments: Any) -> None:
        """Check everything; `native` is turbogr_check of a library."""
        self._check(native, *arguments)

    def check(self, *arguments: Any, **named: Any) -> None:
        """Check everything, entries by torch; sizes only where tensors have no data."""
        real = all(has_data(x) for x in tensors((*arguments, *named.values())))
        (self._check if real else self._symbolic)(None, *arguments, **named)

    def check_sizes(self, *arguments: Any) -> None:
        """Check what is known without a look at the data."""
        self._symbolic(None, *arguments)

    def fail(self, text: str, error: type[Exception] = ValueError) -> NoReturn:
        raise error(f"{self.op}: {text}")

    def refused(self, native: Any, *checks: Any) -> None:
        """Look at entries by torch, where there is no native check or it has refused them."""
        for check in checks:
            check.run(self.fail)
        if native is not None:
            raise AssertionError(f"{self.op}: the native check refuses entries that torch finds in order")


def has_data(x: torch.Tensor) -> bool:
    """False for fake tensors and other wrappers, whose values cannot be read."""
    return type(x) in (torch.Tensor, torch.nn.Parameter) and not x.is_meta


def tensors(arguments: tuple[Any, ...]) -> Iterator[torch.Tensor]:
    for x in arguments:
        if isinstance(x, torch.Tensor):
            yield x
        elif isinstance(x, (list, tuple)):
            yield from tensors(tuple(x))


# --- compiled to Python ------------------------------------------------------------------------------

_DIM = re.compile(r"(?:(?P<factor>\w+)\*)?(?P<name>[A-Za-z]\w*)(?P<more>[+-]\d+)?(?P<one>\|1)?$")
_WORD = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True)
class Dim:
    """One word of `dims`."""

    factor: str
    name: str
    more: int
    one: bool

    @staticmethod
    def parse(word: str) -> Dim:
        found = _DIM.match(word)
        if found is None:
            raise ValueError(f"{word!r} is no size of a contract")
        return Dim(found["factor"] or "", found["name"], int(found["more"] or 0), bool(found["one"]))

    @property
    def text(self) -> str:
        product = f"{self.factor}*{self.name}" if self.factor else self.name
        return f"{product}{self.more:+d}" if self.more else product

    @property
    def names(self) -> list[str]:
        return [self.name, *([self.factor] if self.factor and not self.factor.isdigit() else [])]


@dataclass(frozen=True)
class Shape:
    """`dims` taken apart: sizes in front of ..., its name, sizes behind it."""

    front: tuple[str, ...]
    rest: str | None
    back: tuple[str, ...]

    @staticmethod
    def parse(dims: str) -> Shape:
        words = dims.split()
        at = next((i for i, word in enumerate(words) if word.startswith("...")), None)
        if at is None:
            return Shape(tuple(words), None, ())
        return Shape(tuple(words[:at]), words[at][3:], tuple(words[at + 1 :]))

    @property
    def fixed(self) -> int:
        return len(self.front) + len(self.back)

    def places(self) -> Iterator[tuple[int, str]]:
        yield from enumerate(self.front)
        yield from zip(range(-len(self.back), 0), self.back, strict=True)


class _Writer:
    """The source of a check. A name of a size is a local variable, None where it is not known."""

    def __init__(self, contract: Contract, flavour: str) -> None:
        self.contract, self.known = contract, flavour == "known"
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
            if self.placed:
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
        # Tensors that are not strided have other dispatch keys, and never come before a kernel.
        self.add(f"if native is None and {name}.layout is not strided: other_layout(fail, {name!r}, {name})")

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
            self.add(f"if {given}(native is None or {call} is not None):")
            self.add(f"    contract.refused(native, {', '.join(looked)})")

    def plain(self, name: str) -> str:
        """The argument in one piece, alive until the check has returned."""
        if name not in self.kept:
            self.kept.add(name)
            absent = f"None if {name} is None else " if name in self.contract.optional else ""
            self.add(f"{name}_ = {absent}{name}.contiguous()")
        return f"{name}_"

    def entries_of(self, name: str, what: Range | Ascending, table: str = "") -> tuple[str, str]:
        """Numbers of a native check (see entries.py), and the one by torch."""
        x, dtype = self.plain(name), self.contract.arguments[name].dtype
        width = "8" if dtype == INT64 else f"{x}.element_size()"
        data = f"{x}.data_ptr(), {x}.numel(), {width}"
        if isinstance(what, Ascending):
            limit, mode = what.rows or "-1", 2 if what.whole else 1 if what.rows else 0
            looked = f"entries.Ascending({name!r}, {name}, {what.rows or None}, {what.whole})"
            return f"{entries.ASCENDING}, {data}, {limit}, {mode}, 0, 0, 0, 0", looked
        limit = what.below or repr(what.most)
        top = f"LAST if {limit} == 1 else {limit}" if what.or_one else limit
        limit = f"None if {limit} == 1 else {limit}" if what.or_one else limit
        skip = f"1, {what.but}" if what.but else "0, 0"
        within = f"{self.plain(what.within)}.data_ptr(), {what.within}_.numel()" if what.within else "0, 0"
        looked = (
            f"{name!r}, {name}, {limit}, {what.but or None}, {what.within or None}, {table!r}, {what.error.__name__}"
        )
        return f"{entries.RANGE}, {data}, {top}, {skip}, {within}, 0", f"entries.Range({looked})"

    def distances(self, rule: Distances) -> tuple[str, str]:
        names = rule.queries, rule.keys, rule.query_offsets, rule.key_offsets
        pointers = ", ".join(f"{self.plain(name)}.data_ptr()" for name in names)
        looked = f"entries.Distances({', '.join(names)}, {rule.below}, {rule.table!r})"
        return f"{entries.DISTANCES}, {pointers}, {rule.query_offsets}.numel(), {rule.below}, 0, 0, 0", looked


def _leads(what: Any) -> bool:
    return isinstance(what, Array) and (what.dtype is None or (isinstance(what.dtype, tuple) and what.dtype[0] in REAL))


def _ascends(what: Any) -> bool:
    return isinstance(what, Array) and isinstance(what.entries, Ascending)


def _dtypes(wanted: tuple[torch.dtype, ...]) -> str:
    return "REAL" if wanted is REAL else f"({', '.join(str(dtype).removeprefix('torch.') for dtype in wanted)},)"


# --- what a check says -------------------------------------------------------------------------------

Fail = Callable[..., NoReturn]


def absent(fail: Fail, name: str) -> None:
    fail(f"{name} must be a tensor, not None")


def elsewhere(fail: Fail, name: str, x: torch.Tensor, device: torch.device) -> None:
    fail(f"{name} is on {x.device}, another tensor on {device}")


def other_dtype(fail: Fail, name: str, x: torch.Tensor, wanted: tuple[torch.dtype, ...]) -> None:
    fail(f"{name} must be {' or '.join(map(str, wanted))}, not {x.dtype}")


def other_layout(fail: Fail, name: str, x: torch.Tensor) -> None:
    fail(f"{name} must be strided, not {x.layout}")


def other_rank(fail: Fail, name: str, x: torch.Tensor, wanted: int, or_more: bool) -> None:
    fail(f"{name} must have {wanted}{' or more' if or_more else ''} dims, not {x.dim()}")


def other_size(fail: Fail, name: str, x: torch.Tensor, place: int, wanted: int, word: str) -> None:
    fail(f"{name}.shape[{place}] must be {wanted} ({word}), not {x.shape[place]}")


def no_such_size(fail: Fail, name: str, x: torch.Tensor, place: int, word: str) -> None:
    fail(f"{name}.shape[{place}] must be of the form {word}, and it is {x.shape[place]}")


def other_sizes(fail: Fail, name: str, x: torch.Tensor, wanted: tuple[int, ...]) -> None:
    fail(f"{name} has sizes {tuple(x.shape)}, and those of other tensors are {tuple(wanted)} there")


def unlike(sizes: tuple[Any, ...], others: tuple[Any, ...]) -> bool:
    """Whether they are known to differ."""
    pairs = list(zip(sizes, others, strict=False))
    return len(sizes) != len(others) or any(type(a) is int and type(b) is int and a != b for a, b in pairs)


def other_number(fail: Fail, name: str, found: list[Any], wanted: list[Any]) -> None:
    fail(f"{name} must be {len(wanted)}, not {len(found)}")


def other_number_of(fail: Fail, name: str, found: float, what: Number) -> None:
    bounds = [f"at least {what.low}"] * (what.low is not None) + [f"at most {what.high}"] * (what.high is not None)
    fail(f"{name} must be {' and '.join([*['finite'] * what.finite, *bounds])}, not {found}")


def outside(fail: Fail, name: str, found: int, low: int, high: int) -> None:
    fail(f"{name} must be {f'{low} or more' if high == MOST else f'from {low} to {high}'}, not {found}")


def no_choice(fail: Fail, name: str, found: str, choices: tuple[str, ...]) -> None:
    fail(f"{name} must be one of {', '.join(choices)}, not {found!r}")


def other_flags(fail: Fail, name: str, found: list[bool], of: tuple[str, ...]) -> None:
    fail(f"{name} has one entry for each of {', '.join(of)}, not {len(found)}")


def negative_sizes(fail: Fail, name: str, found: list[int]) -> None:
    fail(f"{name} must be one size or more, none negative: {found}")


def other_total(fail: Fail, name: str, found: list[int], wanted: int) -> None:
    fail(f"sum of {name} must be {wanted}, not {sum(found)}")


def equal_blocks(rows: int, blocks: int) -> bool:
    """Whether rows can be cut into so many blocks, all as large as the first but the last."""
    return -(-rows // max(-(-rows // max(blocks, 1)), 1)) == blocks


_SPACE: Mapping[str, Any] = {
    **{k: v for k, v in globals().items() if not k.startswith("__")},
    **{str(dtype).removeprefix("torch."): dtype for dtype in (*REAL, torch.int64, torch.int32, torch.bool)},
    "strided": torch.strided,
    "LAST": entries.LAST,
    "WIDE": {torch.float32: torch.float32, torch.float64: torch.float64, **dict.fromkeys(HALF, torch.float32)},
    "packed": [struct.Struct(f"{entries.FIELDS * n}q").pack for n in range(16)],
}
