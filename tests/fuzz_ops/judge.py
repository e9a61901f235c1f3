"""What a call must do: what its reference does where the contract holds, the contract's error where it does not."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from turbogr_compile.kernels.contract import tensors
from turbogr_compile.kernels.declare import CONTRACTS, REFERENCES

from .calls import DERIVED, Call

ops = torch.ops.turbogr
ERRORS = (ValueError, IndexError, TypeError, RuntimeError, MemoryError, NotImplementedError)
ROOM = ("allocate", "overflow", "not enough memory", "too large", "exceed")  # sizes that nobody has memory for
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 2e-1}


def judge(call: Call) -> str:
    """'' where the op did right, else what was wrong."""
    refused = _outcome(lambda: CONTRACTS[call.op].check(*call.arguments))
    kept = [x.clone() if not x.is_meta else x for x in tensors(tuple(call.arguments))]
    found = _outcome(lambda: getattr(ops, call.op)(*call.arguments))
    for x, before in zip(tensors(tuple(call.arguments)), kept, strict=True):
        if not (x.is_meta or torch.equal(x, before) or bool(((x == before) | (x != x)).all())):
            return "an input was written"
    if isinstance(refused, Exception):
        return _refusal(call, refused, found)
    if any(x.is_meta for x in kept):
        # Sizes that depend on data have no twin among meta tensors.
        right = not isinstance(found, Exception) or call.op == "coalesce_rows"
        return "" if right else f"on meta tensors: {found!r}"
    wanted = _wanted(call.like or call)
    if isinstance(found, Exception) or isinstance(wanted, Exception):
        return _both(found, wanted)
    return _same(call, found, wanted)


def _outcome(action: Any) -> Any:
    try:
        return action()
    except ERRORS as error:
        return error


def _wanted(call: Call) -> Any:
    """Computed once for all calls that have the same result."""
    if call.result is None:
        call.result = _outcome(lambda: _reference(call))
    return call.result


def _reference(call: Call) -> Any:
    if call.op in REFERENCES:
        return REFERENCES[call.op](*call.arguments)
    wanted = [x is not None and x.requires_grad for x in call.arguments[:3]]  # made of its `ahead`
    names = [a.name for a in getattr(ops, call.op).default._schema.arguments]
    by = dict(zip(names, call.arguments, strict=True))
    ahead = call.op.replace("_total", "_ahead")
    order = [a.name for a in getattr(ops, ahead).default._schema.arguments]
    by["wanted"] = wanted if call.op.startswith("linear") else wanted[:2]
    return REFERENCES[ahead](*(by[name] for name in order))[0]


def _refusal(call: Call, refused: Exception, found: Any) -> str:
    if not isinstance(found, Exception):
        return f"the contract says {refused}, and the op returned"
    ours = call.op if call.op in REFERENCES else call.op.replace("_total", "")
    if isinstance(found, (ValueError, IndexError)) and str(found).startswith(ours):
        return ""
    # torch itself refuses what its schema does not take.
    return "" if isinstance(found, (RuntimeError, TypeError)) else f"the contract says {refused}, the op {found!r}"


def _both(found: Any, wanted: Any) -> str:
    errors = [x for x in (found, wanted) if isinstance(x, Exception)]
    if all(isinstance(x, MemoryError) or any(word in str(x).lower() for word in ROOM) for x in errors):
        return ""
    if isinstance(found, Exception):
        return f"the contract holds, and the op raises {found!r} (reference: {_short(wanted)})"
    return f"the contract holds, and the reference raises {wanted!r}"


def _short(x: Any) -> str:
    return repr(x) if isinstance(x, Exception) else "a result"


def _same(call: Call, found: Any, wanted: Any) -> str:
    found, wanted = list(tensors((found,))), list(tensors((wanted,)))
    if len(found) != len(wanted):
        return f"{len(found)} results, and the reference has {len(wanted)}"
    if call.kind == "almost" and call.op in DERIVED:
        compared = False  # what the forward gave may be that of other arguments
    else:
        compared = all(bool(b.isfinite().all()) for b in wanted if b.dtype.is_floating_point)
    like = call.like or call
    like.finite = finite = _finite(like) if like.finite is None else like.finite
    for place, (a, b) in enumerate(zip(found, wanted, strict=True)):
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"result {place} is {a.dtype} {list(a.shape)}, that of the reference {b.dtype} {list(b.shape)}"
        if not a.dtype.is_floating_point:
            if not torch.equal(a, b):
                return f"result {place} differs"
            continue
        # Special numbers among the inputs take different ways through sums; whether they come out is theirs.
        if not finite or not compared:
            continue
        worst = _difference(a, b)
        limit = TOLERANCE[_coarsest(call, a.dtype)]
        if not worst <= limit:
            return f"result {place} differs from the reference by {worst:.2g} of its size"
    return ""


def _finite(call: Call) -> bool:
    given = [x for x in tensors(tuple(call.arguments)) if x.is_floating_point()]
    numbers = [x for x in call.arguments if isinstance(x, float)]
    return all(bool(x.isfinite().all()) and (x.numel() == 0 or float(x.abs().max()) < 1e3) for x in given) and all(
        abs(x) < 1e3 and (x == 0 or abs(x) > 1e-3) for x in numbers if x == x
    )


def _coarsest(call: Call, dtype: torch.dtype) -> torch.dtype:
    found = [x.dtype for x in tensors(tuple(call.arguments)) if x.dtype in TOLERANCE]
    return max([*found, dtype], key=TOLERANCE.__getitem__)


def _difference(a: Tensor, b: Tensor) -> float:
    if a.numel() == 0:
        return 0.0
    size = max(float(b.double().abs().max()), 1.0)
    return float((a.double() - b.double()).abs().max()) / size
