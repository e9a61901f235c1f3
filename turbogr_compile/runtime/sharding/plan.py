"""`plan`: a placement for every table, given by hand or chosen by size."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ... import _torch
from ...errors import OptionError, did_you_mean
from .layout import Layout
from .mesh import Ranks, ranks_of
from .placements import ColumnWise, Hierarchical, Placement, Replicated, RowWise, TableWise

MIB = 2**20


@dataclass(frozen=True)
class Planned:
    """One table of a plan."""

    placement: Placement
    rows: int
    width: int
    itemsize: int
    reason: str

    @property
    def bytes(self) -> int:
        return self.rows * self.width * self.itemsize

    def layout(self, ranks: Ranks) -> Layout:
        hierarchical = isinstance(self.placement, Hierarchical)
        return Layout(self.rows, self.width, ranks.per_node if hierarchical else ranks.count, self.placement)

    def bytes_on(self, ranks: Ranks, rank: int) -> int:
        """What a rank holds of it."""
        if isinstance(self.placement, Replicated):
            return self.bytes
        layout = self.layout(ranks)
        return layout.held(rank % layout.ranks) * layout.piece * self.itemsize


@dataclass(frozen=True)
class Plan:
    """Where each table goes. Equal on all ranks, which `shard` makes sure of."""

    tables: Mapping[str, Planned]
    ranks: Ranks = field(repr=False)
    mean: bool = True  # losses are means over a rank's own batch: gradients are averaged over ranks, else summed

    @property
    def spec(self) -> str:
        """Text form, the same on every rank."""
        lines = [f"{self.ranks.text}, gradients {'averaged' if self.mean else 'summed'}"]
        lines += [f"{n}: {t.rows} x {t.width} x {t.itemsize} {t.placement.spec}" for n, t in self.tables.items()]
        return "\n".join(lines)

    @property
    def digest(self) -> int:
        return int.from_bytes(hashlib.blake2b(self.spec.encode(), digest_size=7).digest(), "little")

    def explain(self) -> str:
        """The plan as a table, with reasons."""
        rank = self.ranks.rank
        here = sum(t.bytes_on(self.ranks, rank) for t in self.tables.values())
        lines = [f"{self.ranks.text}; {here / MIB:.1f} MiB of tables on rank {rank}"]
        for name, t in self.tables.items():
            size = f"{t.rows} x {t.width}, {t.bytes / MIB:.1f} MiB"
            lines.append(f"  {name}: {size} -> {t.placement.spec}: {t.reason}")
        return "\n".join(lines)

    __str__ = explain


def plan(
    model: nn.Module,
    mesh: Any = None,
    tables: Mapping[str, Placement] | None = None,
    *,
    small: int = 4 * MIB,
    memory: int | None = None,
    mean: bool = True,
) -> Plan:
    """A placement for every `nn.Embedding` of a model: those of `tables`, and for the others one chosen by size.

    Tables of up to `small` bytes are replicated, larger ones spread over rows: on a two-dim mesh inside of each node,
    as long as they fit. `memory` is what a rank has for tables, in bytes; optimizers need as much again, or more.
    """
    ranks, given = ranks_of(mesh), dict(tables or {})
    found = {name: m for name, m in model.named_modules() if isinstance(m, nn.Embedding)}
    for name, placement in given.items():
        bag = name in dict(model.named_modules()) and unsuited(model.get_submodule(name))
        if name not in found and bag:
            raise OptionError(f"{name!r} cannot be sharded: it is {bag}")
        if name not in found:
            raise OptionError(f"the model has no table {name!r}{did_you_mean(name, found)}: it has {_listed(found)}")
        _check(name, placement, ranks)
    planned = {name: _planned(m, given.get(name), ranks, small) for name, m in found.items()}
    return Plan(_within(planned, given, ranks, memory), ranks, mean)


def _check(name: str, placement: Placement, ranks: Ranks) -> None:
    if not isinstance(placement, Placement):
        kinds = ", ".join(k.__name__ for k in (RowWise, ColumnWise, TableWise, Hierarchical, Replicated))
        raise OptionError(f"the placement of table {name!r} is {placement!r}; placements are {kinds}")
    if isinstance(placement, Hierarchical) and ranks.inner is None:
        raise OptionError(
            f"table {name!r} is to be Hierarchical, and the plan is for {ranks.text}: give it a two-dim mesh, "
            'init_device_mesh(device, (nodes, ranks_per_node), mesh_dim_names=("node", "rank"))'
        )


def _planned(module: nn.Embedding, given: Placement | None, ranks: Ranks, small: int) -> Planned:
    rows, width, itemsize = module.num_embeddings, module.embedding_dim, module.weight.element_size()
    obstacle = "" if given is not None else unsuited(module)
    if given is not None:
        chosen, reason = given, "as given"
    elif obstacle:
        chosen, reason = Replicated(), f"cannot be sharded: {obstacle}"
    elif rows * width * itemsize <= small:
        chosen, reason = Replicated(), f"at most {small / MIB:g} MiB: its gradient is averaged with the dense ones"
    elif ranks.inner is not None:
        chosen, reason = Hierarchical(), "large: rows over a node, replicas across nodes"
    else:
        chosen, reason = RowWise(), "large: rows over all ranks"
    return Planned(chosen, rows, width, itemsize, reason)


def _within(
    planned: dict[str, Planned], given: Mapping[str, Placement], ranks: Ranks, memory: int | None
) -> dict[str, Planned]:
    """The largest tables give up their replicas first where memory does not suffice."""
    if memory is None:
        return planned
    movable = [n for n, t in planned.items() if n not in given and isinstance(t.placement, Hierarchical)]
    for name in sorted(movable, key=lambda n: -planned[n].bytes):
        if _most(planned, ranks) <= memory:
            break
        old = planned[name]
        reason = "rows over all ranks: a replica per node does not fit into memory"
        planned[name] = Planned(RowWise(), old.rows, old.width, old.itemsize, reason)
    if _most(planned, ranks) > memory:
        raise OptionError(
            f"tables need {_most(planned, ranks) / MIB:.1f} MiB on a rank, and memory is {memory / MIB:.1f} MiB:\n"
            f"{Plan(planned, ranks).explain()}\n  use more ranks, or RowWise for what is replicated"
        )
    return planned


def _most(planned: Mapping[str, Planned], ranks: Ranks) -> int:
    return max(sum(t.bytes_on(ranks, rank) for t in planned.values()) for rank in range(ranks.count))


def unsuited(module: nn.Module) -> str:
    """Why a module cannot be sharded; '' when it can, as far as the module knows."""
    if isinstance(module, nn.EmbeddingBag):
        return "an EmbeddingBag: look rows up with nn.Embedding and sum them"
    if not isinstance(module, nn.Embedding):
        return f"a {type(module).__name__}, not an nn.Embedding"
    if type(module) is not nn.Embedding:
        return f"{type(module).__name__} has a forward of its own: make it hold an nn.Embedding instead"
    if module.max_norm is not None:
        return "max_norm writes to the table in every lookup: clip after the lookup instead"
    if module.scale_grad_by_freq:
        return "scale_grad_by_freq counts ids of one process only: set it to False"
    if _torch.has_hooks(module) or _torch.has_hooks(module.weight):
        return "hooks are called for it, and would not be for what takes its place: put them around it"
    return ""


def tied(model: nn.Module, name: str) -> str:
    """Where else the weight of a table is; '' for nowhere."""
    weight = model.get_submodule(name).weight
    names = [n for n, p in model.named_parameters(remove_duplicate=False) if p is weight]
    others = [n for n in names if n != f"{name}.weight"]
    return f"its weight is also {', '.join(others)}: a tied table must be whole" if others else ""


def _listed(names: Mapping[str, Any]) -> str:
    return ", ".join(names) or "none"
