"""From a proof to the source of what is asked of a call's inputs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from ... import _torch
from ...kernels.contract import Question
from ...kernels.contract.entries import (
    ASCENDING,
    DISTANCES,
    RANGE,
    RANGE_BUT,
    RANGE_WITHIN,
    Ascending,
    Distances,
    Range,
)
from .proof import Proof
from .sizes import Size


def source_of(proof: Proof) -> tuple[str, int]:
    """`fit(native, *tensors, *numbers)`, and how many numbers it hands to the native check.

    Sizes come first, then entries in one call. Types are those of the graph already, and so are constant sizes.
    """
    names = {node.name: f"input_{i}" for i, node in enumerate([*proof.tensors, *proof.numbers])}
    lines, checks = list(_sizes(proof, names)), []
    for question in _without_those_that_follow(proof.asked):
        for x in question:
            if name := names.get(getattr(x, "name", "")):
                lines.append(f"{name}_whole = {name}.contiguous()")
        checks.append(_numbers(question, names))
    numbers = [number for check in dict.fromkeys(checks) for number in check]
    if numbers:
        lines.append(f"return native(pack({', '.join(map(str, numbers))}), {8 * len(numbers)}) is None")
    else:
        lines.append("return True")
    head = f"def fit(native, {', '.join(names.values())}):"
    return "\n    ".join([head, *dict.fromkeys(lines)]), len(numbers)


def _sizes(proof: Proof, names: dict[str, str]) -> Iterator[str]:
    """A symbol is found once and compared wherever else it stands, alone or with others."""
    for symbol, (node, dim) in proof.found.items():
        yield f"{symbol} = {names[node.name]}" + ("" if dim is None else f".shape[{dim}]")
        low, high = proof.bounds[symbol]
        yield f"if not {low} <= {symbol} <= {high}: return False"
    for node in proof.tensors:
        shape = node.meta["val"].shape
        if any(type(size) is not int for size in shape):
            yield f"if {names[node.name]}.shape != ({', '.join(map(_text, shape))},): return False"
    for node in proof.numbers:
        name = names[node.name]
        yield f"if type({name}) is not int or {name} != {_text(node.meta['val'])}: return False"
    for condition in _torch.assumptions(proof.env, proof.found.keys()):
        yield f"if not ({condition}): return False"


def _text(size: Any) -> str:
    if isinstance(size, torch.SymInt):
        return _torch.python_of(size.node.expr)
    return str(size.expr) if isinstance(size, Size) else str(size)


# --- entries -----------------------------------------------------------------------------------------


def _without_those_that_follow(asked: Iterable[Question]) -> Sequence[Question]:
    """A column below 200 is below 2^29 too, and so are distances of columns."""
    below: dict[str, int] = {}
    for question in asked:
        if isinstance(question, Range) and type(question.limit) is int and question.within is question.but is None:
            name = _name(question.x)
            below[name] = min(below.get(name, question.limit), question.limit)

    def follows(question: Question) -> bool:
        if isinstance(question, Distances):
            columns = _name(question.query_columns), _name(question.key_columns)
            return all(name in below and _at_most(below[name], question.limit) for name in columns)
        if isinstance(question, Range) and question.within is not None:
            return _name(question.x) in below and _at_most(below[_name(question.x)], question.limit)
        return False

    return [question for question in asked if question.limit is not None or isinstance(question, Ascending)
            if not follows(question)]  # fmt: skip


def _name(x: Any) -> str:
    return str(x.name)


def _at_most(number: int, limit: Any) -> bool:
    return limit is None or (type(limit) is int and number <= limit)


def _numbers(question: Question, names: dict[str, str]) -> tuple[Any, ...]:
    """As entries.py lists them for the native check."""

    def at(x: Any) -> str:
        return f"{names[x.name]}_whole.data_ptr()"

    if isinstance(question, Distances):
        tensors = (question.query_columns, question.key_columns, question.query_offsets, question.key_offsets)
        return (DISTANCES, *map(at, tensors), _text(question.query_offsets.numel()), _text(question.limit))
    x: Any = question.x
    data = at(x), _text(x.numel()), x.element_size()
    if isinstance(question, Ascending):
        limit, how = (-1, 0) if question.limit is None else (_text(question.limit), 2 if question.whole else 1)
        return (ASCENDING, *data, limit, how)
    limit = _text(question.limit)
    if question.but is not None:
        return (RANGE_BUT, *data, limit, _text(question.but))
    if question.within is not None:
        within: Any = question.within
        return (RANGE_WITHIN, *data, limit, at(within), _text(within.numel()))
    return (RANGE, *data, limit)
