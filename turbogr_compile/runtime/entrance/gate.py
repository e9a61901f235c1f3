"""Whether the inputs of a call are what the ops of its graph take."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ... import _torch
from ...kernels.contract import REAL
from ...kernels.cpu.build import library
from .proof import Proof
from .source import source_of

KINDS = 4  # that are kept


class Gate:
    """What `proof` leaves to be asked of inputs.

    One call of torch says whether types, dtypes and constant sizes are those of inputs that were looked at one by one
    before; the other sizes and the entries are asked for by a function made for this graph.
    """

    def __init__(self, proof: Proof) -> None:
        places = {node: i for i, node in enumerate(proof.graph.find_nodes(op="placeholder"))}
        self.places = [places[node] for node in proof.inputs]
        self.fakes = [node.meta["val"] for node in proof.inputs]
        self.dtype = _dtype_of_kernels(proof)
        self.source, count = source_of(proof)
        space: dict[str, Any] = {"pack": struct.Struct(f"{count}q").pack}
        exec(compile(self.source, "<entrance of a graph>", "exec"), space)
        self._fit: Callable[..., bool] = space["fit"]
        self._kinds: list[Callable[..., bool]] = []  # of inputs that were looked at: parameters, or their values

    def passes(self, values: Sequence[Any]) -> bool:
        """Never for those who watch ops run: what needs no check does not pass torch's dispatcher."""
        kernels = library(self.dtype)
        if kernels is None or _torch.is_watched():
            return False
        try:
            given = [values[i] for i in self.places]
            tensors = [x for x in given if type(x) is not int]
            known = any(alike(*tensors) for alike in self._kinds) or self._like_fakes(given, tensors)
            return known and self._fit(kernels.turbogr_check, *given)
        except Exception:  # ops with their checks say what is wrong
            return False

    def _like_fakes(self, given: Sequence[Any], tensors: Sequence[torch.Tensor]) -> bool:
        """Are these as the compiler took them to be? Others that are like them will be, too."""
        alike = all(_is_like(x, fake) for x, fake in zip(given, self.fakes, strict=True))
        if alike and len(self._kinds) < KINDS:
            sizes = [[s if type(s) is int else None for s in f.shape] for f in self.fakes if _is_tensor(f)]
            self._kinds.append(_torch.alike(tensors, sizes))
        return alike


def _dtype_of_kernels(proof: Proof) -> torch.dtype | None:
    """One that the graph computes in: the library that serves it is needed in any case, and can check."""
    values = (x.meta["val"] for x in proof.operands if _is_tensor(x.meta.get("val")))
    return next((value.dtype for value in values if value.dtype in REAL), None)


def _is_tensor(x: Any) -> bool:
    return isinstance(x, torch.Tensor)


def _is_like(x: Any, fake: Any) -> bool:
    if not _is_tensor(fake):
        return type(x) is int
    if not _torch.is_plain(x) or x.dtype is not fake.dtype or x.dim() != fake.dim():
        return False
    return all(size == known for size, known in zip(x.shape, fake.shape, strict=True) if type(known) is int)
