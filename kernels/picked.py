"""Rows that are picked by what they hold, computed apart and put back, as one op on rows."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakValueDictionary

import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from .declare import LIBRARY, NAMESPACE

SCHEMA = "picked(Tensor[] rows, Tensor[] others, str body) -> Tensor"
BODIES: WeakValueDictionary[str, fx.GraphModule] = WeakValueDictionary()  # whoever has the node has its body, too


def compute(rows: Sequence[Tensor], others: Sequence[Tensor], body: str) -> Tensor:
    """The body itself, by torch's own ops: passes that find it on rows write it there. `rows[0]` is what comes back."""
    if not rows or body not in BODIES:
        raise ValueError("picked: made by the compiler for a graph of its own, and called by nobody else")
    if isinstance(rows[0], FakeTensor) and get_proxy_mode() is None:
        return torch.empty_like(rows[0])  # how many rows are picked nobody knows, nor does it matter
    result: Tensor = BODIES[body](*rows, *others)
    return result


if not hasattr(getattr(torch.ops, NAMESPACE), "picked"):
    LIBRARY.define(SCHEMA, tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl("picked", compute, "CompositeImplicitAutograd")
