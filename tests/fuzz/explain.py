"""What explains a difference other than a fault: rounding that the program magnifies, or an assumption of the docs.

Each is tried, not read off the program. *Rounding*: eager itself moves as much when the last bit of every intermediate
result is shaken. *Not a number on rows nobody reads* (assumption D of docs/soundness.md): eager gives what turbogr
gives once nothing comes of a product with zero; or also once every NaN is replaced by a number, whichever number.
*Large scores* (assumptions A and B): what goes into a softmax leaves ±4096 in eager, or an exponential overflows, and
the same compiled graph gives what eager gives once embeddings and features are scaled down so that none does; or eager
gives what it gives once masks that no longer hide what they are put over are made to, or once the largest is taken away
from what exponentials are taken of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

aten = torch.ops.aten
SLACK = 32.0  # as validation has it
SHAKES = 3


class Shaken(TorchFunctionMode):
    """Moves what gradients reach by its last bit, and gradients; ids, masks and buckets of time stay what they are."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, tuple) and type(result) is tuple:
            return tuple(map(self._shake, result))
        return self._shake(result)

    def _shake(self, x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or not x.is_floating_point() or not x.requires_grad or x.is_leaf:
            return x
        with torch._C.DisableTorchFunction():
            shaken = x * self._factors(x)
            shaken.register_hook(lambda g: g * self._factors(g))
            return shaken

    def _factors(self, x: torch.Tensor) -> torch.Tensor:
        signs = torch.randint(0, 2, x.shape, generator=self.generator).to(x.dtype) * 2 - 1
        return 1 + torch.finfo(x.dtype).eps * signs


class Wide(TorchFunctionMode):
    """Casts to narrower floating-point types are left out, as the compiler may do inside of an attention."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16):
            return torch.Tensor.double(args[0]) if args[0].is_floating_point() else func(*args, **kwargs)
        wide = [torch.float64 if isinstance(x, torch.dtype) and x.is_floating_point else x for x in args]
        if isinstance(kwargs.get("dtype"), torch.dtype) and kwargs["dtype"].is_floating_point:
            kwargs = {**kwargs, "dtype": torch.float64}
        return func(*wide, **kwargs)


def _times(a: Any, b: Any) -> torch.Tensor:
    product = torch.mul(a, b)
    nothing = (torch.as_tensor(a) == 0) | (torch.as_tensor(b) == 0)
    return product.masked_fill(nothing & product.isnan(), 0)  # a zero keeps its sign otherwise


def _matrix(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return _times(a.unsqueeze(-1), b.unsqueeze(-3)).sum(-2)


def _into(x: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return x.copy_(value)


# Products: nothing comes of zero, whatever it is multiplied with.
_PRODUCTS: dict[Any, Callable[..., torch.Tensor]] = {
    aten.mul.Tensor: _times,
    aten.mul.Scalar: _times,
    aten.mul_.Tensor: lambda a, b: _into(a, _times(a, b)),
    aten.div.Tensor: lambda a, b: (found := torch.div(a, b)).masked_fill((torch.as_tensor(a) == 0) & found.isnan(), 0),
    aten.mm.default: _matrix,
    aten.bmm.default: _matrix,
    aten.mv.default: lambda a, b: _times(a, b).sum(-1),
    aten.dot.default: lambda a, b: _times(a, b).sum(-1),
    aten.addmm.default: lambda x, a, b, beta=1, alpha=1: _times(x, beta) + _times(_matrix(a, b), alpha),
    aten.baddbmm.default: lambda x, a, b, beta=1, alpha=1: _times(x, beta) + _times(_matrix(a, b), alpha),
}


class StrongZeros(TorchDispatchMode):
    """Arithmetic in which nothing comes of zero times infinity, or times what is not a number; backward too.

    `instead`: what takes the place of every NaN. If results are the same for two such numbers, none of them matters.
    `backward`: in gradients alone, where a program makes numbers of the NaN that it computes.
    """

    def __init__(self, instead: float | None = None, backward: bool = False) -> None:
        super().__init__()
        self.instead = instead
        self.backward = backward

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.backward and torch._C._current_autograd_node() is None:
            return func(*args, **(kwargs or {}))
        result = self._result(func, args, kwargs or {})
        if self.instead is None:
            return result
        return tree_map_only(torch.Tensor, self._number, result)

    def _number(self, x: torch.Tensor) -> torch.Tensor:
        return x.masked_fill(x.isnan(), self.instead) if x.is_floating_point() and bool(x.isnan().any()) else x

    def _result(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func in _PRODUCTS:
            return _PRODUCTS[func](*args, **kwargs)
        if func in decomposition_table and _not_finite([*args, *kwargs.values()]):
            with self:
                made = decomposition_table[func](*args, **kwargs)
            if made is not NotImplemented:
                return made
        return func(*args, **kwargs)


def _not_finite(values: list[Any]) -> bool:
    return any(isinstance(x, torch.Tensor) and x.is_floating_point() and not bool(x.isfinite().all()) for x in values)


_MATRIX_PRODUCTS = (aten.mm.default, aten.bmm.default, aten.mv.default, aten.addmm.default, aten.baddbmm.default)
_SOFTMAXES = (aten._softmax.default, aten._log_softmax.default, aten._safe_softmax.default)
_ACTIVATIONS = (*_SOFTMAXES, aten.exp.default, aten.sigmoid.default, aten.silu.default)


class Products(TorchDispatchMode):
    """The largest number that a matrix product gives before an activation of scores; the largest of those and what goes
    into a softmax (masks are below zero); and whether an exponential overflows, or is nothing."""

    product = 0.0
    largest = 0.0
    overflows = False
    vanishes = False

    def __init__(self) -> None:
        super().__init__()
        self._seen = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _MATRIX_PRODUCTS:
            self._seen = max(self._seen, _largest(result.abs()))
        if func in _ACTIVATIONS:
            self.product = max(self.product, self._seen)
            self.largest = max(self.largest, self.product)
        if func in _SOFTMAXES:
            self.largest = max(self.largest, _largest(args[0]))
        if func is aten.exp.default:
            self.overflows |= bool((result.isinf() & args[0].isfinite()).any())
            self.vanishes |= bool(((result == 0) & args[0].isfinite()).any())
        return result


def _largest(x: torch.Tensor) -> float:
    return float(x.nan_to_num(0.0, 0.0, 0.0).max()) if x.numel() else 0.0


class Shifted(TorchDispatchMode):
    """Exponentials of what is left without the largest of a row: the same, where they are divided by their sum."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.exp.default and args[0].dim() and args[0].numel():
            largest = args[0].amax(-1, keepdim=True)
            args = (args[0] - largest.where(largest.isfinite(), 0.0),)
        return func(*args, **(kwargs or {}))


@contextmanager
def products() -> Iterator[Products]:
    with sdpa_kernel(SDPBackend.MATH), Products() as seen:
        yield seen


@contextmanager
def strong_zeros(instead: float | None = None, backward: bool = False) -> Iterator[None]:
    with sdpa_kernel(SDPBackend.MATH), StrongZeros(instead, backward):
        yield


class StrongMasks(TorchDispatchMode):
    """Numbers that hide bounded scores lie a million times below the scores at hand, where these leave the bound."""

    def __init__(self, bound: float) -> None:
        super().__init__()
        self.bound = bound

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (aten.masked_fill, aten.masked_fill_, aten.where, aten.add, aten.add_):
            largest = max(map(self._largest, args), default=0.0)
            if largest > self.bound:
                args = tuple(self._hiding(x, largest) for x in args)
        return func(*args, **(kwargs or {}))

    def _largest(self, x: Any) -> float:
        if not isinstance(x, torch.Tensor) or not x.is_floating_point() or x.numel() < 2:
            return 0.0
        return float(x.where(~self._hides(x), 0).abs().nan_to_num(0.0, 0.0, 0.0).max())

    def _hides(self, x: torch.Tensor) -> torch.Tensor:
        """A mask holds nothing but zeros beside what hides."""
        low = x < -2 * self.bound
        return low if bool((low | (x == 0)).all()) else torch.zeros_like(low)

    def _hiding(self, x: Any, largest: float) -> Any:
        if isinstance(x, torch.Tensor) and x.is_floating_point():
            return x.where(~self._hides(x), x.clamp(max=-1e6 * largest))
        return min(x, -1e6 * largest) if isinstance(x, float) and x < -2 * self.bound else x


@contextmanager
def strong_masks(bound: float) -> Iterator[None]:
    with sdpa_kernel(SDPBackend.MATH), StrongMasks(bound):
        yield
