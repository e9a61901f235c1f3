"""When values are needed: which part of the record is computed, and what becomes of the rest.

* A value that user code gets as a tensor is an ordinary tensor from then on, which may be written to. Whatever was
  recorded of it before is therefore computed from it now, as eager would have, views as views.
* Numbers (results without dims: losses, metrics) of the same model calls are computed together, and so are outputs of
  a call of which one is wanted as it is.
* Who only looks at values (prints, compares) gets numbers, and the record stays.
* A model call that must not run twice (dropout would draw again) is computed with everything that may still be read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .. import _torch
from ..errors import TurbogrError
from . import kept, liveness
from .record import LOCK, WAITING, Node, Source, Value, above
from .step import Plan, where

READ_RAW = 3  # calls in a row whose outputs were read as they are: waiting gains nothing
READ_APART = 4  # times that a call is computed for one thing and another, before its outputs are computed for all


@_torch.untraced
def realize(values: Sequence[Value], alone: bool = False) -> None:
    """Make these ordinary tensors; `alone`: no numbers that follow from them along with them."""
    with LOCK, apart(), unhooked():
        todo = [v for v in values if v.waits]
        if not todo:
            return
        bases = _distinct(v.base for v in todo)
        calls = _calls(bases)
        depending = _depending(calls)
        if _served(bases, depending):
            _settle()
            return
        if _read_apart(bases, calls):
            return
        along = (
            [] if alone else [*_alike(bases, _numbers(depending)), *_siblings(bases, depending), *_kept_of_once(calls)]
        )
        together = _distinct([*bases, *along])
        besides = together[len(bases) :]
        try:
            _run(together, calls, depending, last=not besides)
        except Exception:
            if not besides or any(n.given_up for n in calls):
                _alone(bases)
                raise
            _alone(besides)  # eager would have raised where it was recorded, and nobody asks for it here
            _run(bases, calls, depending, last=False)
        _settle()


@_torch.untraced
def place(values: Sequence[Value]) -> None:
    """Make these ordinary tensors through which the gradients of all that hangs on them pass: the model's outputs are
    computed, and everything else follows from them."""
    with LOCK, apart(), unhooked():
        for call in _calls([v for v in values if v.waits]):
            realize(_outputs_read(call), alone=True)
        realize(values)


def _outputs_read(call: Node) -> list[Value]:
    """Outputs of a model's call that somebody waits for, or for something that is computed from them."""
    waiting = [v for v in list(WAITING.values()) if v.waits]
    asked = [*waiting, *(v for n in above(waiting) for v in n.inputs)]
    return _distinct(v for v in asked if v.waits and v.node is call)


@_torch.untraced
def look(value: Value) -> torch.Tensor:
    """Numbers of a value, for those who keep nothing of its memory."""
    with LOCK, apart(), unhooked():
        if value.waits and (not value.base.meta.shape or any(n.model.once for n in _calls([value]))):
            realize([value])
        if value.real is not None:
            return value.real
        if value.seen is None:
            served = kept.computed([value], _recomputed)
            if served is None and _read_apart([value], _calls([value])):
                assert value.real is not None
                return value.real
            (result,) = _recomputed([value]) if served is None else served
            value.seen = result.detach()
        return value.seen


@_torch.untraced
def compute(values: Sequence[Value]) -> list[Any]:
    """Where gradients of these go in, for whoever goes around us; None where there are none. The record stays."""
    with LOCK, apart(), torch.enable_grad():
        if any(n.model.once for n in _calls([v for v in values if v.waits])):
            realize(values)
        waiting = [v for v in values if v.waits]
        found = dict(zip(map(id, waiting), _compute(Plan(waiting)), strict=True)) if waiting else {}
        computed = [(v.edge if v.real is not None else found[id(v)]) for v in values]
        return [c if not isinstance(c, torch.Tensor) or c.requires_grad else None for c in computed]


def _served(bases: list[Value], depending: list[Value]) -> bool:
    """Made these from rows that a step has kept, and with them the numbers that wait."""
    if any(v.meta.requires_grad for v in bases):
        return False
    chosen = _distinct([*bases, *(v for v in _numbers(depending) if not v.meta.requires_grad)])
    nodes = above(chosen)
    results = kept.computed(chosen, _recomputed)
    if results is None:
        return False
    for value, result in zip(chosen, results, strict=True):
        value.becomes(_as_promised(value, result))
    _let_go(nodes, chosen, depending)
    return True


def _read_apart(values: Sequence[Value], calls: Sequence[Node]) -> bool:
    """Is one thing and another read of a call, each for itself? Then its outputs are computed, and these from them."""
    if any(v.meta.requires_grad for v in values):
        return False
    often = {n.order for n in calls if n.ran >= READ_APART and not n.model.trained}
    outputs = [v for n in above(values) for v in n.inputs if v.waits and v.node.order in often] if often else []
    if not outputs:
        return False
    realize(outputs)
    return not any(v.waits for v in values)


def _recomputed(values: Sequence[Value]) -> list[torch.Tensor]:
    """A step may have run: what it left out, or did not keep, is computed for this."""
    for n in _calls(values):
        if n.ran:
            n.model.read_late()
    return _compute(Plan(values), looks=True)


def apart() -> Any:
    """Dynamo may be in the middle of a trace: what is computed is none of its business."""
    return contextlib.nullcontext() if _torch.TracingContext.try_get() is None else _torch.outside_compilation()


_CALLED_HOOKED: list[bool] = []  # a model's call that does not wait runs under the hooks that it was made under


def unhooked() -> Any:
    """Saved-tensor hooks (activation checkpointing) are set for what is called under them, not for what waited."""
    if _CALLED_HOOKED or not _torch.saved_tensors_are_hooked():
        return contextlib.nullcontext()
    return _torch.without_saved_tensor_hooks()


def realize_at_call(node: Node, values: Sequence[Value]) -> None:
    """A call that does not wait: what it is given is computed before, and the call where it is made."""
    waiting = [v for v in node.inputs if v.waits]
    if waiting and _torch.saved_tensors_are_hooked():
        realize(waiting)
        node.model.settled(node)
    _CALLED_HOOKED.append(True)
    try:
        realize(values)
    finally:
        _CALLED_HOOKED.pop()


def _alone(values: Sequence[Value]) -> None:
    """Computing one of these raised: they are computed for those who ask for them, not along with others."""
    for v in values:
        v.alone = True


def _distinct(values: Any) -> list[Value]:
    return list({id(v): v for v in values}.values())


def _calls(values: Sequence[Value]) -> list[Node]:
    return [n for n in above(values) if n.model is not None] if values else []


def _depending(calls: Sequence[Node]) -> list[Value]:
    """What waits for these model calls."""
    orders = {n.order for n in calls}
    return [v for v in list(WAITING.values()) if v.waits and any(n.order in orders for n in above([v]))]


def _numbers(values: Sequence[Value]) -> list[Value]:
    return [v.base for v in values if not v.base.meta.shape and not v.base.alone]


def _alike(bases: Sequence[Value], numbers: list[Value]) -> list[Value]:
    """Numbers that gradients of one step may hold: where one has a gradient of a parameter that another has no part in,
    that one's would be zeros, and not None."""
    found: list[Value] = []
    first: set[int] | None = None
    trained = [v for v in bases if v.meta.requires_grad]
    asked = _distinct([*trained, *numbers])
    if len(asked) < 2:
        return asked
    for v in asked:
        if v.meta.requires_grad and (len(numbers) > 1 or trained):
            mine = {id(s.tensor) for n in above([v]) for s in n.sources if s.requires_grad}
            first = mine if first is None else first
            if mine != first:
                continue
        found.append(v)
    return found


def _is_raw(value: Value) -> bool:
    """Rows for which most of a model runs: neither a mask beside them nor a number."""
    model = value.node.model
    return model is not None and bool(value.meta.shape) and value.index not in model.light


def _siblings(bases: Sequence[Value], depending: Sequence[Value]) -> list[Value]:
    """Other outputs of a model call of which one is wanted as it is: the whole call runs for it, and would again."""
    calls = {v.node.order for v in bases if _is_raw(v)}
    found = [v for v in depending if v.node.order in calls and all(v is not b for b in bases)] if calls else []
    return liveness.may_be_read(found)


def _kept_of_once(calls: Sequence[Node]) -> list[Value]:
    once = [n for n in calls if n.model.once]
    if not once:
        return []
    return [v.base for v in liveness.may_be_read(_depending(once))]


def _compute(plan: Plan, ready: Any = lambda: None, looks: bool = False) -> list[torch.Tensor]:
    """`looks`: gradients of the results are of no use to anybody."""
    calls = plan.models
    try:
        results = calls[0].model.programs.run(plan, ready)
    except Exception as error:
        for n in calls:
            _add_note(error, f"turbogr: computed late; the model was called at {where(n)}")
        raise
    for value, result in zip(plan.wanted, results, strict=False):
        _check_type(value, result)
    for n in calls:
        n.ran += 1
        n.passed |= not looks and any(v.meta.requires_grad for v in plan.wanted)
    return results


def _check_type(value: Value, result: torch.Tensor) -> None:
    told = value.meta.dtype
    if result.dtype is not told:  # user code may have decided by it
        raise TurbogrError(
            f"turbogr: a deferred result was announced as {told} and is {result.dtype}: an op says another type "
            f"without data than with, recorded at {where(value.node)}; compile with options={{'deferral': False}}"
        )


def _add_note(error: Exception, text: str) -> None:
    if hasattr(error, "add_note"):  # Python 3.11
        error.add_note(text)


def _run(chosen: list[Value], calls: list[Node], depending: list[Value], last: bool) -> None:
    nodes = above(chosen)
    models = [n for n in nodes if n.model is not None]
    if len(models) != len(calls):  # a number of these calls hangs on others, too
        depending = _depending(models)
    for n in models:
        n.model.trained |= any(v.meta.requires_grad and v.node is not n for v in chosen)
        n.model.read(n, any(v.node is n and _is_raw(v) for v in chosen))
        if n.ran and not any(v.meta.requires_grad for v in chosen):
            n.model.read_late()
    plan = Plan(chosen, kept.leaves_of(chosen, nodes, depending), nodes)
    # Inputs are there: what nobody can ask for again lets go of old parameters before kernels touch their memory.
    results = _compute(plan, (lambda: _let_go(nodes, chosen, depending)) if last else lambda: None)
    kept.keep(plan.leaves, results[len(chosen) :])
    for value, result in zip(chosen, results, strict=False):
        value.becomes(_as_promised(value, result))
    if not last:
        _let_go(nodes, chosen, depending)


def _let_go(nodes: Sequence[Node], chosen: list[Value], depending: list[Value]) -> None:
    """Model calls that nobody can ask for again give up what they keep alive, parameters above all."""
    mine = {id(v) for v in chosen}
    others = [v for v in depending if v.waits and id(v.base) not in mine]  # views of the chosen come from these
    living = liveness.may_be_read(others)
    for v in others:
        if all(v is not w for w in living):
            WAITING.pop(id(v), None)
    again = {n.order for n in above(living)}
    used = {n.order for n in above([v for v in list(WAITING.values()) if id(v) not in mine])}
    for n in nodes:
        if n.order not in (again if n.model is not None else used):
            n.give_up("though no variable that may still be read had it")


def _as_promised(value: Value, result: torch.Tensor) -> torch.Tensor:
    """Strides are part of what user code was told: a view of it must be a view."""
    meta = value.meta
    if result.stride() == meta.stride or result.numel() == 0:
        return result
    with torch.set_grad_enabled(result.requires_grad):
        return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=meta.device).copy_(result)


def _settle() -> None:
    """What was recorded of values that are there now is computed from them."""
    while True:
        node = _next_to_settle()
        if node is None:
            return
        waiting = [v for v in node.inputs if v.waits]
        if waiting:  # it also hangs on something else, which is then needed as well
            realize(waiting)
        else:
            _settle_node(node)


def _next_to_settle() -> Node | None:
    found: dict[float, Node] = {}
    for v in list(WAITING.values()):
        for n in _waiting_above(v):
            if any(a.real is not None for a in n.inputs):
                found[n.order] = n
    return found[min(found)] if found else None


def _waiting_above(value: Value) -> list[Node]:
    seen: dict[float, Node] = {}
    todo = [value.maker] if value.waits else []
    while todo:
        node = todo.pop()
        if node is not None and node.order not in seen:
            seen[node.order] = node
            todo += [a.maker for a in node.inputs if a.waits]
    return list(seen.values())


def _settle_node(node: Node) -> None:
    if node.model is not None:
        node.model.settled(node)
        return
    args, kwargs = _values_in((node.args, node.kwargs))
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(node.modes.grad))
        cast = node.modes.autocast
        stack.enter_context(torch.autocast("cpu", cast[0] if cast else None, enabled=cast is not None))
        try:
            flat = pytree.tree_leaves(node.func(*args, **kwargs))
        except Exception as error:
            for value in node.values:
                WAITING.pop(id(value), None)
            node.give_up(f"though computing it raised {type(error).__name__}")
            raise
    for value in list(node.values):
        value.becomes(flat[max(value.index, 0)])
    node.forget()


def _values_in(x: Any) -> Any:
    if isinstance(x, Value):
        return x.real
    if isinstance(x, Source):
        return x.value()
    if isinstance(x, (list, tuple)):
        return type(x)(_values_in(i) for i in x) if type(x) in (list, tuple) else tuple(_values_in(i) for i in x)
    if isinstance(x, dict):
        return {k: _values_in(v) for k, v in x.items()}
    if isinstance(x, slice):
        return slice(*(_values_in(p) for p in (x.start, x.stop, x.step)))
    return x
