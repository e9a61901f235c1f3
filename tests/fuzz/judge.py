"""A program in eager and by turbogr, batch by batch: loss, gradients of everything, padded outputs, buffers.

Same means: close in float64 (looser where the program itself computes in a narrower type), not a number in the same
places, or an error of the same type.
"""

from __future__ import annotations

import gc
import logging
import math
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

import turbogr_compile

from . import data, narrow
from .explain import SHAKES, SLACK, Shaken, Shifted, Wide, products, strong_masks, strong_zeros
from .fast import Fast
from .program import Program

TOLERANCE = {torch.float64: 1e-9, torch.float32: 3e-5, torch.float16: 3e-2, torch.bfloat16: 2e-1}
WRONG = ("crash", "different", "nan", "raises")  # the worst first
EXPLAINED = ("assumed", "rounding")
LARGEST_SCORE = 4096.0  # assumption A
BEYOND_MASKS = 1e12  # scores that -1e9 does not even order: nothing can be said of them
ABSURD = 1e60  # numbers beyond are the lowest float with something multiplied to it: no digit of them means anything
INFINITY = re.compile(r"float\(['\"]-inf['\"]\)|-torch\.inf")
_DEGREES = (*WRONG, *EXPLAINED)
Run = Callable[..., Any]
Step = tuple[Run, Sequence[str], Sequence[torch.Tensor]]


@dataclass
class Outcome:
    """What a step leaves behind, by name; or the error it raised."""

    values: dict[str, torch.Tensor] = field(default_factory=dict)
    error: Exception | None = None

    @property
    def poisoned(self) -> bool:
        return self.error is None and not bool(self.values["loss"].isfinite())


@dataclass
class Verdict:
    """How turbogr did on a program.

    status: same; wrong by degrees: crash, different, nan (eager alone is not a number somewhere), raises (eager alone
    raises); explained: assumed (assumption A or D of docs/soundness.md does not hold), rounding (the program magnifies
    it); pass-error (a pass was dropped; results are right), refused (no graph was captured); or invalid (eager itself
    cannot run the first batch: nothing was asked).
    """

    status: str
    program: Program
    notes: list[str] = field(default_factory=list)
    packed_calls: int = 0
    calls: int = 0
    kinds: dict[str, str] = field(default_factory=dict)  # of each batch: same, nan, raises, different
    remarks: list[str] = field(default_factory=list)
    fallbacks: dict[str, int] = field(default_factory=dict)
    agreed: Counter[str] = field(default_factory=Counter)  # batches on which both raise, or neither gives a number
    compiled: Any = None  # what was judged
    error: float = 0.0  # the largest difference, relative to what it is a difference of

    @property
    def packed(self) -> bool:
        return self.packed_calls > 0

    @property
    def wrong(self) -> bool:
        return self.status in WRONG


@contextmanager
def quiet(default: str = "float64") -> Iterator[None]:
    """One thread, float64, no warnings; as it was afterwards."""
    dtype, threads, off = torch.get_default_dtype(), torch.get_num_threads(), logging.root.manager.disable
    torch.set_default_dtype(getattr(torch, default))
    torch.set_num_threads(1)
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_num_threads(threads)
        logging.disable(off)


def inputs(program: Program, number: int, names: Sequence[str] = ()) -> list[torch.Tensor]:
    """What the program is called with for its batch of this number."""
    kind = program.kinds[number]
    batch = data.make_batch(kind, program.seed * 31 + data.hash_of(kind), program.sizes)
    return narrow.converted(arguments(names or program.arguments, batch, program), getattr(torch, program.dtype))


def arguments(names: Sequence[str], batch: data.Batch, program: Program) -> list[torch.Tensor]:
    found = []
    for name in names:
        if name in data.BATCH:
            value = data.BATCH[name](batch)
        else:
            value = data.fixed(name, program.sizes, program.seed, program.loud)
            if name == "ema" and batch.kind != program.kinds[0]:  # a running mean moves on
                value = torch.randn(value.shape, generator=batch.noise(name), dtype=value.dtype)
        found.append(value.requires_grad_() if name in data.PARAMETERS or name in data.WITH_GRADIENT else value)
    return found


def outcome(run: Run, names: Sequence[str], values: Sequence[torch.Tensor]) -> Outcome:
    """One step on fresh copies: what it returns, gradients of all leaves, buffers afterwards."""
    fresh = [_copy(v).requires_grad_(v.requires_grad) for v in values]
    try:
        result = run(*fresh)
        results = list(result) if isinstance(result, tuple) else [result]
        total = weighted(results)
        leaves = {n: v for n, v in zip(names, fresh, strict=True) if v.requires_grad}
        gradients: dict[str, Any] = dict.fromkeys(leaves)
        if total.requires_grad and leaves:
            found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
            gradients = dict(zip(leaves, found, strict=True))
    except Exception as error:
        return Outcome(error=error)
    out = {"loss": results[0].detach()}
    out |= {f"output {i}": r.detach() for i, r in enumerate(results[1:], 1)}
    # No gradient and a zero gradient do not train alike: an optimizer decays what has one.
    out |= {f"gradient of {n}": torch.empty(0) if g is None else g for n, g in gradients.items()}
    out |= {f"buffer {n}": v.detach() for n, v in zip(names, fresh, strict=True) if n in data.BUFFERS}
    return Outcome(out)


def _copy(value: torch.Tensor) -> torch.Tensor:
    """Expanded as it was: graphs are compiled for strides too."""
    own = value.detach()
    for dim, stride in enumerate(value.stride()):
        own = own.narrow(dim, 0, 1) if stride == 0 and value.shape[dim] > 1 else own
    return own.clone().expand(value.shape)


def weighted(results: Sequence[torch.Tensor]) -> torch.Tensor:
    """Loss and padded outputs as one number, so that gradients enter by all of them."""
    total = results[0].sum()
    for number, result in enumerate(results[1:]):
        if result.is_floating_point() and result.requires_grad:
            g = torch.Generator().manual_seed(number)
            total = total + (result * torch.randn(result.shape, generator=g, dtype=torch.float64)).sum()
    return total


def compare(expected: Outcome, actual: Outcome, tolerance: float, scale: float | None = None) -> tuple[str, str, float]:
    """(verdict, what differs, by how much): same, nan, raises, crash or different; `scale` is that of gradients."""
    if expected.error is not None or actual.error is not None:
        return *_compare_errors(expected.error, actual.error), 0.0
    if expected.poisoned and actual.poisoned:
        return "same", "neither is a number", 0.0
    found = expected.values
    scale = _scale(expected) if scale is None else scale
    notes, verdict, worst = [], "same", 0.0
    for name, a in found.items():
        b = actual.values.get(name)
        if b is None or a.shape != b.shape or a.dtype != b.dtype:
            return "different", f"{name}: {_type(a)} became {_type(b)}", 1.0
        kind, text, error = _compare_tensors(a, b, tolerance, scale)
        if kind != "same":
            worst = max(worst, error)
            notes.append(f"{name}: {text}")
            verdict = "different" if "different" in (kind, verdict) else kind
    return verdict, "; ".join(notes[:4]), worst


def compare_narrow(exact: Outcome, expected: Outcome, actual: Outcome, epsilon: float) -> tuple[str, str, float]:
    """As `compare`, where float64 tells how far off eager is itself."""
    if expected.error is not None or actual.error is not None:
        return *_compare_errors(expected.error, actual.error), 0.0
    if expected.poisoned and actual.poisoned:
        return "same", "neither is a number", 0.0
    if _types(expected) != _types(actual):
        return "different", f"{_types(expected)} became {_types(actual)}", 1.0
    said = expected.values
    if expected.poisoned:  # gradients of what is no number are noise
        said = {name: x for name, x in said.items() if not name.startswith("gradient")}
    found = narrow.compare(exact.values, said, actual.values, epsilon)
    if not found:
        return "same", "", 0.0
    kind = "different" if any(verdict == "different" for verdict, *_ in found) else "nan"
    return kind, "; ".join(f"{name}: {text}" for _, name, text, _ in found[:4]), max(error for *_, error in found)


def difference(
    exact: Outcome | None, expected: Outcome, actual: Outcome, computes_in: set[torch.dtype]
) -> tuple[tuple[str, str, float], float]:
    """What `compare` finds, and the tolerance it was found with; `exact` is known of programs in a narrow type."""
    if exact is None:
        tolerance = tolerance_of(computes_in)
        return compare(expected, actual, tolerance), tolerance
    epsilon = max(torch.finfo(dtype).eps for dtype in computes_in)
    return compare_narrow(exact, expected, actual, epsilon), narrow.DIGITS * epsilon


def exactly(step: Step) -> Outcome:
    """What the step gives for these numbers in float64, its own casts left out."""
    run, names, values = step
    with Wide():
        return outcome(run, names, narrow.converted(values, torch.float64))


def _scale(found: Outcome) -> float:
    """The largest number in a gradient."""
    gradients = [g for n, g in found.values.items() if n.startswith("grad") and _finite(g)]
    return max((float(g.abs().max()) for g in gradients if g.numel()), default=0.0)


def _compare_errors(expected: Exception | None, actual: Exception | None) -> tuple[str, str]:
    if type(expected) is type(actual):
        return "same", "both raise"
    if actual is None:
        return "raises", f"eager raises {_said(expected)}, turbogr does not"
    if expected is None:
        return "crash", f"turbogr raises {_said(actual)}"
    return "raises", f"eager raises {_said(expected)}, turbogr {_said(actual)}"


def _compare_tensors(a: torch.Tensor, b: torch.Tensor, tolerance: float, scale: float) -> tuple[str, str, float]:
    if not a.is_floating_point():
        return ("same", "", 0.0) if a.equal(b) else ("different", "other values", 1.0)
    a, b = a.double(), b.double()
    if bool((a.isfinite() & (a.abs() > ABSURD)).any()) and bool((b.abs() > ABSURD).any()):
        return "same", "", 0.0
    both = a.isfinite() & b.isfinite()
    own = float(a[both].abs().max()) if bool(both.any()) else 0.0
    error = float((a - b)[both].abs().max()) if bool(both.any()) else 0.0
    # A gradient that is all but zero has the rounding errors of the others; in a narrow type, all of them.
    measure = max(own, (1e-2 if tolerance == TOLERANCE[torch.float64] else 1.0) * scale, 1e-4)
    if error > tolerance * measure:
        return "different", f"{error:.1e} off, of {own:.1e}", error / measure
    if not bool((both | (a == b) | (a.isnan() & b.isnan())).all()):
        more = "turbogr" if bool((a.isfinite() & ~b.isfinite()).any()) else "eager"
        kind = "different" if more == "turbogr" else "nan"
        return kind, f"not finite in {more} alone", 1.0
    return "same", "", 0.0


def _finite(x: torch.Tensor) -> bool:
    return bool(x.isfinite().all())


def _type(x: torch.Tensor | None) -> str:
    return "nothing" if x is None or x.shape == (0,) else f"{str(x.dtype)[6:]}{list(x.shape)}"


def _said(error: Exception | None) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0][:160] if str(error) else ''}"


def tolerance_of(computes_in: set[torch.dtype]) -> float:
    return max(TOLERANCE[d] for d in {torch.float64, *computes_in})


# --- differences that are no faults -----------------------------------------------------------------------


def explained(
    found: tuple[str, str, float], step: Step, expected: Outcome, actual: Outcome, tolerance: float, compiled: Run,
) -> tuple[str, str, float]:  # fmt: skip
    """The verdict, or what explains it."""
    if found[0] not in ("different", "nan") or _types(expected) != _types(actual):
        return found
    if _is_rounding(step, expected, actual, tolerance) or _same_when_wide(step, actual, tolerance):
        return "rounding", found[1], 0.0
    with products() as seen:
        outcome(*step)
    if seen.largest > LARGEST_SCORE and (
        seen.product > BEYOND_MASKS
        or _same_when_quiet(step, compiled, tolerance)
        or _same_when_hidden(step, actual, tolerance)
    ):
        return "assumed", f"scores of {seen.largest:.0e}, assumption A; {found[1]}", 0.0
    if seen.overflows and _same_when_quiet(step, compiled, tolerance):
        return "assumed", f"an exponential overflows, assumption B; {found[1]}", 0.0
    if (seen.overflows or seen.vanishes) and _same_when_shifted(step, actual, tolerance):
        return "assumed", f"exponentials overflow or vanish, assumption B; {found[1]}", 0.0
    if not _same_when_finite(step, expected):  # inputs that are not finite are checked
        return found
    if any(_without_nan(None, step, expected, actual, tolerance, backward) for backward in (False, True)):
        return "assumed", f"zero times infinity, assumption D; {found[1]}", 0.0
    if all(_without_nan(x, step, expected, actual, tolerance) for x in (0.37, -1.3)):
        return "assumed", f"not a number on rows nobody reads, assumption D; {found[1]}", 0.0
    return found


def _same_when_wide(step: Step, actual: Outcome, tolerance: float) -> bool:
    """Does the program narrow numbers that the compiled graph does not, and agree to the last digit otherwise?"""
    with Wide():
        wide = outcome(*step)
    narrow = tolerance > TOLERANCE[torch.float64]
    return narrow and compare(wide, actual, TOLERANCE[torch.float64])[0] == "same"


def _same_when_finite(step: Step, expected: Outcome) -> bool:
    """Is all that eager gives, and all that is not finite in it, there without what is not finite in the batch?"""
    run, names, values = step
    calm = [
        v.detach().nan_to_num(0.0, 1e3, -1e3).requires_grad_(v.requires_grad)
        if n in data.BATCH and v.is_floating_point() else v
        for n, v in zip(names, values, strict=True)
    ]  # fmt: skip
    return compare(expected, outcome(run, names, calm), TOLERANCE[torch.float64])[0] == "same"


def _same_when_quiet(step: Step, compiled: Run, tolerance: float) -> bool:
    """Do both agree once what scores are made of is so small that they lie within the bound?"""
    run, names, values = step
    for scale in (2.0**-4, 2.0**-8, 2.0**-16):
        less = [(v.detach() * scale).requires_grad_(v.requires_grad) if n in data.LOUD else v
                for n, v in zip(names, values, strict=True)]  # fmt: skip
        with products() as seen:
            wanted = outcome(run, names, less)
        # The products; what follows them may magnify scores further.
        small = seen.largest <= LARGEST_SCORE and not seen.overflows
        if small and compare(wanted, outcome(compiled, names, less), tolerance)[0] == "same":
            return True
    return False


def _same_when_hidden(step: Step, actual: Outcome, tolerance: float) -> bool:
    """Does eager give the same once every mask lies far below what it is to hide?"""
    with strong_masks(LARGEST_SCORE):
        return _agrees(step, actual, tolerance)


def _same_when_shifted(step: Step, actual: Outcome, tolerance: float) -> bool:
    """Does eager give the same once exponentials are taken as softmax takes them?"""
    with Shifted():
        return _agrees(step, actual, tolerance)


def _without_nan(
    instead: float | None, step: Any, expected: Outcome, actual: Outcome, tolerance: float, backward: bool = False
) -> bool:
    with strong_zeros(instead, backward):
        strong = outcome(*step)
    if strong.error is not None:
        return False
    # Gradients that are no numbers have no scale; they have one without what spoiled them.
    return compare(_either(expected, strong, actual), actual, tolerance, _scale(strong))[0] == "same"


def _agrees(step: Step, actual: Outcome, tolerance: float) -> bool:
    """Is what eager gives, as it runs now, the same, but for rounding in gradients?"""
    wanted = outcome(*step)
    if wanted.error is not None or _types(wanted) != _types(actual):
        return False
    forward = Outcome({n: x for n, x in wanted.values.items() if not n.startswith("gradient")})
    same = compare(forward, actual, tolerance)[0] == "same"
    return same and (compare(wanted, actual, tolerance)[0] == "same" or _is_rounding(step, wanted, actual, tolerance))


def _types(found: Outcome) -> dict[str, str]:
    return {name: _type(value) for name, value in found.values.items()}


def _is_rounding(step: Any, expected: Outcome, actual: Outcome, tolerance: float) -> bool:
    """Does eager move as much by the last bits of its own intermediate results?"""
    noise = dict.fromkeys(expected.values, 0.0)
    for seed in range(SHAKES):
        with Shaken(seed):
            shaken = outcome(*step)
        if shaken.error is not None:
            return False
        noise = {n: max(noise[n], _apart(a, shaken.values[n])) for n, a in expected.values.items()}
    pairs = {n: (a, actual.values[n]) for n, a in expected.values.items()}
    scale = _scale(expected)
    return all(
        _compare_tensors(a, b, tolerance, scale)[0] == "same" or _apart(a, b) <= SLACK * noise[n]
        for n, (a, b) in pairs.items()
    )


def _apart(a: torch.Tensor, b: torch.Tensor) -> float:
    if a.shape != b.shape or not a.is_floating_point() or not bool((a.isfinite() == b.isfinite()).all()):
        return math.inf
    return float((a - b).double().where(a.isfinite(), 0).abs().max()) if a.numel() else 0.0


def _either(expected: Outcome, strong: Outcome, actual: Outcome) -> Outcome:
    """Eager's numbers, but for places where it alone is not finite, and for what its NaN decided (a comparison) and
    turbogr does not say, too."""
    out = {}
    for name, a in expected.values.items():
        b, without = actual.values[name], strong.values[name]
        other = ~torch.isclose(a, b, atol=1e-9) if a.is_floating_point() else a != b
        spoiled = a.isfinite() & (a != without) & other | b.isfinite() & ~a.isfinite()
        out[name] = without.where(spoiled, a) if bool(spoiled.any()) else a
    return Outcome(out)


# --- the judgement ---------------------------------------------------------------------------------------


def judge(program: Program, **options: Any) -> Verdict:
    """Without Dynamo. A pass that fails is reported, and judged again without it."""
    with quiet():
        fn, names = program.function(), program.arguments
        batches = [inputs(program, k) for k in range(len(program.kinds))]
        exact = [exactly((fn, names, b)) if program.dtype != "float64" else None for b in batches]
    with quiet(program.dtype):
        expected = [outcome(fn, names, b) for b in batches]
        if expected[0].error is not None:
            return Verdict("invalid", program, [_said(expected[0].error)])
        if expected[0].values["loss"].dim() or not expected[0].values["loss"].is_floating_point():
            return Verdict("invalid", program, ["the loss is no number"])
        verdict = _judge_fast(program, fn, batches, expected, exact, options)
    return _without_laundering(verdict, options) if verdict.wrong else verdict


def _without_laundering(verdict: Verdict, options: dict[str, Any]) -> Verdict:
    """-inf makes NaN of SiLU in eager, on pads too (assumption D). Where a program makes numbers of NaN, which ones
    there were is told by masks that are finite: nothing else may differ then. Softmaxes take -inf as they should."""
    text = verdict.program.text
    if "nan_to_num" not in text or "softmax" in text or "scaled_dot" in text:
        return verdict
    finite = [replace(x, text=INFINITY.sub("-1e6", x.text)) for x in verdict.program.lines]
    if finite != list(verdict.program.lines) and not judge(verdict.program.with_lines(finite), **options).wrong:
        verdict.status = "assumed"
        verdict.notes.insert(0, "the same with finite masks, assumption D")
    return verdict


def open_dims(program: Program) -> dict[str, tuple[int, ...]]:
    """Of each input, dims whose sizes are symbols."""
    columns = data.OF_COLUMNS if program.sizes.open else {}
    sequences = data.OF_SEQUENCES if program.sizes.many else {}
    return {n: (*sequences.get(n, ()), *columns.get(n, ())) for n in program.arguments}


def _judge_fast(
    program: Program, fn: Run, batches: list[list[torch.Tensor]], expected: list[Outcome],
    exact: Sequence[Outcome | None], options: dict[str, Any],
) -> Verdict:  # fmt: skip
    names = program.arguments
    opened = open_dims(program)
    options = {"on_error": "fallback", "capacity": program.capacity, **options}
    try:
        compiled = Fast(fn, names, batches[0], open_dims=opened, **options)
        others = [Fast(fn, names, b, **options) if not compiled.fits(b) else None for b in batches]
    except Exception as error:
        return Verdict("crash", program, [f"compiling: {_said(error)}"])
    verdict = Verdict("same", program, compiled=compiled)
    computed = compiled.watch.computes_in | {getattr(torch, program.dtype)}
    for number, (batch, wanted, right) in enumerate(zip(batches, expected, exact, strict=True)):
        run = (others[number] or compiled).run
        got = outcome(run, names, batch)
        found, tolerance = difference(right, wanted, got, computed)
        _note(verdict, number, *explained(found, (fn, names, batch), wanted, got, tolerance, run))
    verdict.calls = compiled.stats.calls
    verdict.fallbacks = dict(compiled.stats.fallbacks)
    verdict.packed_calls = verdict.calls - sum(verdict.fallbacks.values())
    verdict.remarks = [f"{r.kind.value} [{r.id}] {r.text}" for r in compiled.watch.remarks]
    if not verdict.wrong and compiled.watch.failed_passes:
        verdict.status, verdict.notes = "pass-error", compiled.watch.failed_passes[:2]
    elif verdict.status == "same" and any("runs unmodified" in r for r in verdict.remarks):
        verdict.status = "refused"
    return verdict


def _note(verdict: Verdict, number: int, kind: str, text: str, error: float) -> None:
    verdict.error = max(verdict.error, error)
    verdict.kinds[f"{number} {verdict.program.kinds[number]}"] = kind
    if kind == "same":
        verdict.agreed.update([text] if text else [])
        return
    verdict.notes.append(f"batch {number} ({verdict.program.kinds[number]}): {text}")
    if verdict.status == "same" or _DEGREES.index(kind) < _DEGREES.index(verdict.status):
        verdict.status = kind


def confirm(program: Program, **options: Any) -> Verdict:
    """Through `turbogr_compile.compile`, as a user would."""
    with quiet():
        fn, names = program.function(), program.arguments
        batches = [inputs(program, number) for number in range(len(program.kinds))]
        exact = [exactly((fn, names, b)) if program.dtype != "float64" else None for b in batches]
    with quiet(program.dtype):
        torch._dynamo.reset()
        gc.collect()
        computed = computes_in(fn, names, batches[0]) | {getattr(torch, program.dtype)}
        usual = {"target": "eager", "verify": "fast", "worth": "always", "capacity": program.capacity}
        compiled = turbogr_compile.compile(fn, **{**usual, **options})
        verdict = Verdict("same", program)
        for number, (batch, right) in enumerate(zip(batches, exact, strict=True)):
            wanted, got = outcome(fn, names, batch), outcome(compiled, names, batch)
            found, tolerance = difference(right, wanted, got, computed)
            _note(verdict, number, *explained(found, (fn, names, batch), wanted, got, tolerance, compiled))
        verdict.calls = sum(s.calls for s in turbogr_compile.statistics())
        verdict.packed_calls = verdict.calls - sum(sum(s.fallbacks.values()) for s in turbogr_compile.statistics())
        del compiled
        torch._dynamo.reset()
        return verdict


def computes_in(fn: Run, names: Sequence[str], values: Sequence[torch.Tensor]) -> set[torch.dtype]:
    """Narrow types that the program itself calculates with."""
    try:
        return Fast(fn, names, values).watch.computes_in
    except Exception:
        return set()
