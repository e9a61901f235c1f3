"""What a printed script calls: its step in eager and through `turbogr_compile.compile`, side by side."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

import turbogr_compile

from .data import Sizes
from .judge import computes_in, difference, exactly, explained, inputs, outcome, quiet
from .program import Program


def check(
    step: Callable[..., Any],
    *,
    seed: int,
    batches: Sequence[str],
    loud: float = 1.0,
    capacity: Any = None,
    dtype: str = "float64",
    target: str = "eager",
    **sizes: Any,
) -> bool:
    """Print one line per batch; is everything the same?"""
    names = list(inspect.signature(step).parameters)
    program = Program((), "", (), Sizes(**sizes), tuple(batches), seed, loud=loud, dtype=dtype)
    same = True
    with quiet():
        found = [inputs(program, number, names) for number in range(len(batches))]
        exact = [exactly((step, names, values)) if dtype != "float64" else None for values in found]
    with quiet(dtype):
        torch._dynamo.reset()
        compiled = turbogr_compile.compile(step, target=target, verify="fast", worth="always", capacity=capacity)
        for kind, values, right in zip(batches, found, exact, strict=True):
            expected, actual = outcome(step, names, values), outcome(compiled, names, values)
            computed = computes_in(step, names, values) | {getattr(torch, dtype)}
            differs, tolerance = difference(right, expected, actual, computed)
            verdict, text, _ = explained(differs, (step, names, values), expected, actual, tolerance, compiled)
            same &= verdict == "same"
            print(f"{kind}: eager {_shown(expected)}   turbogr {_shown(actual)}   {verdict} {text}")
    print(*turbogr_compile.statistics(), sep="\n")
    return same


def _shown(found: Any) -> str:
    return f"{type(found.error).__name__}" if found.error is not None else f"{float(found.values['loss']):.10g}"
