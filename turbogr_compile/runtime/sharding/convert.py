"""`shard`: put sharded tables in the place of the embeddings of a model."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ... import _torch
from ...errors import TurbogrError
from ..selftest import check_collectives
from .embedding import ShardedEmbedding
from .mesh import Ranks
from .placements import Hierarchical, Placement, Replicated
from .plan import Plan, Planned, tied, unsuited
from .table import Table
from .values import Init, Values, normal


def shard(
    model: nn.Module, plan: Plan, *, init: Init = normal, seed: int = 0, device: torch.device | str | None = None
) -> nn.Module:
    """Replace each table that the plan spreads by a `ShardedEmbedding`, in place; returns the model.

    Values are those of the tables as they are. Tables on `meta` are drawn by `init(rows, generator)`, shard by shard:
    the whole table is never there. All ranks call this, with the same plan.
    """
    spread = {name: t for name, t in plan.tables.items() if not isinstance(t.placement, Replicated)}
    modules = dict(model.named_modules())
    same_plan(plan)  # before anything that could raise on one rank only, and before any other exchange
    for name in spread:
        _check(model, name, modules.get(name), spread[name])
    groups = _Groups(plan.ranks)
    _check_collectives(modules, spread, groups, device)
    for name, t in spread.items():
        old = modules[name]
        assert isinstance(old, nn.Embedding)
        new = _sharded(name, old, t, plan, groups, Values(init, seed, device))
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, new)
    _keep_from_ddp(model)
    return model


def same_plan(plan: Plan) -> None:
    """All ranks say which plan they have; raises where they differ, instead of waiting for each other for ever."""
    found: list[Any] = [None] * plan.ranks.count
    dist.all_gather_object(found, plan.digest, group=plan.ranks.everyone)
    others = [rank for rank, digest in enumerate(found) if digest != plan.digest]
    if others:
        raise TurbogrError(
            f"ranks have different plans: rank {plan.ranks.rank} differs from {others[:8]}. Here it is\n{plan.spec}"
        )


def _check(model: nn.Module, name: str, module: Any, planned: Planned) -> None:
    reason = f"the model has no module {name!r}" if module is None else unsuited(module)
    if not reason and (module.num_embeddings, module.embedding_dim) != (planned.rows, planned.width):
        reason = "it has another size than in the plan"
    if not reason:
        reason = tied(model, name)
    if reason:
        raise TurbogrError(f"table {name!r} cannot be sharded: {reason}. Or leave it Replicated in the plan")


def _check_collectives(
    modules: dict[str, nn.Module], spread: dict[str, Planned], groups: _Groups, device: torch.device | str | None
) -> None:
    """Of the groups and dtypes in which rows will travel."""
    for name, t in spread.items():
        weight = modules[name].weight
        assert isinstance(weight, Tensor)
        place = device or ("cpu" if weight.is_meta else weight.device)
        for group in filter(None, (groups.of(t.placement), groups.replicas(t.placement))):
            check_collectives(group, {weight.dtype, wire_of(t.placement) or weight.dtype}, place)


class _Groups:
    """Groups and meshes for tables, made once each; all ranks make them in the same order."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self._ahead: dict[bool, Any] = {}
        self._meshes: dict[bool, Any] = {}

    def of(self, placement: Placement) -> Any:
        return self.ranks.inner if isinstance(placement, Hierarchical) else self.ranks.everyone

    def replicas(self, placement: Placement) -> Any:
        return self.ranks.outer if isinstance(placement, Hierarchical) and self.ranks.nodes > 1 else None

    def ahead(self, placement: Placement) -> Any:
        """Exchanges beside the step must not come in between those of the step."""
        inside = isinstance(placement, Hierarchical)
        if inside not in self._ahead:
            groups = dist.get_process_group_ranks(self.of(placement))
            # A group made without a timeout has half an hour, whatever that of the job is.
            timeout = _torch.group_timeout(self.of(placement))
            self._ahead[inside] = dist.new_group(groups, timeout=timeout, use_local_synchronization=True)
        return self._ahead[inside]

    def mesh(self, placement: Placement, device: torch.device) -> Any:
        """For DTensors of a checkpoint."""
        from torch.distributed.device_mesh import DeviceMesh

        inside = isinstance(placement, Hierarchical)
        if inside:
            return self.ranks.mesh
        if False not in self._meshes:
            self._meshes[False] = DeviceMesh.from_group(self.ranks.everyone, device.type)
        return self._meshes[False]


def wire_of(placement: Placement) -> torch.dtype | None:
    """In which rows travel; None for their own."""
    named = getattr(placement, "wire", "")
    return getattr(torch, named) if named else None


def _sharded(
    name: str, old: nn.Embedding, planned: Planned, plan: Plan, groups: _Groups, source: Values
) -> ShardedEmbedding:
    placement = planned.placement
    layout, group = planned.layout(plan.ranks), groups.of(placement)
    rank, replicas = dist.get_rank(group), groups.replicas(placement)
    rows = source.shard(name, old, layout, rank)
    if replicas is not None:  # replicas stay equal, if they begin so
        dist.broadcast(rows, group_src=0, group=replicas)
    table = Table(
        name, layout, group, groups.ahead(placement), replicas,
        scale=1.0 / plan.ranks.count if plan.mean else 1.0,
        wire=wire_of(placement),
        padding=-1 if old.padding_idx is None else dict(layout.owner(old.padding_idx)).get(rank, -1),
    )  # fmt: skip
    new = ShardedEmbedding(rows, table, groups.mesh(placement, rows.device), old.padding_idx)
    new.receipts.requires_grad_(old.weight.requires_grad)
    return new.train(old.training)


def _keep_from_ddp(model: nn.Module) -> None:
    """DDP copies buffers of rank 0 to all others; shards are none of that."""
    names = [f"{n}.shard" for n, m in model.named_modules() if isinstance(m, ShardedEmbedding)]
    known = set(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
    vars(model)["_ddp_params_and_buffers_to_ignore"] = sorted(known | set(names))
