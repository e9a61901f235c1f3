"""Fake modes and shape environments: values without data, symbolic sizes, guards."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import sympy
import torch
from torch import fx
from torch._dynamo.source import ConstantSource  # AOTAutograd wants a source for every lifted constant
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # values without data
from torch.fx.experimental.symbolic_shapes import (
    PropagateUnbackedSymInts,  # interpreter that keeps Dynamo's names for data-dependent sizes
    ShapeEnv,
    guard_or_false,  # a guard where sizes are known in the call seen, False where only the run knows them
    statically_known_true,
)
from torch.utils._pytree import SequenceKey
from torch.utils._sympy.functions import CleanDiv, FloorDiv, Max, Min, Mod, PythonMod  # what sizes are made of

__all__ = [
    "ConstantSource",
    "FakeTensor",
    "FakeTensorMode",
    "PropagateUnbackedSymInts",
    "ShapeEnv",
    "assumptions",
    "detect_fake_mode",
    "fake_inputs",
    "fake_mode_of",
    "free_unbacked",
    "guard_count",
    "guard_or_false",
    "ignore_fresh_unbacked",
    "least_of",
    "named_symbol",
    "new_fake_mode",
    "new_guards",
    "new_row_count",
    "path_of_size",
    "propagate",
    "python_of",
    "shape_env_of",
    "size_operator",
    "sizes_allowed",
    "statically_known_true",
    "symbolic_int",
    "trying",
]


def fake_mode_of(graph: fx.Graph) -> FakeTensorMode | None:
    """The mode that made the graph's fake values."""
    for node in graph.nodes:
        values = node.meta.get("val")
        for value in values if isinstance(values, (list, tuple)) else (values,):
            if isinstance(value, FakeTensor):
                return value.fake_mode
    return detect_fake_mode()


def shape_env_of(graph: fx.Graph) -> ShapeEnv | None:
    mode = fake_mode_of(graph)
    return mode.shape_env if mode is not None else None


def guard_count(env: ShapeEnv | None) -> int:
    """Changes when somebody specialises a symbolic size."""
    if env is None:
        return 0
    return len(env.guards) + sum(len(v) for v in env.deferred_runtime_asserts.values())


def new_guards(env: ShapeEnv | None, since: int) -> list[str]:
    return [str(g.expr) for g in env.guards[since:]] if env is not None else []


def sizes_allowed(env: ShapeEnv | None, sizes: Mapping[Any, int]) -> bool:
    """Do numbers for symbolic sizes fulfil everything that the compilation assumed about these?"""
    if env is None:
        return False
    equal = {symbol: known.subs(sizes) for symbol, known in env.replacements.items()}
    numbers = {**sizes, **equal}
    bounds = [env.var_to_range[s].lower <= n for s, n in numbers.items() if s in env.var_to_range]
    return all(bounds) and all(g.expr.subs(numbers) != False for g in env.guards)  # noqa: E712 (sympy's False)


def least_of(env: ShapeEnv | None, symbol: Any) -> int:
    """What the compilation assumes a symbolic size to be at least; 0 where it assumes less, or nothing."""
    known = env.var_to_range.get(symbol) if env is not None else None
    return max(0, int(known.lower)) if known is not None and known.lower.is_Integer else 0


def python_of(expr: sympy.Expr) -> str:
    """A size, or a condition on sizes, as Python."""
    from torch.utils._sympy.printers import PythonPrinter

    return str(PythonPrinter().doprint(expr))


def assumptions(env: ShapeEnv | None, symbols: Set[Any]) -> list[str]:
    """Everything that the compilation assumed about symbolic sizes so far, of these symbols alone, as Python."""
    if env is None:
        return []
    found = [guard.expr for guard in env.guards]
    found += [deferred.expr for some in env.deferred_runtime_asserts.values() for deferred in some]
    about = (env.replace(expr) for expr in found)
    return list(dict.fromkeys(python_of(e) for e in about if e.free_symbols and e.free_symbols <= symbols))


def ignore_fresh_unbacked(env: ShapeEnv | None) -> AbstractContextManager[Any]:
    """Re-running an op that makes an unbacked size must not leave a second symbol behind."""
    return env.ignore_fresh_unbacked_symbols() if env is not None else nullcontext()


def free_unbacked(value: Any) -> set[Any]:
    """Unbacked symbols in a fake value's sizes."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return set(free_unbacked_symbols(value))


def path_of_size(dim: int) -> tuple[Any, ...]:
    """Where a size that a tensor defines is found in it, as torch writes it down in `unbacked_bindings`."""
    from torch.fx.experimental.symbolic_shapes import CallMethodKey

    return CallMethodKey("size"), SequenceKey(dim)


def fake_inputs(inputs: Any) -> list[Any]:
    """Fake twins of real tensors, static sizes, with a shape environment for data-dependent ones."""
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    return [mode.from_tensor(x, static_shapes=True) if isinstance(x, torch.Tensor) else x for x in inputs]


def new_row_count(mode: FakeTensorMode, limit: int | None, least: int = 1) -> torch.SymInt:
    """A size that only the run knows, at least one (or `least`) and at most `limit`."""
    from torch.fx.experimental.symbolic_shapes import _constrain_range_for_size

    env = mode.shape_env
    assert env is not None
    with env.ignore_fresh_unbacked_symbols():
        count = env.create_unbacked_symint()
    _constrain_range_for_size(count, min=least, max=limit)
    return count


_NOISY = ("torch.fx.experimental.symbolic_shapes", "torch._subclasses.fake_tensor")


def named_symbol(env: ShapeEnv, name: str, hint: int) -> torch.SymInt:
    """A backed symbolic size for traces that are not part of a compilation."""
    from torch.fx.experimental.symbolic_shapes import DimDynamic

    source = ConstantSource(name)
    symbol = env.create_symbol(hint, source, DimDynamic.DYNAMIC)
    size = env.create_symintnode(symbol, hint=hint, source=source)
    assert isinstance(size, torch.SymInt)
    return size


def new_fake_mode() -> FakeTensorMode:
    """For symbols that are no business of the compilation under way."""
    return FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)


def symbolic_int(env: ShapeEnv, expression: Any) -> Any:
    """A size that is an expression of known symbols."""
    hint = env.size_hint(expression)
    return env.create_symintnode(expression, hint=None if hint is None else int(hint))


def propagate(module: fx.GraphModule, mode: FakeTensorMode, values: Any) -> None:
    """Describe each value of a graph anew, from fake inputs of a mode."""

    class Describe(fx.Interpreter):
        def run_node(self, node: fx.Node) -> Any:
            result = super().run_node(node)
            if node.op == "get_attr" and isinstance(result, torch.Tensor):
                result = mode.from_tensor(_plain(result), static_shapes=True)
            node.meta.pop("unbacked_bindings", None)  # names of another environment
            node.meta["val"] = result
            return result

    with mode:
        Describe(module).run(*values)


def _plain(x: torch.Tensor) -> torch.Tensor:
    """A tensor of no fake mode, to make one of another from."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") if isinstance(x, FakeTensor) else x


@contextmanager
def trying(env: ShapeEnv | None = None) -> Iterator[None]:
    """Run fake tensors through code that may not fit them. A wish for a guard on `env` raises instead, and torch
    logs nothing: the caller says what came of it."""
    loggers = [logging.getLogger(name) for name in _NOISY]
    were = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        with env.error_on_new_guards() if env is not None else nullcontext(), ignore_fresh_unbacked(env):
            yield
    finally:
        for logger, was in zip(loggers, were, strict=True):
            logger.disabled = was


_SIZE_OPERATORS: dict[tuple[type, ...], Callable[..., Any]] = {
    (sympy.Add,): operator.add,
    (sympy.Mul,): operator.mul,
    (sympy.Pow,): operator.pow,
    (FloorDiv, CleanDiv): operator.floordiv,
    (Mod, PythonMod): operator.mod,
    (sympy.Max, Max): torch.sym_max,
    (sympy.Min, Min): torch.sym_min,
}


def size_operator(value: sympy.Expr) -> Callable[..., Any] | None:
    """Which operation of two numbers makes a symbolic size of its arguments, taken from the left."""
    if isinstance(value, sympy.Pow) and not value.exp.is_nonnegative:
        return None
    return next((op for kinds, op in _SIZE_OPERATORS.items() if isinstance(value, kinds)), None)
