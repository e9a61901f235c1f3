"""What torchair changes in torch, in force only while a graph is compiled for it.

torchair replaces, once for the process, meta functions and decompositions (dropout with a packed mask, batch norm,
matmul's backward, upsampling) and what in-place collectives are traced to. Others who compile in the same process must
not meet any of it, so the differences are recorded when torchair makes them, undone, and put back for `patched()`.

Dynamo has traced before a backend is called. In-place broadcast, all-to-all of lists, send and recv, which only
torchair makes traceable, therefore need the call of the compiled function itself to be inside of `patched()`.
"""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch._guards import detect_fake_mode
from torch._ops import OpOverload
from torch._subclasses import fake_tensor
from torch.distributed._functional_collectives import traceable_collective_remaps

from ...errors import TargetError

aten = torch.ops.aten
_MISSING = object()
_BREAKS = "BREAK_GRAPH_OP_LIST"  # makes torchair patch Dynamo, which has done its work when a backend is called


@dataclass(frozen=True)
class Change:
    """One entry of one table of torch's, before torchair and after it."""

    table: MutableMapping[Any, Any]
    key: Any
    before: Any
    after: Any
    op: OpOverload | None  # whose table of Python kernels it is

    def set(self, value: Any) -> None:
        if value is _MISSING:
            self.table.pop(self.key, None)
        else:
            self.table[self.key] = value
        if self.op is not None:
            self.op._dispatch_cache.clear()


_changes: list[Change] = []
_recorded = False  # what torchair changes when its first backend is made
_depth = 0
_lock = threading.RLock()


@contextmanager
def kept() -> Iterator[None]:
    """torch's tables are after the block as before it; what the block changed is remembered for `patched()`."""
    before = [(table, dict(table), op) for table, op in _tables()]
    decides = fake_tensor.torch_decomp_decompositions  # which decompositions serve as meta functions
    try:
        yield
    finally:
        new = [change for table, old, op in before for change in _difference(table, old, op)]
        if fake_tensor.torch_decomp_decompositions is not decides:
            name = "torch_decomp_decompositions"
            new.append(Change(vars(fake_tensor), name, decides, fake_tensor.torch_decomp_decompositions, None))
        for change in new:
            change.set(change.before)
        _forget_fake_results()
        _changes.extend(new)


@contextmanager
def patched() -> Iterator[None]:
    """For the time of one compilation for torchair, forward or backward, tracing included; may be nested.

    Other threads that compile meanwhile see the patches too.
    """
    _record()
    _enter()
    try:
        yield
    finally:
        _leave()


def _record() -> None:
    """The first backend makes torchair patch; from then on it believes that the patches are in place."""
    global _recorded
    with _lock:
        if _recorded:
            return
        torchair = sys.modules.get("torchair")
        if torchair is None:
            raise TargetError("torchair is not loaded; call simulated() or installed() first")
        import torch._inductor.decomposition  # noqa: F401  (copies decompositions when imported, so it goes first)

        breaks = os.environ.pop(_BREAKS, None)
        try:
            with kept(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                torchair.get_npu_backend()
        finally:
            if breaks is not None:
                os.environ[_BREAKS] = breaks
        _recorded = True


def _enter() -> None:
    global _depth
    with _lock:
        _depth += 1
        if _depth == 1:
            for change in _changes:
                change.set(change.after)
            _forget_fake_results()


def _leave() -> None:
    global _depth
    with _lock:
        _depth -= 1
        if _depth == 0:
            for change in reversed(_changes):
                change.set(change.before)
            _forget_fake_results()


def _tables() -> Iterator[tuple[MutableMapping[Any, Any], OpOverload | None]]:
    yield decomposition_table, None
    yield traceable_collective_remaps, None
    others = (aten.to.other, aten.type_as.default, aten.matmul_backward.default)
    for op in {*decomposition_table, *others}:
        if isinstance(op, OpOverload):
            yield op.py_kernels, op


def _difference(table: MutableMapping[Any, Any], old: dict[Any, Any], op: OpOverload | None) -> Iterator[Change]:
    for key in {**old, **table}:
        before, after = old.get(key, _MISSING), table.get(key, _MISSING)
        if before is not after:
            yield Change(table, key, before, after, op)


def _forget_fake_results() -> None:
    """Results of meta functions are cached by op and argument, for the process and for each compilation's sizes."""
    fake_tensor.FakeTensorMode.cache.clear()
    mode = detect_fake_mode()
    if mode is not None and mode.shape_env is not None:
        mode.shape_env.fake_tensor_cache.clear()
