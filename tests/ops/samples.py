"""Samples of torch's OpInfo database, chosen so that every value of every argument occurs.

The database's own sizes are changed to numbers that factor: with S = 5 one dim is never sequences times columns.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db
from torch.utils import _pytree as pytree

SIZES = (("S", 5, 6), ("L", 20, 12), ("XS", 3, 4))
MOST_SAMPLES, MOST_NUMBERS = 60, 20_000
DTYPES = (torch.float64, torch.float32, torch.int64, torch.bool, torch.complex128)
CORRUPTS_MEMORY = ("segment_reduce",)  # in eager
UNINITIALISED = ("empty", "new_empty", "linalg.lstsq")  # whatever the memory held; lstsq pivots by it


@dataclass(frozen=True)
class Sample:
    """Arguments of one call, as leaves of a tree."""

    number: int
    leaves: tuple[Any, ...]
    spec: Any

    def tensors(self) -> Iterator[tuple[int, torch.Tensor]]:
        return ((i, leaf) for i, leaf in enumerate(self.leaves) if isinstance(leaf, torch.Tensor))

    def values(self) -> frozenset[str]:
        """What the arguments that are no tensors are, by position in the tree."""
        paths = pytree.tree_flatten_with_path(pytree.tree_unflatten(list(self.leaves), self.spec))[0]
        return frozenset(
            f"{pytree.keystr(path)}={value!r}"[:80] for path, value in paths if not isinstance(value, torch.Tensor)
        )


@dataclass(frozen=True)
class Entry:
    """One entry of the database: an op, or a module called as one."""

    name: str
    call: Callable[..., Any]
    forms: tuple[tuple[str, Callable[..., Any]], ...]
    samples: Callable[[torch.dtype], list[Sample]]
    dtypes: frozenset[torch.dtype]

    @property
    def dtype(self) -> torch.dtype | None:
        return next((d for d in DTYPES if d in self.dtypes), None)

    def form(self, name: str) -> Callable[..., Any]:
        return dict(self.forms)[name]


def shrink_database() -> None:
    """Change the sizes that samples are made with."""
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.testing._internal") and module is not None:
            for size, old, new in SIZES:
                if getattr(module, size, None) == old:
                    setattr(module, size, new)


@lru_cache(maxsize=1)
def entries() -> dict[str, Entry]:
    shrink_database()
    found = {}
    for op in op_db:
        name = f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name
        if not any(word in name for word in CORRUPTS_MEMORY) and not name.startswith(UNINITIALISED):
            found[name] = Entry(name, op.op, tuple(_forms(op)), _samples_of(op), frozenset(op.dtypes))
    for info in module_db:
        name = f"nn:{info.name}"
        found[name] = Entry(
            name, _call_module, (("function", _call_module),), _modules_of(info), frozenset(info.dtypes)
        )
    return dict(sorted(found.items()))


def _forms(op: Any) -> Iterator[tuple[str, Callable[..., Any]]]:
    yield "function", op.op
    if op.method_variant is not None:
        yield "method", op.method_variant
    if op.inplace_variant is not None:
        yield "inplace", lambda x, *args, **kwargs: op.inplace_variant(x.clone(), *args, **kwargs)
    for alias in op.aliases or ():
        yield f"alias-{alias.name}", alias.op


def _samples_of(op: Any) -> Callable[[torch.dtype], list[Sample]]:
    def samples(dtype: torch.dtype) -> list[Sample]:
        torch.manual_seed(0)
        made = itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=False), MOST_SAMPLES)
        flat = [pytree.tree_flatten((s.input, *s.args, s.kwargs)) for s in made]
        return [Sample(i, tuple(leaves), spec) for i, (leaves, spec) in enumerate(flat)]

    return samples


def _modules_of(info: Any) -> Callable[[torch.dtype], list[Sample]]:
    def samples(dtype: torch.dtype) -> list[Sample]:
        torch.manual_seed(0)
        found = []
        inputs = info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=False, training=False)
        for i, given in enumerate(itertools.islice(inputs, MOST_SAMPLES)):
            torch.manual_seed(i)
            made = info.module_cls(*given.constructor_input.args, **given.constructor_input.kwargs).to(dtype).eval()
            call = given.forward_input
            leaves, spec = pytree.tree_flatten((made, *call.args, call.kwargs))
            found.append(Sample(i, tuple(leaves), spec))
        return found

    return samples


def _call_module(module: Any, *args: Any, **kwargs: Any) -> Any:
    return module(*args, **kwargs)


def call(fn: Callable[..., Any], leaves: Sequence[Any], spec: Any) -> list[torch.Tensor]:
    """Tensors that the call returns."""
    *args, kwargs = pytree.tree_unflatten(list(leaves), spec)
    return [o for o in pytree.tree_leaves(fn(*args, **kwargs)) if isinstance(o, torch.Tensor)]


def usable(sample: Sample) -> bool:
    tensors = [t for _, t in sample.tensors()]
    return bool(tensors) and all(t.layout == torch.strided and t.numel() <= MOST_NUMBERS for t in tensors)


def covering(samples: Sequence[Sample], least: int) -> list[Sample]:
    """At least so many samples, and every value of every argument in one of them."""
    left = [s for s in samples if usable(s)]
    missing = frozenset().union(*(s.values() for s in left)) if left else frozenset()
    chosen: list[Sample] = []
    while left and (missing or len(chosen) < least):
        best = max(left, key=lambda s: (len(s.values() & missing), -s.number))
        left.remove(best)
        chosen.append(best)
        missing -= best.values()
    return chosen
