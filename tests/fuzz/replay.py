"""What a printed script calls: its step in eager and through `turbogr_compile.compile`, side by side."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

import turbogr_compile

from . import data
from .data import Sizes
from .judge import arguments, compare, computes_in, explained, outcome, quiet, tolerance_of
from .program import Program


def check(
    step: Callable[..., Any],
    *,
    seed: int,
    batches: Sequence[str],
    loud: float = 1.0,
    capacity: Any = None,
    target: str = "eager",
    **sizes: Any,
) -> bool:
    """Print one line per batch; is everything the same?"""
    names = list(inspect.signature(step).parameters)
    program = Program((), "", (), Sizes(**sizes), tuple(batches), seed, loud=loud)
    same = True
    with quiet():
        torch._dynamo.reset()
        compiled = turbogr_compile.compile(step, target=target, verify="fast", worth="always", capacity=capacity)
        for kind in batches:
            batch = data.make_batch(kind, seed * 31 + data.hash_of(kind), program.sizes)
            values = arguments(names, batch, program)
            expected, actual = outcome(step, names, values), outcome(compiled, names, values)
            tolerance = tolerance_of(computes_in(step, names, values))
            found = compare(expected, actual, tolerance)
            verdict, text, _ = explained(found, (step, names, values), expected, actual, tolerance, compiled)
            same &= verdict == "same"
            print(f"{kind}: eager {_shown(expected)}   turbogr {_shown(actual)}   {verdict} {text}")
    print(*turbogr_compile.statistics(), sep="\n")
    return same


def _shown(found: Any) -> str:
    return f"{type(found.error).__name__}" if found.error is not None else f"{float(found.values['loss']):.10g}"
