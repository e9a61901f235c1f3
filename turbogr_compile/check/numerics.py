"""Does a graph still compute the same numbers? Compared against float64 where that is possible.

A rewrite is accepted when its error against the float64 reference is not much larger than the error of the graph
before it: a more accurate fusion passes, and a low-precision baseline does not hide damage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .. import _torch
from ..runtime.prologue import KEY, Call, Unprovable, providers, supply
from .row_gradients import gathered_in, journals_kept, receipts_of

SLACK = 8.0  # how much larger the error may become


@dataclass(frozen=True)
class Verdict:
    """Outcome of one comparison; errors are relative to the largest reference value."""

    wrong: bool
    text: str
    before: float = 0.0
    after: float = 0.0


def compare_graphs(owner: fx.GraphModule, before: fx.Graph, after: fx.Graph, inputs: Sequence[Any] | None) -> Verdict:
    """Run two graphs with the attributes of `owner` on the same numbers, values and gradients."""
    try:
        return _compare_on(owner, before, after, inputs_for(before, inputs))
    except Exception:
        # Made-up integers may be out of some range; zero is a legal index into anything.
        try:
            return _compare_on(owner, before, after, inputs_for(before, inputs, integers=(0, 1)))
        except Unprovable as refusal:
            return Verdict(False, f"not comparable: made-up inputs cannot take the graph: {refusal.reason}")


def _compare_on(owner: fx.GraphModule, before: fx.Graph, after: fx.Graph, numbers: list[Any] | None) -> Verdict:
    if numbers is None:
        return Verdict(False, "not comparable: an input cannot be made up")
    try:
        reference = evaluate(owner, before, [_to_double(x) for x in numbers], double=True)
    except Exception:
        reference = None  # an op without a float64 kernel; fall back to comparing with each other
    old = evaluate(owner, before, numbers)
    new = evaluate(owner, after, numbers)
    return compare(old, new, reference)


def compare(old: list[Any], new: list[Any], reference: list[Any] | None = None) -> Verdict:
    """Compare two lists of results, value by value."""
    if len(old) != len(new):
        return Verdict(True, f"{len(old)} results became {len(new)}")
    worst = Verdict(False, "equal")
    for i, (a, b) in enumerate(zip(old, new, strict=True)):
        verdict = _compare_one(i, a, b, reference[i] if reference else None)
        if verdict.wrong:
            return verdict
        if verdict.after > worst.after:
            worst = verdict
    return worst


def _compare_one(i: int, a: Any, b: Any, reference: Any) -> Verdict:
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return Verdict(a is not b and a != b, f"result {i}: {a} became {b}")
    if a.shape != b.shape:
        return Verdict(True, f"result {i}: shape {tuple(a.shape)} became {tuple(b.shape)}")
    if not a.dtype.is_floating_point:
        differ = int((a != b).sum())
        return Verdict(differ > 0, f"result {i}: {differ} of {a.numel()} values differ")
    exact = (a if reference is None else reference).double()
    finite = exact.isfinite()
    if not torch.equal(_kind(a), _kind(b)):
        return Verdict(True, f"result {i}: different elements are infinite or nan", after=float("inf"))
    scale = max(exact[finite].abs().max().item() if finite.any() else 0.0, 1e-30)
    error_before = _distance(a.double(), exact, finite) / scale
    error_after = _distance(b.double(), exact, finite) / scale
    tiny = 8 * torch.finfo(a.dtype).eps
    wrong = error_after > SLACK * error_before + tiny
    text = f"result {i}: relative error {error_before:.1e} became {error_after:.1e}"
    return Verdict(wrong, text, error_before, error_after)


def _kind(x: torch.Tensor) -> torch.Tensor:
    """0 where finite, and a number each for nan, inf and -inf."""
    return x.isnan() + 2 * x.isposinf() + 3 * x.isneginf()


def _distance(x: torch.Tensor, exact: torch.Tensor, where: torch.Tensor) -> float:
    return (x - exact)[where].abs().max().item() if where.any() else 0.0


def evaluate(owner: fx.GraphModule, graph: fx.Graph, inputs: Sequence[Any], double: bool = False) -> list[Any]:
    """Outputs, inputs as the graph leaves them, then gradients of all of these by every input that requires one."""
    own = len(inputs)
    module = fx.GraphModule(owner, _torch.copy_graph(graph))  # a graph belongs to the module made last
    added = supply(providers(graph), Call(inputs))
    inputs = [*inputs, *(map(_to_double, added) if double else added)]
    leaves = [x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x for x in inputs]
    wanted = [x for x in leaves if isinstance(x, torch.Tensor) and x.requires_grad]
    run = _Doubled(module) if double else fx.Interpreter(module)
    with torch.random.fork_rng(devices=[]), torch.set_grad_enabled(bool(wanted)):
        torch.manual_seed(0)
        # Inputs a graph mutates must not be leaves.
        passed = [x.view_as(x) if isinstance(x, torch.Tensor) and x.requires_grad else x for x in leaves]
        result = run.run(*passed)
    outputs = list(result) if isinstance(result, (list, tuple)) else [result]
    outputs += passed[:own]
    sources = [o for o in outputs if isinstance(o, torch.Tensor) and o.requires_grad]
    grads: tuple[Any, ...] = ()
    if sources and wanted:
        seeds = [_seed(o) for o in sources]
        receipts = receipts_of(graph)
        places = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor) and x.requires_grad]
        with journals_kept(receipts.values()):
            found = torch.autograd.grad(sources, wanted, seeds, allow_unused=True)
            grads = tuple(gathered_in(found, places, receipts))
    return [o.detach() if isinstance(o, torch.Tensor) else o for o in outputs] + list(grads)


class _Doubled(fx.Interpreter):
    """Runs in float64: dtype arguments that ask for a smaller float are widened."""

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        return result.double() if isinstance(result, torch.Tensor) and result.is_floating_point() else result

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> Any:
        args, kwargs = super().fetch_args_kwargs_from_env(n)
        widen = {torch.float16, torch.bfloat16, torch.float32}
        kwargs = {k: torch.float64 if isinstance(v, torch.dtype) and v in widen else v for k, v in kwargs.items()}
        args = tuple(torch.float64 if isinstance(v, torch.dtype) and v in widen else v for v in args)
        return args, kwargs


def _seed(output: torch.Tensor) -> torch.Tensor:
    """Cotangent without symmetry, so that permuted or swapped results do not cancel."""
    ramp = torch.linspace(0.5, 1.5, output.numel(), dtype=torch.float64)
    return ramp.to(output.dtype).reshape(output.shape)


def inputs_for(graph: fx.Graph, inputs: Sequence[Any] | None, integers: tuple[int, int] = (1, 3)) -> list[Any] | None:
    """Real inputs where given, else numbers made from the graph's own description of its inputs.

    What passes added is left to its providers.
    """
    given = list(inputs or ())
    values = [n.meta.get("val") for n in graph.find_nodes(op="placeholder") if KEY not in n.meta]
    made = []
    generator = torch.Generator().manual_seed(0)
    for i, value in enumerate(values):
        real = given[i] if i < len(given) else None
        if isinstance(real, (int, torch.Tensor)) and not isinstance(real, (bool, _torch.FakeTensor)):
            made.append(real)
        else:
            invented = _invent(value, generator, integers)
            if invented is None and value is not None:
                return None
            made.append(invented)
    return made


def _invent(value: Any, generator: torch.Generator, integers: tuple[int, int]) -> Any:
    if isinstance(value, torch.Tensor):
        sizes = [s for size in value.shape if (s := _hint(size)) is not None]
        if len(sizes) < value.ndim:
            return None
        if value.dtype.is_floating_point:
            made = torch.randn(sizes, generator=generator, dtype=torch.float64).to(value.dtype)
            return made.requires_grad_(value.requires_grad)
        # Masks of both values: one that is false everywhere would hide what it masks.
        low, high = (0, 2) if value.dtype is torch.bool else integers
        return torch.randint(low, high, sizes, generator=generator).to(value.dtype)
    if isinstance(value, torch.SymInt):
        return _hint(value)
    return value if isinstance(value, (int, float, bool)) else None


def _hint(size: Any) -> int | None:
    if isinstance(size, int):
        return size
    return int(size.node.hint) if size.node.has_hint() else None


def _to_double(x: Any) -> Any:
    if isinstance(x, torch.Tensor) and x.is_floating_point():
        return x.detach().double().requires_grad_(x.requires_grad)
    return x
