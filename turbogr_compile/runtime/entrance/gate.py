"""Whether the inputs of a call are what the ops of its graph take."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import torch

from ... import _torch
from ...kernels.contract import REAL
from ...kernels.cpu.build import library
from .proof import Proof
from .source import source_of

KINDS = 16  # that are kept
Kind = Callable[..., bool]  # of tensors: are they of it?


class Gate:
    """What `proof` leaves to be asked of inputs.

    One call of torch says whether types, dtypes and constant sizes are those of inputs that the graph took before with
    all of its checks; the other sizes and the entries are asked for by a function made for this graph.
    """

    def __init__(self, proof: Proof) -> None:
        places = {node: i for i, node in enumerate(proof.graph.find_nodes(op="placeholder"))}
        self.fakes = [node.meta["val"] for node in proof.tensors]
        self._tensors = _picking([places[node] for node in proof.tensors])
        self._numbers = _picking([places[node] for node in proof.numbers])
        self.dtype = _dtype_of_kernels(proof)
        self.source, count = source_of(proof)
        space: dict[str, Any] = {"pack": struct.Struct(f"{count}q").pack}
        exec(compile(self.source, "<entrance of a graph>", "exec"), space)
        self._fit: Callable[..., bool] = space["fit"]
        self._kinds: list[Kind] = []  # of inputs that were looked at: parameters, or their values

    def passes(self, values: Sequence[Any]) -> bool:
        """Never for those who watch ops run: what needs no check does not pass torch's dispatcher."""
        kernels = library(self.dtype)
        if kernels is None or _torch.is_watched():
            return False
        try:
            tensors = self._tensors(values)
            known = any(alike(*tensors) for alike in self._kinds)
            return known and self._fit(kernels.turbogr_check, *tensors, *self._numbers(values))
        except Exception:  # ops with their checks say what is wrong
            return False

    def new_kind(self, values: Sequence[Any]) -> Kind | None:
        """Which inputs are like these, if they are as the compiler took them to be and no such ones came before."""
        if len(self._kinds) >= KINDS or _torch.is_watched():
            return None
        tensors = self._tensors(values)
        if not all(_is_like(x, fake) for x, fake in zip(tensors, self.fakes, strict=True)):
            return None
        sizes = [[s if type(s) is int else None for s in fake.shape] for fake in self.fakes]
        return None if any(alike(*tensors) for alike in self._kinds) else _torch.alike(tensors, sizes)

    def trust(self, kind: Kind) -> None:
        """The graph took such inputs with all of its checks: its ops make of them what their fakes promise.

        Not all of torch's do. The type of a loss of mixed types is another one than that of its fake.
        """
        self._kinds.append(kind)


def _picking(places: list[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    if len(places) > 1:
        return itemgetter(*places)  # at once
    return lambda values: tuple(values[i] for i in places)


def _dtype_of_kernels(proof: Proof) -> torch.dtype | None:
    """One that the graph computes in: the library that serves it is needed in any case, and can check."""
    values = (x.meta.get("val") for x in proof.operands)
    return next((x.dtype for x in values if isinstance(x, torch.Tensor) and x.dtype in REAL), None)


def _is_like(x: Any, fake: torch.Tensor) -> bool:
    if not _torch.is_plain(x) or x.dtype is not fake.dtype or x.dim() != fake.dim():
        return False
    return all(size == known for size, known in zip(x.shape, fake.shape, strict=True) if type(known) is int)
