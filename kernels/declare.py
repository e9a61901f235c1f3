"""One declaration per op: schema, contract, reference, fake, derivative and FLOP formula, registered together.

    declare(
        "gather_rows(Tensor x, Tensor rows) -> Tensor",
        Contract(x=Array("R ...F", None), rows=Array("N", INT64, Range("R"))),
        reference=gather, fake=gather_fake, backward=gather_backward, save=gather_save,
    )

The reference runs on every device that has no kernel of its own. Kernel, reference and fake run behind the contract, so
they check nothing themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any

import torch
from torch.library import Library, register_autograd, register_fake
from torch.utils.flop_counter import register_flop_formula

from .contract import HALF, Contract, has_data
from .cpu.build import library

__all__ = [
    "CONTRACTS",
    "HALF",
    "KERNELS",
    "LIBRARY",
    "NAMESPACE",
    "REFERENCES",
    "accumulator",
    "as_given",
    "compose",
    "declare",
    "has_data",
    "require",
    "runs",
]

NAMESPACE = "turbogr"
# A library takes its ops along when it dies, so a module that is loaded again keeps the one it has.
LIBRARY: Library = globals().get("LIBRARY") or Library(NAMESPACE, "FRAGMENT")
# What must hold of the arguments of each op, by its name.
CONTRACTS: dict[str, Contract] = globals().get("CONTRACTS") or {}
# The reference of each op, behind its contract: what the op is where it has no kernel.
REFERENCES: dict[str, Callable[..., Any]] = globals().get("REFERENCES") or {}
# What each op is on a CPU, without its check: for those who have asked the same of all arguments. The schema's defaults
# are to be given too. Where there is no kernel, the reference serves.
KERNELS: dict[str, Callable[..., Any]] = globals().get("KERNELS") or {}


def no_flops(*arguments: Any, **rest: Any) -> int:
    """Formula of an op that only moves rows: FLOPs are those of matrix products."""
    return 0


def declare(
    schema: str,
    contract: Contract,
    *,
    reference: Callable[..., Any],
    fake: Callable[..., Any],
    cpu: Callable[..., Any] | None = None,
    storage: Callable[..., torch.dtype] | None = None,
    backward: Callable[..., Any] | None = None,
    save: Callable[..., None] | None = None,
    flops: Callable[..., Any] = no_flops,
) -> None:
    """Register an op; one that is registered already stays as it is.

    An op without `backward` has no derivative, and says so when one is asked for. `cpu` is the reference's twin in C++:
    it takes the loaded library before the op's own arguments, and runs where there is one for the dtype of the
    contract's leading argument, or for that which `storage` says.
    """
    name = schema.partition("(")[0]
    contract.bind(schema)
    CONTRACTS.setdefault(name, contract)  # an op that is registered already checks the one it was registered with
    REFERENCES[name] = checked = _behind(contract.check, reference)
    if hasattr(getattr(torch.ops, NAMESPACE), name):
        return
    qualified = f"{NAMESPACE}::{name}"
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(name, checked, "CompositeExplicitAutograd")
    if cpu is not None:
        KERNELS[name] = _unchecked(contract, cpu, storage, reference)
        LIBRARY.impl(name, _compiled(contract, cpu, storage, checked), "CPU")
    register_fake(qualified, _behind(contract.check_sizes, fake), lib=LIBRARY)
    derivative, keep = backward or _refuse(qualified), save
    returned = getattr(getattr(torch.ops, NAMESPACE), name).default._schema.returns
    if [str(value.type) for value in returned] == ["Tensor"]:
        derivative, keep = _undefined_stays(derivative, save)
    register_autograd(qualified, derivative, setup_context=keep, lib=LIBRARY)
    register_flop_formula(getattr(getattr(torch.ops, NAMESPACE), name), get_raw=True)(flops)


def compose(
    schema: str, contract: Contract, function: Callable[..., Any], flops: Callable[..., Any] | None = None
) -> None:
    """Register an op that is made of others, which check entries and have derivatives."""
    name = schema.partition("(")[0]
    contract.bind(schema)
    CONTRACTS.setdefault(name, contract)  # an op that is registered already checks the one it was registered with
    if hasattr(getattr(torch.ops, NAMESPACE), name):
        return
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(name, _behind(contract.check_sizes, function), "CompositeImplicitAutograd")
    if flops is not None:
        register_flop_formula(getattr(getattr(torch.ops, NAMESPACE), name), get_raw=True)(flops)


def _behind(check: Callable[..., None], function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*arguments: Any) -> Any:
        check(*arguments)
        return function(*arguments)

    return run


def _compiled(
    contract: Contract,
    kernel: Callable[..., Any],
    storage: Callable[..., torch.dtype] | None,
    reference: Callable[..., Any],
) -> Callable[..., Any]:
    """The kernel, behind the contract; the reference where there is none."""
    leading, unchecked = contract.leading, _unchecked(contract, kernel, storage, reference)

    def chosen(*arguments: Any) -> Any:
        found = library(getattr(arguments[leading], "dtype", None))
        if found is None:
            return reference(*arguments)
        contract.before_kernel(found.turbogr_check, *arguments)
        return kernel(found, *arguments) if storage is None else unchecked(*arguments)

    return chosen


def _unchecked(
    contract: Contract,
    kernel: Callable[..., Any],
    storage: Callable[..., torch.dtype] | None,
    reference: Callable[..., Any],
) -> Callable[..., Any]:
    leading = contract.leading

    def chosen(*arguments: Any) -> Any:
        found = library(getattr(arguments[leading], "dtype", None))
        if found is not None and storage is not None:
            found = library(storage(*arguments))
        return kernel(found, *arguments) if found is not None else reference(*arguments)

    return chosen


def _undefined_stays(
    backward: Callable[..., Any], save: Callable[..., None] | None
) -> tuple[Callable[..., Any], Callable[..., None]]:
    """No gradient stays none: zeros would let an optimizer decay what has none in eager (a norm of order zero)."""

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        if save is not None:
            save(ctx, inputs, output)
        ctx.set_materialize_grads(False)

    def derivative(ctx: Any, grad: torch.Tensor | None) -> Any:
        return backward(ctx, grad) if grad is not None else (None,) * (len(ctx.needs_input_grad))

    return derivative, keep


def _refuse(name: str) -> Callable[..., Any]:
    def backward(*arguments: Any) -> Any:
        raise NotImplementedError(f"{name} has no derivative: second derivatives are not available through it")

    return backward


# --- real tensors ------------------------------------------------------------------------------------


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def as_given(x: torch.Tensor) -> AbstractContextManager[Any]:
    """Autocast stays out: it would narrow the products inside of a reference."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def runs(offsets: torch.Tensor) -> list[tuple[int, int]]:
    """First and past-the-last row of each sequence; rows behind the last offset belong to none."""
    return list(pairwise(offsets.tolist()))


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """What sums of this dtype are kept in."""
    return torch.float32 if dtype in HALF else dtype
