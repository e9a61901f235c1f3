"""A testing tool: a process group on which communication takes as long as you say.

On one machine all ranks share memory and cores, and there is little communication to hide. A group made here forwards
to gloo, and a collective is complete no earlier than its start + latency + bytes / bandwidth. Nothing computes while a
rank waits, so what is hidden and what is not can be measured.

    slow = delayed_group(0.020, bytes_per_second=1e9)
    functional.all_reduce(x, "sum", slow)
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _torch
from ..errors import OptionError

BACKEND = "turbogr-delayed"
_ProcessGroup: Any = dist.ProcessGroup  # its stubs know other signatures than those that are called


def delayed_group(
    seconds: float, bytes_per_second: float = math.inf, ranks: Sequence[int] | None = None
) -> dist.ProcessGroup:
    """A group of these ranks, all by default, with that latency. All ranks of the job call it, in the same order.

    Several collectives under way share the bandwidth, one after another, and have each their latency.
    """
    if seconds < 0 or bytes_per_second <= 0:
        given = f"{seconds} s, {bytes_per_second} B/s"
        raise OptionError(f"a latency is not negative and a bandwidth positive, got {given}")
    if not dist.is_initialized():
        raise OptionError("delayed_group needs torch.distributed.init_process_group before it")
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu"])
    group: Any = dist.new_group(None if ranks is None else list(ranks), backend=BACKEND)
    if isinstance(group, _Delayed):  # a rank outside of the group gets a placeholder
        group.latency, group.bandwidth = seconds, bytes_per_second
    return group


def _create(settings: Any, _: Any) -> dist.ProcessGroup:
    return _Delayed(settings.store, settings.group_rank, settings.group_size, settings.timeout, settings.group_id)


def _each(call: Callable[..., Any], opts: Any) -> Callable[..., list[Any]]:
    """Gloo knows them one by one only."""
    return lambda outputs, inputs: [call(*pair, opts) for pair in zip(outputs, inputs, strict=True)]


class _Work(dist.Work):
    def __init__(self, parts: list[Any], ready: float, results: Any) -> None:
        super().__init__()
        self._parts, self._ready, self._results = parts, ready, results

    def wait(self, timeout: timedelta | None = None) -> bool:
        for part in self._parts:
            part.wait()
        while (left := self._ready - time.perf_counter()) > 0:
            time.sleep(left)
        return True

    def is_completed(self) -> bool:
        return all(part.is_completed() for part in self._parts) and time.perf_counter() >= self._ready

    def get_future(self) -> Any:
        self.wait()
        future: Any = torch.futures.Future()
        future.set_result(self._results)
        return future


class _Delayed(_ProcessGroup):
    """Its methods are those that torch looks for in a group written in Python."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, name: str) -> None:
        super().__init__(rank, size)
        self.latency, self.bandwidth = 0.0, math.inf
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._link_free = 0.0
        _torch.name_group(self, self._gloo, name)

    def getBackendName(self) -> str:
        return BACKEND

    def _start(self, call: Callable[..., Any], results: Any, sizes: Any, *arguments: Any) -> _Work:
        wire = sum(x.numel() * x.element_size() for x in sizes) / self.bandwidth
        self._link_free = max(time.perf_counter(), self._link_free) + wire
        ready = self._link_free + self.latency
        works = call(*arguments)
        return _Work(works if isinstance(works, list) else [works], ready, results)

    def allreduce(self, tensors: list[Tensor], opts: Any) -> _Work:
        return self._start(self._gloo.allreduce, tensors, tensors, tensors, opts)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any) -> _Work:
        return self._start(self._gloo.allreduce_coalesced, tensors, tensors, tensors, opts)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> _Work:
        return self._start(self._gloo.broadcast, tensors, tensors, tensors, opts)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> _Work:
        return self._start(self._gloo.allgather, outputs, [x for each in outputs for x in each], outputs, inputs, opts)

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> _Work:
        return self._start(_each(self._gloo._allgather_base, opts), outputs, outputs, outputs, inputs)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any) -> _Work:
        return self.all_gather_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> _Work:
        return self._start(_each(self._gloo._reduce_scatter_base, opts), outputs, inputs, outputs, inputs)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any) -> _Work:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def all_to_all_single(
        self, output: Tensor, input: Tensor, received: list[int], sent: list[int], opts: Any
    ) -> _Work:
        larger = [max(output, input, key=torch.numel)]
        return self._start(self._gloo.alltoall_base, [output], larger, output, input, received, sent, opts)

    def barrier(self, opts: Any) -> _Work:
        return self._start(self._gloo.barrier, [], [], opts)
