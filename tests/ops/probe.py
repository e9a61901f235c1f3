"""How a call treats rows, asked of torch itself: by disturbing slices, and by calling it on some rows only."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .samples import call

Fn = Callable[..., Any]
MIX = "mix"
_LOOSE = (torch.float32, torch.complex64, torch.float16, torch.bfloat16)


def differs(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    changed = a != b
    return changed & ~(a.isnan() & b.isnan()) if a.is_floating_point() or a.is_complex() else changed


def deterministic(fn: Fn, leaves: Sequence[Any], spec: Any) -> bool:
    torch.manual_seed(0)
    first = [y.clone() for y in call(fn, leaves, spec)]
    torch.manual_seed(1)
    again = call(fn, leaves, spec)
    return all(a.shape == b.shape and not bool(differs(a, b).any()) for a, b in zip(first, again, strict=True))


def _disturbed(leaf: torch.Tensor, dim: int, row: int, how: str, g: torch.Generator) -> torch.Tensor:
    """With one slice changed. Other values come from the tensor itself: they stay in the op's domain."""
    x = leaf.clone(memory_format=torch.contiguous_format)
    part = x.select(dim, row)
    if how == "nan":
        part.fill_(math.nan)
    elif how == "scale":
        part.mul_(1 + 1e-3 * torch.rand(part.shape, generator=g))
    else:
        flat = leaf.flatten()
        part.copy_(flat[torch.randint(0, flat.numel(), part.shape, generator=g)])
    return x


def aligned(fn: Fn, leaves: Sequence[Any], spec: Any, leaf: int, dim: int, seed: int = 0) -> list[Any]:
    """Per result: None (not influenced), the dims in which row r influences row r only, or 'mix'."""
    x = leaves[leaf]
    base, g = [y.clone() for y in call(fn, leaves, spec)], torch.Generator().manual_seed(seed)
    hows = ("other", "other", "scale", "nan") if x.is_floating_point() else ("other", "other")
    hit: dict[int, list[torch.Tensor]] = {}
    for row in sorted({*range(min(3, x.shape[dim])), x.shape[dim] - 1}):
        masks = [torch.zeros(b.shape, dtype=torch.bool) for b in base]
        for how in hows:
            now = list(leaves)
            now[leaf] = _disturbed(x, dim, row, how, g)
            try:
                ys = call(fn, now, spec)
            except Exception:
                if how == "nan":
                    continue
                return [MIX] * len(base)
            if any(y.shape != b.shape for y, b in zip(ys, base, strict=True)):
                return [MIX] * len(base)
            masks = [m | differs(b, y) for m, b, y in zip(masks, base, ys, strict=True)]
        hit[row] = masks
    return [_places(b, {r: m[o] for r, m in hit.items()}, x.shape[dim]) for o, b in enumerate(base)]


def _places(result: torch.Tensor, hit: Mapping[int, torch.Tensor], size: int) -> Any:
    if not any(bool(m.any()) for m in hit.values()):
        return None
    at = [d for d in range(result.dim()) if result.shape[d] == size and all(only(m, d, r) for r, m in hit.items())]
    return at or MIX


def only(mask: torch.Tensor, dim: int, index: int) -> bool:
    """Is nothing set outside of this slice?"""
    if not bool(mask.any()):
        return True
    rest = mask.movedim(dim, 0).reshape(mask.shape[dim], -1).any(1).clone()
    rest[index] = False
    return not bool(rest.any())


def packs(fn: Fn, leaves: Sequence[Any], spec: Any, where: Mapping[int, int], outs: Sequence[int]) -> str:
    """The definition: is the op on some rows those rows of the op, in values and in gradients of every operand?

    `where`: the dim of rows in each leaf that has them; `outs`: in each result. '' where it is, else what is not.
    """
    size = next(leaves[i].shape[d] for i, d in where.items())
    some = sorted({0, size // 2, size - 1} - {1}) if size > 2 else [size - 1]
    said = (_packs(fn, leaves, spec, where, outs, torch.tensor(keep)) for keep in (some, [0]))
    return next((text for text in said if text), "")


def _packs(
    fn: Fn, leaves: Sequence[Any], spec: Any, where: Mapping[int, int], outs: Sequence[int], keep: torch.Tensor
) -> str:
    whole, slopes = _step(fn, leaves, spec, where, outs, keep, False)
    try:
        part, others = _step(fn, leaves, spec, where, outs, keep, True)
    except Exception as error:
        return f"cannot be called on fewer rows: {type(error).__name__}"
    for a, b in zip(whole, part, strict=True):
        if a.shape != b.shape:
            return "another shape on fewer rows"
        if not _close(a, b):
            return "other values on fewer rows"
    # Zero times an infinite slope is not a number: that a row was left out for it is no fault.
    known = [~a.isnan() for a in slopes]
    same = all(_close(a[k], b[k]) for a, b, k in zip(slopes, others, known, strict=True))
    return "" if same else "other gradients on fewer rows"


def _step(
    fn: Fn,
    leaves: Sequence[Any],
    spec: Any,
    where: Mapping[int, int],
    outs: Sequence[int],
    keep: torch.Tensor,
    few: bool,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Values on the kept rows, and gradients of all operands by them."""
    live = [leaf.detach().clone().requires_grad_() if _has_slope(leaf) else leaf for leaf in leaves]
    given = [x.index_select(where[i], keep) if few and i in where else x for i, x in enumerate(live)]
    total, kept = torch.zeros(()), []
    for number, (y, dim) in enumerate(zip(call(fn, given, spec), outs, strict=True)):
        z = y if few else y.index_select(dim, keep)
        kept.append(z.detach())
        if z.requires_grad:
            weights = torch.randn(z.shape, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
            total = total + (z * weights).real.sum()
    operands = [x for x in live if isinstance(x, torch.Tensor) and x.requires_grad]
    if not total.requires_grad:
        return kept, []
    found = torch.autograd.grad(total, operands, allow_unused=True)
    return kept, [torch.zeros_like(x) if s is None else s for x, s in zip(operands, found, strict=True)]


def _has_slope(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point()


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    tolerance = 1e-4 if a.dtype in _LOOSE else 1e-7
    if not (a.is_floating_point() or a.is_complex()):
        return bool(torch.equal(a, b))
    return torch.allclose(a, b, equal_nan=True, rtol=tolerance, atol=tolerance)
