"""Programs in a narrow type: eager in float64 on the same numbers says what is right, eager itself what is ordinary.

A narrow type is where sums overflow, counts stop and masks lose their meaning, and where an identity of real numbers
is none. turbogr may be as far off as eager is, or nearer; it must give a number wherever eager gives one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from .program import Program

LOUDNESS = (1.0, 1.0, 16.0, 128.0)  # of embeddings: their sums of squares leave float16
AS_FAR = 4.0  # as eager is off
DIGITS = 16.0  # units of the last place that any order of the same sums may take
LEAST = 1e-4  # what is smaller is measured as if it were that large


def narrowed(programs: Iterator[tuple[str, Program]], dtype: str) -> Iterator[tuple[str, Program]]:
    for name, program in programs:
        loud = program.loud * LOUDNESS[program.seed % len(LOUDNESS)]
        yield f"{name} {dtype}", replace(program, dtype=dtype, loud=loud)


def converted(values: Sequence[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    return [x.detach().to(dtype).requires_grad_(x.requires_grad) if x.is_floating_point() else x for x in values]


def compare(
    exact: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], actual: Mapping[str, torch.Tensor],
    epsilon: float,
) -> list[tuple[str, str, str, float]]:  # fmt: skip
    """(verdict, name, what differs, by how much) of each value that differs: different, or nan."""
    gradients = [n for n in expected if n.startswith("gradient")]
    scale = _largest(*(expected[n] for n in gradients))
    if not all(bool(expected[n].isfinite().all()) for n in gradients):
        scale = max(scale, _largest(*(exact[n] for n in gradients if n in exact)))
    found = [(*_compared(exact.get(n), a, actual[n], epsilon, scale), n) for n, a in expected.items()]
    return [(kind, name, text, error) for kind, text, error, name in found if kind != "same"]


def _compared(
    exact: torch.Tensor | None, a: torch.Tensor, b: torch.Tensor, epsilon: float, scale: float
) -> tuple[str, str, float]:
    t = a if exact is None or exact.shape != a.shape else exact
    if not a.is_floating_point():
        wrong = (a != b) & (b != t) & (a == t)
        return ("different", "other values", 1.0) if bool(wrong.any()) else ("same", "", 0.0)
    a, b, t = a.double(), b.double(), t.double()
    if bool((a.isfinite() & ~b.isfinite()).any()):
        return "different", "not finite in turbogr alone", 1.0
    spoiled = bool((~a.isfinite()).any())  # what eager has no number for has the scale that it should have
    measure = max(_largest(a), scale, _largest(t) if spoiled else 0.0, LEAST)
    ordinary = DIGITS * epsilon * measure
    right = a.isfinite() & b.isfinite() & t.isfinite()
    error, eager = _largest((b - t)[right]), _largest((a - t)[right])
    if error > AS_FAR * eager + ordinary:
        return "different", f"{error:.1e} off, eager {eager:.1e}, of {_largest(a):.1e}", error / measure
    unknown = a.isfinite() & b.isfinite() & ~t.isfinite()
    apart = _largest((a - b)[unknown])
    if apart > ordinary:
        return "different", f"{apart:.1e} apart, of {_largest(a):.1e}", apart / measure
    more = ~a.isfinite() & b.isfinite()  # wider inside, as it may be
    if bool((more & ~((b - t).abs() <= AS_FAR * eager + ordinary)).any()):
        return "nan", "not finite in eager alone", 1.0
    return "same", "", 0.0


def _largest(*tensors: torch.Tensor) -> float:
    finite = [x.double().abs().nan_to_num(0.0, 0.0, 0.0).max() for x in tensors if x.numel()]
    return max(map(float, finite), default=0.0)
