"""Decision tables: a leaf for each assignment of atoms that can happen.

Any pointwise op is applied leaf by leaf, so that masks of masks, `&`, `maximum`, `1 - mask` or bit flags need no rules.
Assignments that cannot happen are left out where that is seen; leaving out too few only costs acceptance.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from .language import NO, YES, AtLeast, Atom, Leaf, Test, Unknown

LIMIT = 9  # atoms in one table; models in use have four or fewer


@dataclass(frozen=True)
class Table:
    atoms: tuple[Atom, ...]
    rows: dict[tuple[bool, ...], Any]

    __hash__ = None  # type: ignore[assignment]

    @property
    def leaves(self) -> list[Any]:
        return list(self.rows.values())

    @property
    def only(self) -> Any:
        """The leaf of a table without atoms; None for others."""
        return None if self.atoms else self.rows[()]

    def cases(self) -> Iterator[tuple[dict[Atom, bool], Any]]:
        for bits, leaf in self.rows.items():
            yield dict(zip(self.atoms, bits, strict=True)), leaf

    def at(self, case: dict[Atom, bool]) -> Any:
        """Its leaf in a case over these atoms and perhaps others; KeyError where that cannot happen."""
        return self.rows[tuple(case[a] for a in self.atoms)]

    @property
    def key(self) -> tuple[Any, ...]:
        return self.atoms, tuple(sorted(self.rows.items(), key=lambda row: row[0]))

    def __str__(self) -> str:
        if not self.atoms:
            return str(self.only)
        return "{" + "; ".join(f"{written_case(case)}: {leaf}" for case, leaf in self.cases()) + "}"


def written_case(case: dict[Atom, bool]) -> str:
    return " & ".join(("" if holds else "!") + str(atom) for atom, holds in case.items())


def kept(table: Table) -> str:
    """A table of truth, by the cases in which it holds."""
    cases = [case for case, leaf in table.cases() if leaf.value]
    text = [written_case(case) for case in cases]
    return " | ".join(f"({t})" if len(text) > 1 else t for t in text)


def one(leaf: Leaf) -> Table:
    return Table((), {(): leaf})


def of_atom(atom: Atom, yes: Any = YES, no: Any = NO) -> Table:
    return reduced(Table((atom,), {(True,): yes, (False,): no}))


def ordered(atoms: Iterable[Atom]) -> tuple[Atom, ...]:
    return tuple(sorted(set(atoms), key=lambda a: (type(a).__name__, str(a))))


def assignments(atoms: tuple[Atom, ...]) -> Iterator[tuple[bool, ...]]:
    """Those that can happen, as far as is seen."""
    for bits in itertools.product((True, False), repeat=len(atoms)):
        if len(atoms) < 2 or feasible(dict(zip(atoms, bits, strict=True))):
            yield bits


def combine(function: Callable[..., Any], *tables: Table) -> Table:
    """`function` of the leaves in each case; it may give a table itself."""
    atoms = _limited(a for t in tables for a in t.atoms)
    memo: dict[Any, Any] = {}
    raw = {}
    for bits in assignments(atoms):
        case = dict(zip(atoms, bits, strict=True))
        try:
            leaves = tuple(t.at(case) for t in tables)
        except KeyError:
            continue
        if leaves not in memo:
            memo[leaves] = function(*leaves)
        raw[bits] = memo[leaves]
    return _flattened(atoms, raw)


def joint(*tables: Table) -> Iterator[tuple[dict[Atom, bool], list[Any]]]:
    """Every case over the atoms of some tables, with a leaf of each."""
    atoms = _limited((a for t in tables for a in t.atoms), LIMIT + 2)
    for bits in assignments(atoms):
        case = dict(zip(atoms, bits, strict=True))
        try:
            yield case, [t.at(case) for t in tables]
        except KeyError:
            continue


def _limited(atoms: Iterable[Atom], limit: int = LIMIT) -> tuple[Atom, ...]:
    found = ordered(atoms)
    if len(found) > limit:
        raise Unknown(f"{len(found)} conditions at once")
    return found


def _flattened(atoms: tuple[Atom, ...], raw: dict[tuple[bool, ...], Any]) -> Table:
    """A table whose leaves are tables, as one."""
    inner = [a for leaf in raw.values() if isinstance(leaf, Table) for a in leaf.atoms]
    if not inner:
        return reduced(Table(atoms, {b: leaf.only if isinstance(leaf, Table) else leaf for b, leaf in raw.items()}))
    every = _limited([*atoms, *inner])
    rows = {}
    for bits in assignments(every):
        case = dict(zip(every, bits, strict=True))
        leaf = raw.get(tuple(case[a] for a in atoms))
        if isinstance(leaf, Table):
            leaf = leaf.rows.get(tuple(case[a] for a in leaf.atoms))
        if leaf is not None:
            rows[bits] = leaf
    return reduced(Table(every, rows))


def reduced(table: Table) -> Table:
    """Without atoms that nothing depends on."""
    atoms, rows, at = list(table.atoms), table.rows, 0
    while at < len(atoms):
        merged: dict[tuple[bool, ...], Any] = {}
        if all(merged.setdefault(bits[:at] + bits[at + 1 :], leaf) == leaf for bits, leaf in rows.items()):
            del atoms[at]
            rows = merged
        else:
            at += 1
    return Table(tuple(atoms), rows)


# --- what can happen -----------------------------------------------------------------------------------


def feasible(case: dict[Atom, bool]) -> bool:
    return _positions_agree(case) and _tests_agree(case)


def _positions_agree(case: dict[Atom, bool]) -> bool:
    """No formula is both c or more and less than c."""
    tests = [(a, holds) for a, holds in case.items() if isinstance(a, AtLeast)]
    for a, holds in tests:
        for b, other in tests:
            if a.coefs == b.coefs and holds and not other:
                gap = a.least - b.least
                if (isinstance(gap, int) or gap.is_Integer) and gap >= 0:
                    return False
    return True


def _tests_agree(case: dict[Atom, bool]) -> bool:
    """One tensor at one index has one value, and numbers are ordered."""
    by_tensor: dict[Any, list[tuple[Test, bool]]] = {}
    for atom, holds in case.items():
        if isinstance(atom, Test) and atom.how != "true":
            by_tensor.setdefault((atom.node, atom.index), []).append((atom, holds))
    return all(_some_value(tests) for tests in by_tensor.values() if len(tests) > 1)


def _some_value(tests: list[tuple[Test, bool]]) -> bool:
    """Is there a number that gives these answers? Candidates: those asked for, and some around them."""
    asked = {t.value for t, _ in tests if t.value is not None and math.isfinite(t.value)}
    tried = [math.nan, -math.inf, math.inf, *asked, *(near for v in asked for near in _around(v))]
    if any(t.value is not None and not math.isfinite(t.value) for t, _ in tests):
        tried += [0.0]
    return any(all(compared(v, t) == holds for t, holds in tests) for v in tried)


def _around(v: float) -> list[float]:
    """The numbers before and after. A float does not hold all whole ones."""
    whole = [v - 1, v + 1] if isinstance(v, int) else []
    return [*whole, math.nextafter(v, -math.inf), math.nextafter(v, math.inf)]


def compared(value: Any, test: Test) -> Any:
    """The answer of a test; for tensors too."""
    wanted = test.value
    match test.how:
        case "eq":
            return value == wanted
        case "ne":
            return value != wanted
        case "gt":
            return value > wanted
        case "ge":
            return value >= wanted
        case "lt":
            return value < wanted
        case "le":
            return value <= wanted
        case _:
            return value
