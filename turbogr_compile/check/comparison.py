"""A compiled graph and the captured one, run on the same numbers and compared.

Both run on stand-ins of the real inputs, so that nothing is written twice, with the random state put back afterwards.
Compared are outputs, inputs that the graph writes to and, where gradients are on, the gradients of all of these by
every input that requires one, for random cotangents.

Two tensors agree when |a - b| <= TOLERANCE[dtype] * |a| in the Euclidean norm, and infinities, nans and integers are
equal. What cancels to nearly nothing (the gradient of a bias in front of a softmax) has no meaningful relative error:
a tensor that fails this test also agrees when its distance is at most SLACK times what rounding does to the captured
graph itself, measured by running that graph with the last bit of every intermediate result shaken.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import fx

from .. import _torch
from ..graph.provenance import line_of
from ..graph.text import type_text
from ..runtime.prologue import Unprovable
from .row_gradients import gathered_in, journals_kept, receipts_of

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
SLACK = 32.0
SHAKES = 3


class NotComparable(Exception):
    """The captured graph itself cannot run on these inputs: there is nothing to compare with."""


@dataclass(frozen=True)
class Result:
    """One thing a call leaves behind."""

    what: str
    value: Any
    derived: bool = False  # a gradient


class Comparison:
    """Runs the captured graph and the rewritten one on the same numbers.

    `added` computes what the rewritten graph takes besides the inputs; it raises Unprovable for a batch that the graph
    refuses, and nothing runs then.
    """

    def __init__(
        self, captured: fx.GraphModule, rewritten: Callable[..., Any], added: Callable[[Sequence[Any]], Sequence[Any]]
    ) -> None:
        self.captured, self.rewritten, self.added = captured, rewritten, added
        graph = captured.graph
        placeholders = graph.find_nodes(op="placeholder")
        self.names = [n.name for n in placeholders]
        self.written = [any(n in _torch.mutated_arguments(user) for user in n.users) for n in placeholders]
        (output,) = graph.find_nodes(op="output")
        self.outputs = [_describe(i, n) for i, n in enumerate(_listed(output.args[0]))]
        self.compared = [not _is_left(n) for n in _listed(output.args[0])]
        self.receipts = receipts_of(graph)

    def differences(self, inputs: Sequence[Any], *, made_up: bool = False) -> list[str]:
        """What differs, in words; empty when nothing does. Raises Unprovable where the rewritten graph refuses.

        `made_up`: nobody has called the model with these inputs. Where its outputs are infinite or nan on them, its
        gradients tell nothing: infinity times zero is nan in the captured graph, and a row less in the rewritten one.
        """
        with _random_state_kept(inputs), _unseen():
            served = self._served(inputs)
            seeded = torch.get_rng_state()
            try:
                expected = self._results(self.captured.forward, inputs)
            except Exception as error:
                raise NotComparable(f"{type(error).__name__}: {error}") from error
            torch.set_rng_state(seeded)  # what both draw, they draw alike
            try:
                actual = self._results(served, inputs)
            except Unprovable:
                raise
            except Exception as error:
                return [f"it raised {type(error).__name__}: {error}"]
            expected, actual = _with_zeros(expected, actual), _with_zeros(actual, expected)
            wrong = [i for i, (a, b) in enumerate(zip(expected, actual, strict=True)) if not agree(a.value, b.value)]
            if made_up and not all(_is_finite(r.value) for r in expected if not r.derived):
                wrong = [i for i in wrong if not expected[i].derived]
                if not wrong:
                    raise NotComparable("its outputs are not finite")
            noise = self._noise(expected, inputs, seeded) if wrong else []
        apart = {i: distance(expected[i].value, actual[i].value) for i in wrong}
        found = [i for i in wrong if not apart[i] <= SLACK * noise[i]]
        found.sort(key=lambda i: (expected[i].derived, -_relative(expected[i].value, apart[i])))
        return [_difference(expected[i], actual[i], apart[i]) for i in found]

    def differs(self, inputs: Sequence[Any]) -> bool:
        try:
            return bool(self.differences(inputs))
        except (Unprovable, NotComparable):
            return False

    def again(self, inputs: Sequence[Any]) -> None:
        """The compiled graph once more, backward included, for somebody who watches it."""
        with _random_state_kept(inputs), _unseen():
            self._results(self._served(inputs), inputs)

    def _served(self, inputs: Sequence[Any]) -> Callable[..., Any]:
        try:
            added = self.added(inputs)
        except Unprovable:
            raise
        except Exception as error:  # of the rewritten graph, where the captured one may be fine
            return partial(_raise, error)
        return lambda *given: self.rewritten(*given, *added)

    def _noise(self, expected: list[Result], inputs: Sequence[Any], seeded: torch.Tensor) -> list[float]:
        """What rounding does to each result of the captured graph, which draws what it drew."""
        worst = [0.0] * len(expected)
        for seed in range(SHAKES):
            torch.set_rng_state(seeded)
            shaken = _with_zeros(self._results(_Shaken(self.captured, inputs, seed).run, inputs), expected)
            worst = [max(w, distance(a.value, b.value)) for w, a, b in zip(worst, expected, shaken, strict=True)]
        return worst

    def _results(self, run: Callable[..., Any], inputs: Sequence[Any]) -> list[Result]:
        differentiable = torch.is_grad_enabled()
        leaves = [_stand_in(x, differentiable, w) for x, w in zip(inputs, self.written, strict=True)]
        # In-place writes do not go to leaves.
        passed = [x.clone() if w and _requires_grad(x) else x for x, w in zip(leaves, self.written, strict=True)]
        outputs = _listed(run(*passed))
        every = zip(self.outputs, outputs, self.compared, strict=True)
        values = [Result(what, x) for what, x, compared in every if compared]
        values += [
            Result(f"what is left in input {n}", x)
            for n, x, w in zip(self.names, passed, self.written, strict=True) if w
        ]  # fmt: skip
        with journals_kept(self.receipts.values()):
            gradients = _gradients([v.value for v in values], leaves, self.receipts) if differentiable else {}
        plain = [Result(v.what, v.value.detach() if isinstance(v.value, torch.Tensor) else v.value) for v in values]
        return plain + [Result(f"the gradient of {self.names[i]}", g, derived=True) for i, g in gradients.items()]


def _raise(error: Exception, *inputs: Any) -> Any:
    raise error


def _listed(result: Any) -> list[Any]:
    return list(result) if isinstance(result, (list, tuple)) else [result]


def _describe(i: int, node: Any) -> str:
    line = line_of(node) if isinstance(node, fx.Node) else None
    return f"output {i}" + (f" ({line})" if line is not None else "")


def _is_left(node: Any) -> bool:
    """Rows that are left for later readers are those that a graph happens to compute."""
    source = node.args[0] if isinstance(node, fx.Node) and node.target is operator.getitem else None
    return isinstance(source, fx.Node) and source.target is torch.ops.turbogr.leave_rows.default


def _requires_grad(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.requires_grad


def _stand_in(x: Any, differentiable: bool, written: bool) -> Any:
    """The same numbers in the same layout; memory of its own only where the graph writes: tables are large."""
    if not isinstance(x, torch.Tensor):
        return x
    alone = x.detach()
    if written:
        memory = x.untyped_storage().clone()
        alone = torch.empty(0, dtype=x.dtype, device=x.device).set_(memory, x.storage_offset(), x.shape, x.stride())
    return alone.requires_grad_() if differentiable and x.requires_grad else alone


def _random_state_kept(inputs: Sequence[Any]) -> AbstractContextManager[Any]:
    devices = {x.device for x in inputs if isinstance(x, torch.Tensor) and x.device.type not in ("cpu", "meta")}
    if not devices:
        return torch.random.fork_rng(devices=[])
    return torch.random.fork_rng(devices=list(devices), device_type=next(iter(devices)).type)


def _unseen() -> AbstractContextManager[Any]:
    """Activation checkpointing around the call counts the tensors that autograd saves: not these."""
    return torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, lambda x: x)


def _with_zeros(results: list[Result], others: list[Result]) -> list[Result]:
    """No gradient is one of zeros, which takes memory only where the others have one: tables are large."""
    return [
        replace(r, value=torch.zeros_like(o.value)) if r.derived and r.value is None and o.value is not None else r
        for r, o in zip(results, others, strict=True)
    ]


def _gradients(values: list[Any], leaves: list[Any], receipts: dict[int, int]) -> dict[int, torch.Tensor | None]:
    """By position of the input; None for what no output depends on."""
    wanted = {i: x for i, x in enumerate(leaves) if _requires_grad(x)}
    sources = {i: x for i, x in enumerate(values) if _requires_grad(x)}
    found: Sequence[torch.Tensor | None] = [None] * len(wanted)
    if wanted and sources:
        seeds = [_cotangent(i, x) for i, x in sources.items()]
        found = torch.autograd.grad(list(sources.values()), list(wanted.values()), seeds, allow_unused=True)
    return dict(zip(wanted, gathered_in(found, list(wanted), receipts), strict=True))


def _cotangent(seed: int, output: torch.Tensor) -> torch.Tensor:
    numbers = torch.randn(output.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
    return numbers.to(device=output.device, dtype=output.dtype)


class _Shaken(fx.Interpreter):
    """Moves intermediate results by their last bit. What no trained input reaches stays exact: ids, masks and time
    buckets are decided there."""

    def __init__(self, module: fx.GraphModule, inputs: Sequence[Any], seed: int) -> None:
        super().__init__(module)
        self.generator = torch.Generator().manual_seed(seed)
        placeholders = module.graph.find_nodes(op="placeholder")
        trained = {n for n, x in zip(placeholders, inputs, strict=True) if _requires_grad(x)}
        self.reached = trained or set(placeholders)
        for node in module.graph.nodes:
            if not self.reached.isdisjoint(node.all_input_nodes):
                self.reached.add(node)

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n.op != "call_function" or n not in self.reached or not _torch.is_functional(n):
            return result
        if isinstance(result, (list, tuple)):
            return type(result)(map(self._shake, result))
        return self._shake(result)

    def _shake(self, x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or not x.is_floating_point():
            return x
        signs = torch.randint(0, 2, x.shape, generator=self.generator).mul_(2).sub_(1).to(x)
        return x * (1 + torch.finfo(x.dtype).eps * signs)


# --- comparing ---------------------------------------------------------------------------------------


def agree(a: Any, b: Any) -> bool:
    """Equal up to the rounding one expects of this type."""
    apart = distance(a, b)
    return apart == 0 or (_is_float(a) and apart <= tolerance(a) * _norm(a))


def tolerance(x: torch.Tensor) -> float:
    """Relative to the norm."""
    return TOLERANCE.get(_plain(x).dtype, 0.0)


def distance(a: Any, b: Any) -> float:
    """0 when equal; infinite when not comparable; for integers, how many differ."""
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return 0.0 if a is b or a == b else float("inf")
    if a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    a, b = _plain(a), _plain(b)
    if not _is_float(a):
        return float((a != b).sum())
    finite = a.isfinite()
    if not torch.equal(a.where(~finite, 0).nan_to_num(1.0), b.where(~b.isfinite(), 0).nan_to_num(1.0)):
        return float("inf")
    return _norm((a.float() - b.float() if a.dtype.itemsize < 4 else a - b).where(finite, 0))


def _plain(x: torch.Tensor) -> torch.Tensor:
    """Dense, complex numbers as pairs."""
    x = x if x.layout is torch.strided else x.to_dense()
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def _is_float(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex())


def _is_finite(x: Any) -> bool:
    return not _is_float(x) or bool(_plain(x).isfinite().all())


def _norm(x: torch.Tensor) -> float:
    x = _plain(x)
    return float(torch.linalg.vector_norm(x.where(x.isfinite(), 0), dtype=torch.float64))


def _relative(a: Any, apart: float) -> float:
    scale = _norm(a) if _is_float(a) else 0.0
    return apart / scale if scale else float("inf")


def _difference(expected: Result, actual: Result, apart: float) -> str:
    a, b = expected.value, actual.value
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return f"{expected.what} is {b} instead of {a}"
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"{expected.what} is {type_text(b)} instead of {type_text(a)}"
    if not _is_float(a):
        return f"{expected.what} has {int(apart)} of {a.numel()} other values"
    if apart == float("inf"):
        return f"{expected.what} is infinite or nan in other places"
    relative = _relative(a, apart)
    size = f"by {apart:.1e} from zero" if relative == float("inf") else f"by {relative:.1e} of its norm"
    return f"{expected.what} is off {size} (tolerance {tolerance(a):.0e})"
