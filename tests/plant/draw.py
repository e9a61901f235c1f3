"""Which faults are planted: a share of all, or so many of every module and kind. The same every time."""

from __future__ import annotations

import ast
import hashlib
import pkgutil
import re
from collections.abc import Iterator, Sequence
from itertools import chain, islice, zip_longest

import torch

import turbogr_compile.passes.rows as rows
from turbogr_compile.passes.rows.declaration import _DECLARED as DECLARED

from .faults import KINDS, Fault, faults, source_of

LEAST = 2  # of a module


def modules() -> list[str]:
    """Of the row analysis, without those that tell what it found, and those that ask whether it pays."""
    found = [m.name for m in pkgutil.walk_packages(rows.__path__, f"{rows.__name__}.")]
    return [n for n in found if not n.endswith((".report", ".telling", ".missed", ".installed", ".paying"))]


def chosen(names: list[str], share: float, only: Sequence[str] = ("",)) -> list[Fault]:
    """A share of the faults, in no order."""
    every = [f for name in names for f in faults(name) if any(o in str(f) for o in only)]
    return sorted((f for f in every if _number(f) <= share), key=_number)


def drawn(names: list[str], count: int) -> list[Fault]:
    """About so many: of each module as many as its size asks for, of all kinds in turn."""
    of = {name: [f for f in faults(name) if f.kind and not says_less(str(f))] for name in names}
    total = sum(map(len, of.values()))
    found = [f for every in of.values() for f in islice(_in_turn(every), max(LEAST, round(count * len(every) / total)))]
    return sorted(found, key=_number)


def _in_turn(every: list[Fault]) -> Iterator[Fault]:
    once = {str(f): f for f in sorted(every, key=_number)}.values()
    piles = [[f for f in once if f.kind == kind] for kind in KINDS]
    return (f for f in chain.from_iterable(zip_longest(*piles)) if f is not None)


def _number(fault: Fault) -> float:
    return int(hashlib.sha1(f"{fault} {fault.node}".encode()).hexdigest()[:8], 16) / 0xFFFFFFFF


# A declaration without a part of it: of the op, or of calls with that argument, nothing is known, and they stay padded.
_LESS = re.compile(r" row_op\(.*: (leave out '|without (axes|zeros|reads|spans)=)|: without strict=True$")
_ALL = ": every argument is said to be read"


def says_less(fault: str) -> bool:
    """Can it change no number, whatever the program, by what was done?"""
    if not fault.endswith(_ALL):
        return bool(_LESS.search(fault))
    module, _, line = fault.split(" ")[0].rpartition(":")
    statement = next((s for s in source_of(module).body if s.lineno == int(line)), None)
    calls = [n for n in ast.walk(statement) if isinstance(n, ast.Call)] if statement is not None else []
    names = [a.value for a in calls[0].args if isinstance(a, ast.Constant)] if calls else []
    return bool(names) and all(_reads_all(str(name)) for name in names)


def _reads_all(name: str) -> bool:
    """Is there no argument of the op that its declaration does not read already?"""
    short, _, overload = name.partition(".")
    packet, models = getattr(torch.ops.aten, short, None), set(DECLARED[name].models)
    if packet is None or "*" in models:
        return packet is not None
    schemas = [getattr(packet, o)._schema for o in packet.overloads() if o == overload or not overload]
    taken = [{a.name for a in s.arguments} for s in schemas if any("Tensor" in str(a.type) for a in s.arguments)]
    return all(names <= models for names in taken if not names & {"out", "values"})
