"""What was asked for and is not computed yet: calls of model graphs, calls of torch functions, and what they read.

A record is made of pure functions and of values that nobody can change any more: a tensor from outside is a `Source`,
which has the value it had when it was recorded, whatever is written to the tensor afterwards. So a record can be
computed at any time, and again, with the same result.

Gradients do not depend on how a tensor is used. Each waiting tensor has a place in autograd's graph: a gradient that
reaches it from code that does not ask us (an `autograd.Function`, C++) is sent through the real computation.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import _torch
from .._torch import address_of, lazy_twin
from ..errors import TurbogrError

# One record for all threads: their calls may meet in one sum. It is Dynamo's own lock, for steps are compiled under it:
# tracing patches modules of torch, which no other thread may see.
LOCK = _torch.compile_lock
WAITING: dict[int, Value] = {}  # values that are not computed, and that user code has a tensor for


class LateRead(TurbogrError, RuntimeError):
    """A value is asked for after it was given up: it seemed that nobody could ask."""


class Meta:
    """What is known of a tensor before it is computed."""

    __slots__ = ("device", "dtype", "key", "requires_grad", "shape", "stride")

    def __init__(self, shape: Any, stride: Any, dtype: Any, device: Any, requires_grad: bool) -> None:
        self.shape, self.stride = tuple(shape), tuple(stride)
        self.dtype, self.device, self.requires_grad = dtype, device, requires_grad
        self.key = (self.shape, self.stride, dtype, requires_grad)

    @staticmethod
    def of(x: torch.Tensor) -> Meta:
        return Meta(x.shape, x.stride(), x.dtype, x.device, x.requires_grad)


class Source:
    """A tensor from outside, with the value and the place in autograd's graph that it has now."""

    __slots__ = ("is_leaf", "requires_grad", "shared", "tensor", "twin")

    def __init__(self, tensor: torch.Tensor, waits: bool = True) -> None:
        self.tensor, self.requires_grad, self.is_leaf = tensor, tensor.requires_grad, tensor.is_leaf
        self.twin: torch.Tensor | None = tensor
        self.shared = True
        if not waits:
            return  # read before anybody can write to it
        if self.requires_grad and not self.is_leaf:
            # Its place in autograd's graph moves when it is written to: the twin keeps the one it has now.
            with torch.enable_grad():
                self.twin = _Twin.apply(tensor)
            return
        if self.requires_grad and torch.is_grad_enabled():
            with torch.no_grad():
                self.twin = lazy_twin(tensor)
        else:
            self.twin = lazy_twin(tensor)
        self.shared = self.twin is not None
        if self.twin is None:
            self.twin = tensor.detach().clone()  # foreign memory: nobody sees writes to it

    def described(self) -> tuple[Any, ...]:
        assert self.twin is not None
        return self.twin.shape, self.twin.stride()

    def same(self, other: Source) -> bool:
        """The same tensor, and nothing was written to it between: two calls may be computed together."""
        assert self.twin is not None and other.twin is not None
        return (
            self.tensor is other.tensor
            and self.requires_grad == other.requires_grad
            and _torch.address_of(self.twin) == _torch.address_of(other.twin)
            and self.described() == other.described()
        )

    def value(self) -> torch.Tensor:
        tensor, twin = self.tensor, self.twin
        if twin is None:
            raise LateRead("a value is asked for after it was given up")
        if self.requires_grad and not self.is_leaf:
            return twin
        # Whoever writes to memory that a twin shares gets memory of his own: `.data`, whose writes are not counted
        # with the tensor's, and the tensor itself.
        unchanged = self.shared and address_of(tensor) == address_of(twin)
        now = tensor.requires_grad
        if unchanged and now == self.requires_grad:
            return tensor
        if not self.requires_grad:
            return tensor.detach() if unchanged else twin
        if now:
            return _old_value(tensor, twin)
        tensor.requires_grad_(True)  # frozen since
        try:
            return _old_value(tensor, twin)
        finally:
            tensor.requires_grad_(False)


def _old_value(parameter: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        return _Old.apply(parameter, old)


class _Twin(torch.autograd.Function):
    """The value a tensor has now, whatever is written to it."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)  # who has no gradient has none of what it was made from
        twin = _torch.lazy_twin(tensor)
        return twin if twin is not None else tensor.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad


class _Old(torch.autograd.Function):
    """The old value of a parameter, whose gradient goes to the parameter."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        return old.view_as(old)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, None


def _nothing() -> None:
    return None


class Value:
    """One result of a node. `real` is the ordinary tensor that user code has, as soon as it has one."""

    __slots__ = (
        "__weakref__",
        "alias",
        "alone",
        "edge",
        "index",
        "kept",
        "link",
        "maker",
        "meta",
        "real",
        "seen",
        "tensor",
        "token",
    )

    def __init__(self, node: Node, index: int, meta: Meta, alias: Value | None = None) -> None:
        self.maker: Node | None = node
        self.index, self.meta, self.token = index, meta, node.token
        self.alias = alias  # eager's result would share this one's memory
        self.alone = False  # not to be computed along with others
        self.real: torch.Tensor | None = None
        self.kept: Node | None = None  # makes it from rows that a step has computed, where these are enough
        self.edge: Any = None  # the place in autograd's graph that `real` had before anybody wrote to it
        self.seen: torch.Tensor | None = None  # its numbers, for those who only look: memory that nobody else has
        self.tensor: Any = _nothing  # weak: what stands for it in user code
        self.link: Any = _nothing  # weak: its place in autograd's graph, which others may have taken up

    def stands(self, tensor: torch.Tensor, link: Any = None) -> None:
        """User code has this tensor for it, which has this place in autograd's graph. It waits as long as the tensor
        lives, or somebody's way back to it."""
        key, known = id(self), weakref.ref(self)

        def gone(_: Any) -> None:
            value = known()
            if value is None or (value.tensor() is None and value.link() is None):
                WAITING.pop(key, None)

        self.tensor = weakref.ref(tensor, gone)
        if link is not None:
            self.link = weakref.ref(link, gone)
        WAITING[key] = self

    @property
    def node(self) -> Node:
        if self.maker is None:
            raise LateRead("turbogr: a gradient is asked for of a value whose record is gone")
        return self.maker

    def becomes(self, real: torch.Tensor) -> None:
        """Computed: from now on an ordinary tensor, which keeps nothing of the record alive."""
        self.real, self.seen, self.maker, self.alias, self.kept = real, None, None, None, None
        if real.requires_grad and (real.grad_fn is not None or not real._is_view()):
            self.edge = _torch.gradient_edge(real)  # a view made under no_grad has none
        WAITING.pop(id(self), None)

    @property
    def moved(self) -> bool:
        """Written to since: its gradient takes another way than that of the links made before."""
        real = self.real
        return real is not None and real.requires_grad and (self.edge is None or real.grad_fn is not self.edge.node)

    @property
    def waits(self) -> bool:
        return self.real is None

    @property
    def base(self) -> Value:
        value = self
        while value.alias is not None:
            value = value.alias
        return value


class Modes:
    """Settings of torch that a computation depends on."""

    __slots__ = ("autocast", "dtype", "grad")

    def __init__(self) -> None:
        self.grad = torch.is_grad_enabled()
        on = torch.is_autocast_enabled("cpu")
        self.autocast = (torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()) if on else None
        self.dtype = torch.get_default_dtype()

    @property
    def key(self) -> Any:
        return self.grad, self.autocast, self.dtype


_order = itertools.count()


class Node:
    """One recorded call: of a model's graph, or of a torch function."""

    __slots__ = ("__weakref__", "anchor", "args", "func", "given_up", "inputs", "kind", "kwargs", "line",
                 "model", "modes", "number", "order", "passed", "ran", "seed", "sizes", "sources", "token",
                 "values")  # fmt: skip

    def __init__(self, func: Any, given: Kept, modes: Modes, line: Any, model: Any = None) -> None:
        self.order: float = next(_order)
        self.func, self.modes, self.line = func, modes, line
        self.model = model  # whose graph it is a call of
        self.args, self.kwargs = given.args, given.kwargs
        self.inputs, self.sources = given.inputs, given.sources  # all there are among the arguments
        self.kind: Any = None  # equal for calls that differ only in who their tensors are
        self.given_up = ""  # why it can no longer be computed
        self.values: list[Value] = []
        self.ran = 0  # how often it was computed
        self.passed = False  # is there something with gradients that was computed from it, past its outputs?
        self.number = 0  # of the model's calls
        self.seed: int | None = None
        self.sizes: tuple[int, ...] = ()  # of a model's call: what its graph leaves open
        self.token: Token | None = None
        self.anchor: torch.Tensor | None = None

    def give_up(self, why: str) -> None:
        for s in self.sources:
            s.twin = None
        self.given_up = why
        self.forget()

    def forget(self) -> None:
        self.args, self.kwargs, self.inputs, self.sources = (), {}, [], []

    def connect(self, compute: Compute) -> None:
        """A place in autograd's graph, for results that require grad."""
        given = [s.tensor if s.is_leaf else s.twin for s in self.sources if s.requires_grad]
        above = {id(v.node.token): v.node for v in self.inputs if v.meta.requires_grad}
        if not given and len(above) == 1:
            (node,) = above.values()
            self.token, self.anchor = node.token, node.anchor
            return
        self.token = Token(given, [n.token for n in above.values() if n.token is not None])
        anchors = [n.anchor for n in above.values() if n.anchor is not None]
        self.anchor = _torch.apply_as_it_is(_Anchor, self.token, compute, len(anchors), *anchors, *given)


SCALARS = {int, float, bool, str, type(None), torch.dtype}  # no tensors inside
_PARAMETER, _TENSOR = torch.nn.Parameter, torch.Tensor


class Kept:
    """Arguments of a call, as they are now; `kept` says what is kept for a tensor that is not a plain one."""

    __slots__ = ("_keep", "args", "inputs", "kwargs", "sources", "waits")

    def __init__(
        self, args: Any, kwargs: Any, kept: Callable[[torch.Tensor], Value | Source], waits: bool = True
    ) -> None:
        self.waits = waits
        self.inputs: list[Value] = []
        self.sources: list[Source] = []
        self._keep = kept
        found = []
        for a in args:  # a model has many parameters
            kind = type(a)
            if kind is _PARAMETER or kind is _TENSOR:
                a = Source(a, waits)
                self.sources.append(a)
            elif kind not in SCALARS:
                a = self._kept(a)
            found.append(a)
        self.args = tuple(found)
        self.kwargs = {k: v if type(v) in SCALARS else self._kept(v) for k, v in kwargs.items()} if kwargs else {}

    def _kept(self, x: Any) -> Any:
        kind = type(x)
        if kind is _PARAMETER or kind is _TENSOR:
            source = Source(x, self.waits)
            self.sources.append(source)
            return source
        if isinstance(x, torch.Tensor):
            found = self._keep(x)
            (self.inputs if type(found) is Value else self.sources).append(found)  # type: ignore[arg-type]
            return found
        if isinstance(x, (list, tuple)):
            return [self._kept(i) for i in x] if isinstance(x, list) else tuple([self._kept(i) for i in x])
        if isinstance(x, dict):
            return {k: self._kept(v) for k, v in x.items()}
        if isinstance(x, slice):
            return slice(self._kept(x.start), self._kept(x.stop), self._kept(x.step))
        return x


def tensors_of(x: Any) -> list[Any]:
    """Tensors among arguments, in order."""
    found: list[Any] = []
    _add_tensors(x, found)
    return found


def _add_tensors(x: Any, found: list[Any]) -> None:
    if isinstance(x, (list, tuple, dict)):
        for item in x.values() if isinstance(x, dict) else x:
            if isinstance(item, torch.Tensor):
                found.append(item)
            elif type(item) not in SCALARS:
                _add_tensors(item, found)
    elif isinstance(x, torch.Tensor):
        found.append(x)
    elif isinstance(x, slice):
        _add_tensors((x.start, x.stop, x.step), found)


def above(values: Sequence[Value]) -> list[Node]:
    """Everything that these are computed from, up to values that are there, in the order of recording."""
    seen: dict[float, Node] = {}
    todo = [v.maker for v in values]
    while todo:
        node = todo.pop()
        if node is not None and node.order not in seen:
            seen[node.order] = node
            for v in node.inputs:
                todo.append(v.maker)
    return [seen[k] for k in sorted(seen)] if len(seen) > 1 else list(seen.values())


# --- gradients that come by other ways ------------------------------------------------------------------


Compute = Callable[[Sequence[Value]], list[Any]]  # where their gradients go in


class Token:
    """Stands in autograd's graph for what waiting tensors are computed from.

    Gradients that reach waiting tensors wait here until all have come; then they go through the real computation.
    """

    __slots__ = ("inputs", "parents", "waiting")

    def __init__(self, inputs: list[Any], parents: list[Token]) -> None:
        self.inputs, self.parents = inputs, parents
        self.waiting: list[tuple[Value, torch.Tensor]] = []

    @property
    def simple(self) -> bool:
        """All there is are parameters, each once: a gradient with respect to one of them holds no part of another."""
        return not self.parents and all(x.is_leaf for x in self.inputs)

    def reach(self) -> list[Token]:
        found: dict[int, Token] = {}
        todo = [self]
        while todo:
            token = todo.pop()
            if id(token) not in found:
                found[id(token)] = token
                todo += token.parents
        return list(found.values())


class _Anchor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Token, compute: Compute, anchors: int, *given: torch.Tensor) -> torch.Tensor:
        ctx.token, ctx.compute, ctx.anchors = token, compute, anchors
        return torch.empty(())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        token = ctx.token
        waiting, token.waiting = token.waiting, []
        nothing = (None, None, None, *([torch.zeros(())] * ctx.anchors))
        if not waiting or not token.inputs:
            return (*nothing, *([None] * len(token.inputs)))
        reals = ctx.compute([value for value, _ in waiting])
        pairs = [(r, g) for r, (_, g) in zip(reals, waiting, strict=True) if r is not None]
        found = torch.autograd.grad(
            [r for r, _ in pairs], token.inputs, [g for _, g in pairs],
            retain_graph=True, create_graph=torch.is_grad_enabled(), allow_unused=True,
        )  # fmt: skip
        return (*nothing, *found)


class Link(torch.autograd.Function):
    """Makes the tensor that stands for a value, at its place in autograd's graph."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, value: Value, make: Any) -> Any:
        ctx.value = value
        ctx.set_materialize_grads(False)
        return make(value, ctx)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> Any:
        if grad is not None:
            for token in ctx.value.token.reach():
                token.waiting.append((ctx.value, grad))
        return torch.zeros(()), None, None
