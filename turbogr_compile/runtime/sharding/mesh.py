"""The ranks that a plan is for: one group, or a mesh of nodes and ranks per node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ...errors import OptionError, TurbogrError


@dataclass(frozen=True)
class Ranks:
    """Groups by the part they play; `inner` and `outer` are None without a two-dim mesh."""

    everyone: Any
    inner: Any = None  # the ranks of this node
    outer: Any = None  # the ranks of the other nodes that have this one's place
    mesh: DeviceMesh | None = None

    @property
    def count(self) -> int:
        return dist.get_world_size(self.everyone)

    @property
    def rank(self) -> int:
        return dist.get_rank(self.everyone)

    @property
    def nodes(self) -> int:
        return dist.get_world_size(self.outer) if self.outer is not None else 1

    @property
    def per_node(self) -> int:
        return dist.get_world_size(self.inner) if self.inner is not None else self.count

    @property
    def text(self) -> str:
        return f"{self.nodes} nodes x {self.per_node} ranks" if self.inner is not None else f"{self.count} ranks"


def ranks_of(where: Any = None) -> Ranks:
    """Of a DeviceMesh, a process group, or all ranks for None."""
    if not dist.is_initialized():
        raise TurbogrError(
            "sharding needs a process group: torch.distributed.init_process_group() first, and start with torchrun"
        )
    if where is None or isinstance(where, dist.ProcessGroup):
        return Ranks(where or dist.group.WORLD)
    if not isinstance(where, DeviceMesh):
        raise OptionError(f"a plan is for a DeviceMesh or a process group, not for {type(where).__name__}")
    if where.ndim == 1:
        return Ranks(where.get_group(0), mesh=where)
    if where.ndim != 2:
        raise OptionError(f"a mesh has one dim, or two (nodes, ranks of a node); this one has {where.ndim}")
    if where.mesh.flatten().tolist() != list(range(dist.get_world_size())):
        raise OptionError("a two-dim mesh holds all ranks in order: init_device_mesh(device, (nodes, ranks per node))")
    return Ranks(dist.group.WORLD, where.get_group(1), where.get_group(0), where)
