"""One declaration per op: schema, reference, fake, derivative and FLOP formula, registered together.

    declare(
        "gather_rows(Tensor x, Tensor rows) -> Tensor",
        reference=gather, fake=gather_fake, backward=gather_backward, save=gather_save,
    )

The reference runs on every device that has no kernel of its own. Sizes are checked where they are plain numbers, in the
fake as in the reference, and never guarded on: a symbolic size stays as general as it was.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any

import torch
from torch.library import Library, register_autograd, register_fake
from torch.utils.flop_counter import register_flop_formula

from .cpu.build import library

NAMESPACE = "turbogr"
# A library takes its ops along when it dies, so a module that is loaded again keeps the one it has.
LIBRARY: Library = globals().get("LIBRARY") or Library(NAMESPACE, "FRAGMENT")
HALF = (torch.float16, torch.bfloat16)


def no_flops(*arguments: Any, **rest: Any) -> int:
    """Formula of an op that only moves rows: FLOPs are those of matrix products."""
    return 0


def declare(
    schema: str,
    *,
    reference: Callable[..., Any],
    fake: Callable[..., Any],
    cpu: Callable[..., Any] | None = None,
    backward: Callable[..., Any] | None = None,
    save: Callable[..., None] | None = None,
    flops: Callable[..., Any] = no_flops,
) -> None:
    """Register an op; one that is registered already stays as it is.

    An op without `backward` has no derivative, and says so when one is asked for. `cpu` is the reference's twin in C++:
    it takes the loaded library before the op's own arguments, and runs where there is one for the dtype.
    """
    name = schema.partition("(")[0]
    if hasattr(getattr(torch.ops, NAMESPACE), name):
        return
    qualified = f"{NAMESPACE}::{name}"
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(name, reference, "CompositeExplicitAutograd")
    if cpu is not None:
        LIBRARY.impl(name, _compiled(cpu, reference), "CPU")
    register_fake(qualified, fake, lib=LIBRARY)
    register_autograd(qualified, backward or _refuse(qualified), setup_context=save, lib=LIBRARY)
    register_flop_formula(getattr(getattr(torch.ops, NAMESPACE), name), get_raw=True)(flops)


def _compiled(kernel: Callable[..., Any], reference: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel for the dtype of the first floating point tensor; the reference where there is none."""

    def chosen(*arguments: Any) -> Any:
        # Most often the first argument decides, and every microsecond counts: this runs at each call of the op.
        found = library(getattr(arguments[0], "dtype", None)) or library(_dtype(arguments))
        return reference(*arguments) if found is None else kernel(found, *arguments)

    return chosen


def _dtype(arguments: tuple[Any, ...]) -> torch.dtype | None:
    return next((x.dtype for x in arguments if isinstance(x, torch.Tensor) and x.is_floating_point()), None)


def checked(check: Callable[..., None], kernel: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel in C++, behind the checks that its reference makes."""

    def run(library: Any, *arguments: Any) -> Any:
        check(*arguments)
        return kernel(library, *arguments)

    return run


def _refuse(name: str) -> Callable[..., Any]:
    def backward(*arguments: Any) -> Any:
        raise NotImplementedError(f"{name} has no derivative: second derivatives are not available through it")

    return backward


# --- checks that hold for real and fake tensors ------------------------------------------------------


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def require_tensor(x: torch.Tensor, what: str, dims: int, dtype: torch.dtype | None = None) -> None:
    """A tensor of so many dims; floating point unless a dtype is named."""
    right = x.dtype == dtype if dtype is not None else x.is_floating_point()
    if not right:
        raise ValueError(f"{what} must be {dtype or 'floating point'}, not {x.dtype}")
    if x.dim() != dims:
        raise ValueError(f"{what} must have {dims} dims, not {x.dim()}")


def require_size(found: Any, wanted: Any, what: str) -> None:
    """Two sizes are equal, as far as is known without a guard."""
    if isinstance(found, int) and isinstance(wanted, int) and found != wanted:
        raise ValueError(f"{what} must be {wanted}, not {found}")


# --- real tensors ------------------------------------------------------------------------------------


def has_data(x: torch.Tensor) -> bool:
    """False for fake tensors and other wrappers, whose values cannot be read."""
    return type(x) in (torch.Tensor, torch.nn.Parameter) and not x.is_meta


def as_given(x: torch.Tensor) -> AbstractContextManager[Any]:
    """Autocast stays out: it would narrow the products inside of a reference."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def runs(offsets: torch.Tensor, rows: int, what: str) -> list[tuple[int, int]]:
    """First and past-the-last row of each sequence; rows behind the last offset belong to none."""
    bounds = offsets.tolist()
    pairs = list(pairwise(bounds))
    ascending = all(0 <= first <= last for first, last in pairs)
    require(ascending and len(bounds) > 0, f"{what} must ascend from at least one number, none below zero")
    require(bounds[-1] <= rows, f"{what} end at row {bounds[-1]}, and there are {rows} rows")
    return pairs


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """What sums of this dtype are kept in."""
    return torch.float32 if dtype in HALF else dtype
