"""Facts about ops and tensors that torch keeps to itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx

from .fake import fake_mode_of, trying

__all__ = [
    "alike",
    "carries_gradient",
    "has_hooks",
    "is_alias",
    "is_composite",
    "is_erased",
    "is_functional",
    "is_impure",
    "is_plain",
    "is_random",
    "is_watched",
    "mutated_arguments",
    "run_backward",
    "surely_contiguous",
    "version_of",
    "without_autocast",
]


def mutated_arguments(node: fx.Node) -> list[Any]:
    """Arguments the op writes to, decided by its schema."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    given = dict(zip((a.name for a in schema.arguments), node.args, strict=False)) | dict(node.kwargs)
    written = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return [given[name] for name in written if name in given]


def is_functional(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is None or not schema.is_mutable


def is_impure(node: fx.Node) -> bool:
    """Must stay even when nobody reads it: mutation, random state, assertions, modes."""
    return node.is_impure()


def is_random(node: fx.Node) -> bool:
    tags = getattr(node.target, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags


def is_composite(target: Any) -> bool:
    """Does eager itself run the op as a few others, gradients included?"""
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), "CompositeImplicitAutograd")


def carries_gradient(node: fx.Node, source: fx.Node) -> bool:
    """Does a gradient of the call's result reach this operand? True also where that cannot be found out."""
    target: Any = node.target
    mode = fake_mode_of(node.graph)
    if mode is None or not isinstance(source.meta.get("val"), torch.Tensor):
        return True

    def given(n: fx.Node) -> Any:
        value = n.meta.get("val")
        return value.detach().requires_grad_(n is source) if isinstance(value, torch.Tensor) else value

    try:
        with trying(mode.shape_env), mode, torch.enable_grad(), without_autocast():
            args, kwargs = fx.map_arg((node.args, node.kwargs), given)
            result = target(*args, **kwargs)
    except Exception:
        return True
    results = result if isinstance(result, (list, tuple)) else [result]
    return any(isinstance(x, torch.Tensor) and x.requires_grad for x in results)


def run_backward(result: Any) -> None:
    """Backward of everything differentiable in a result; the user's `.grad` stays as it is."""
    from torch.utils._pytree import tree_leaves

    outputs = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor) and x.requires_grad]
    leaves = _leaves([x.grad_fn for x in outputs])
    if leaves:
        torch.autograd.grad(outputs, leaves, [torch.ones_like(x) for x in outputs], allow_unused=True)


def _leaves(functions: list[Any]) -> list[torch.Tensor]:
    """Tensors at which the autograd graph ends."""
    seen, found = set(), []
    while functions:
        fn = functions.pop()
        if fn is None or fn in seen:
            continue
        seen.add(fn)
        if hasattr(fn, "variable"):
            found.append(fn.variable)
        functions += [following for following, _ in fn.next_functions]
    return found


def surely_contiguous(x: torch.Tensor) -> bool:
    """False where it depends on a size that is not known."""
    from torch._prims_common import is_contiguous_or_false

    return is_contiguous_or_false(x)


def is_alias(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors, fake ones too, share memory."""
    return bool(getattr(torch._C, "_is_alias_of")(a, b))  # noqa: B009  (the stubs do not know it)


def version_of(x: torch.Tensor) -> int | None:
    """Grows with every write to the tensor's memory through torch; None where torch does not count them."""
    return None if x.is_inference() else x._version


def without_autocast() -> AbstractContextManager[Any]:
    return torch._C._DisableAutocast()


def is_erased(node: fx.Node) -> bool:
    return node._erased


HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_post_accumulate_grad_hooks",
    "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip


def has_hooks(x: torch.nn.Module | torch.Tensor) -> bool:
    """Whether something is called when a module runs, is saved or loaded, or when a tensor gets a gradient."""
    return any(getattr(x, name, None) for name in HOOKS)


def is_watched() -> bool:
    """Does somebody see, or take, the ops that this thread calls: a mode, a profiler?"""
    return torch._C._len_torch_dispatch_stack() > 0 or torch.autograd._profiler_enabled()


def is_plain(x: Any) -> bool:
    """A tensor with numbers in memory of the CPU as they are to be read: its ops go to their kernels as they are."""
    if type(x) not in (torch.Tensor, torch.nn.Parameter) or x.layout is not torch.strided:
        return False
    usual = [torch._C._dispatch_keys(torch.empty(0))]
    with torch.inference_mode(not torch.is_inference_mode_enabled()):
        usual.append(torch._C._dispatch_keys(torch.empty(0)))
    return torch._C._dispatch_keys(x) in usual


def alike(tensors: Sequence[torch.Tensor], sizes: Sequence[list[int | None]]) -> Callable[..., bool]:
    """Whether others are like these: their type, dtype, device, way of dispatch and sizes, except where those are None.

    One call asks all of them, as Dynamo's guards do.
    """
    from torch._C._dynamo.guards import TensorGuards

    guards: Any = TensorGuards  # torch declares the sizes of one tensor
    strides = [[None] * x.dim() for x in tensors]
    check: Callable[..., bool] = guards(*tensors, dynamic_dims_sizes=list(sizes), dynamic_dims_strides=strides).check
    return check
