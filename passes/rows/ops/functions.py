"""`torch.autograd.Function`: row by row where its forward and its backward are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from ....capture.functions import FUNCTIONS
from .. import bodies
from ..calls import is_tensor
from ..declaration import EVERY, Declaration, row_family

if TYPE_CHECKING:
    from ..axes import Dims, Typing
    from ..emit import Emitter
    from ..program import RowSet
    from ..rowwise import Rowwise
    from ..spaces import Space


def _is_opaque(target: torch._ops.OpOverload) -> bool:
    return target.namespace in FUNCTIONS and torch.Tag.pointwise not in target.tags


def _axes(t: Typing, n: fx.Node) -> Dims | list[Dims | None] | None:
    found = bodies.function_of(t, n)
    if found is None:
        return None
    t.bodies[n] = found
    dims: list[Dims | None] = [found.forward.typing.dims(x) for x in found.results]
    return dims[0] if is_tensor(n) else dims


def _mixes(r: Rowwise, n: fx.Node, s: Space) -> str | None:
    found = r.typing.bodies.get(n)
    return bodies.why_mixed(found, s) if found is not None else "an autograd.Function that nothing is known of"


def _packed(e: Emitter, n: fx.Node, chosen: RowSet) -> Any:
    return e.function(n, chosen)


row_family(_is_opaque, Declaration(EVERY, _axes, _mixes, None, None, _packed))
