"""Whether anybody can tell a negative zero from a positive one.

Where a value is zero on pads, its rows are scattered into zeros instead of being computed there. Those zeros are
positive; eager's may be negative (-2.0 * 0 is -0.0), and few ops tell: atan2, copysign, signbit, what is divided by it,
its bits as a whole number. An op that nobody has declared is asked, too: all rows come to it. Those outside of torch
are not called, and taken not to tell.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from ... import _torch
from ...graph.nodes import tensor, zeros_of
from .calls import op, tensors, value_of
from .declaration import declared
from .meanings import Meanings
from .ops.pointwise import broadcast

# The zero that they give is a sum, which starts from a positive one, or no zero at all.
# Norms that scale are not among them: without a bias, minus zero stays what it is.
_ADD = {"sum", "mean", "nansum", "linear", "mm", "matmul", "bmm", "addmm", "baddbmm", "einsum", "conv1d", "cumsum",
        "softmax", "log_softmax", "_softmax", "_safe_softmax", "logsumexp", "scaled_dot_product_attention", "norm",
        "linalg_norm", "linalg_vector_norm", "std", "var"}  # fmt: skip
_OTHERS = (1.0, -1.0, 0.0, -0.0, 2.5)  # for operands that nothing is known of


class Signs:
    def __init__(self, meanings: Meanings) -> None:
        self.meanings = meanings
        self._matter: dict[fx.Node, bool] = {}

    def matter(self, node: fx.Node) -> bool:
        """Would somebody give other numbers for zeros of the other sign?"""
        if node not in self._matter:
            self._matter[node] = any(self._tells(user, node) for user in node.users)
        return self._matter[node]

    def _tells(self, user: fx.Node, node: fx.Node) -> bool:
        if op(user) == "getitem":
            return self.matter(user)
        found = declared(user)
        if op(user) in _ADD or (found is None and getattr(user.target, "namespace", "") != "aten"):
            return False
        if (found is not None and found.axes is not broadcast) or _torch.is_random(user):
            return self.matter(user)
        told = self._told_by_itself(user, node)
        return told == "numbers" or (told == "signs" and self.matter(user))

    def _told_by_itself(self, user: fx.Node, node: fx.Node) -> str:
        """What differs in the op's result for zeros of both signs: nothing, signs of zeros, or numbers."""
        said = "nothing"
        for other in _OTHERS:
            results = [self._called(user, node, zero, other) for zero in zeros_of(value_of(node))]
            for a, b in itertools.chain(*map(zip, results, results[1:])):
                if not torch.equal(a.nan_to_num(0.5), b.nan_to_num(0.5)):
                    return "numbers"
                if not torch.equal(a.signbit(), b.signbit()):
                    said = "signs"
        return said

    def _called(self, user: fx.Node, node: fx.Node, zero: complex, other: float) -> list[torch.Tensor]:
        """Real numbers that the op gives for one element; nothing where it cannot be called."""
        target: Any = user.target

        def real(x: fx.Node) -> torch.Tensor:
            value, constant = tensor(x), self.meanings.constant(x)
            assert value is not None
            number = zero if x is node else other if constant is None else constant
            return torch.full([1] * value.dim(), number, dtype=value.dtype)

        if not all(tensor(x) is not None for x in user.all_input_nodes) or node not in tensors(user):
            return []
        try:
            args, kwargs = fx.map_arg((user.args, user.kwargs), real)  # a type without a sign has no -1
            kwargs = {k: v for k, v in kwargs.items() if k not in ("device", "memory_format", "pin_memory")}
            with _torch.outside_compilation(), torch.no_grad():
                result = target(*args, **kwargs)
        except (RuntimeError, TypeError, ValueError, ZeroDivisionError):
            return []
        results = [torch.as_tensor(x) for x in tree_leaves(result) if x is not None]
        return [part for x in results for part in ((x.real, x.imag) if x.is_complex() else (x,))]
