"""Tables of one process whose gradients are rows: a step costs what it touches, however large the table is.

    turbogr.row_gradients(model)                       # every nn.Embedding, or those that are named
    rows = turbogr.RowWiseAdagrad(model, lr=0.02)      # as for sharded tables
    dense = torch.optim.AdamW(model.parameters())      # skips tables: their weights get no gradient

The gradient of an `nn.Embedding` is as large as its table: filling it with zeros, searching it for rows and keeping it
cost as much as the table is large. Here gradients of rows wait in the journal of a table with one shard (table.py);
weight, values and checkpoints stay what they were.

A lookup is one op, and right wherever a model runs. Compilers that can do better see a table (`own_table`), in which
embeddings are ordinary ones (expand-lookups), and afterwards no gradient of it (row-gradients).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...errors import OptionError, TurbogrError, did_you_mean
from ...kernels.contract import INT64, REAL, Array, Contract, Range, Whole
from ...kernels.declare import declare
from .halves import KeptHalf
from .layout import Layout
from .placements import RowWise
from .plan import tied, unsuited
from .table import SLOTS, Table, table_of
from .values import Init, Values, normal

ops = torch.ops.turbogr


class OwnEmbedding(nn.Embedding):
    """An `nn.Embedding` whose weight gets no gradient from lookups: those of the rows wait in the table's journal."""

    def __init__(self, name: str, old: nn.Embedding, values: Values) -> None:
        layout = Layout(old.num_embeddings, old.embedding_dim, 1, RowWise())
        weight = old.weight
        if weight.is_meta:
            weight = nn.Parameter(values.shard(name, old, layout, 0), requires_grad=weight.requires_grad)
        super().__init__(old.num_embeddings, old.embedding_dim, old.padding_idx, _weight=weight)
        self.weight = weight
        self.table = Table(name, layout, None, None, padding=-1 if old.padding_idx is None else old.padding_idx)
        self.number, self.table.home = self.table.number, weakref.ref(self)
        self.mesh = None
        self.receipts = torch.zeros(SLOTS + 1, device=weight.device).requires_grad_()
        self.train(old.training)

    @property
    def name(self) -> str:
        return self.table.name

    @property
    def trained(self) -> bool:
        """As its weight is, which may be frozen and thawed at any time."""
        return self.weight.requires_grad

    def halves(self) -> Tensor:
        """Its rows in FP16: a copy that stays, and is up to date inside of a step."""
        kept = self.table.half
        if kept is None or kept.copy.half.device != self.weight.device:
            kept = self.table.half = KeptHalf(self.weight.detach())
        return kept.copy.half

    @property
    def shard(self) -> Tensor:
        """What row optimizers write to: all of it, without a gradient."""
        if self.weight.grad is not None:
            raise TurbogrError(
                f"the weight of table {self.name!r} has a gradient of its own, beside those of looked-up rows: look "
                "all rows up, or leave the table out of row_gradients()"
            )
        return self.weight.detach()

    def forward(self, input: Tensor) -> Tensor:
        if not self.weight.requires_grad:
            return super().forward(input)
        return ops.own_lookup(self.weight, self.receipts, input, self.number)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, gradients of rows"

    def _apply(self, fn: Any, recurse: bool = True) -> OwnEmbedding:
        super()._apply(fn, recurse)
        if self.receipts.device != self.weight.device:
            self.receipts.data = self.receipts.data.to(self.weight.device)
        return self

    def __getstate__(self) -> dict[str, Any]:
        raise TurbogrError(
            f"table {self.name!r} cannot be pickled or copied: its journal belongs to one model; copy the model before "
            "row_gradients(), or save state_dict()"
        )


def row_gradients(
    model: nn.Module, tables: Iterable[str] | None = None, *,
    init: Init = normal, seed: int = 0, device: torch.device | str | None = None,
) -> nn.Module:  # fmt: skip
    """Let tables have gradients of rows, in place: all `nn.Embedding` that can, or those named. Returns the model.

    For one process; tables of several are spread with `shard`, which does the same. No table is copied. Tables on
    `meta` are drawn by `init(rows, generator)`, to the values that `shard` draws for any number of ranks.
    """
    if dist.is_initialized() and (ranks := dist.get_world_size()) > 1:
        raise OptionError(
            f"row_gradients() is for one process, and there are {ranks}, which would train their tables apart: use "
            "shard(model, plan(model))"
        )
    found = {name: m for name, m in model.named_modules() if isinstance(m, nn.Embedding)}
    values = Values(init, seed, device)
    for name in [*found] if tables is None else list(tables):
        if name not in found:
            known = ", ".join(found) or "none"
            raise OptionError(f"the model has no table {name!r}{did_you_mean(name, found)}: it has {known}")
        reason = unsuited(found[name]) or tied(model, name)
        if reason and tables is not None:
            raise OptionError(f"table {name!r} cannot have gradients of rows: {reason}")
        if not reason:
            owner, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(owner), attribute, OwnEmbedding(name, found[name], values))
    return model


# --- ops ---------------------------------------------------------------------------------------------


def own_lookup(weight: Tensor, receipts: Tensor, ids: Tensor, table: int) -> Tensor:
    """Rows by id; their gradients go into the table's journal."""
    return weight.index_select(0, ids.reshape(-1)).view(*ids.shape, weight.shape[1])


def _lookup_fake(weight: Tensor, receipts: Tensor, ids: Tensor, table: int) -> Tensor:
    return weight.new_empty((*ids.shape, weight.shape[1]))


def _lookup_save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, _, ids, ctx.table = inputs
    ctx.save_for_backward(ids)


def _lookup_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    (ids,) = ctx.saved_tensors
    return None, ops.own_keep(grad, ids, ctx.table), None, None


def own_keep(grad: Tensor, ids: Tensor, table: int) -> Tensor:
    """Put gradients of looked-up rows into the table's journal, each row once: memory is that of different rows."""
    rows, values = ops.coalesce_rows(grad.reshape(ids.numel(), grad.shape[-1]), ids.reshape(-1).long())
    return table_of(table).put(rows, values)


def _receipt_fake(grad: Tensor, *rest: Any) -> Tensor:
    return grad.new_empty(SLOTS + 1, dtype=torch.float32)


def own_table(weight: Tensor, receipts: Tensor, table: int) -> Tensor:
    """The weight as a value that has a gradient. Graphs in which this op is left copy it, which is right and slow."""
    return weight.clone()


def _table_fake(weight: Tensor, receipts: Tensor, table: int) -> Tensor:
    return torch.empty_like(weight)


def _table_save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.table = inputs[2]


def _table_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return None, ops.own_keep_dense(grad, ctx.table), None


def own_keep_dense(grad: Tensor, table: int) -> Tensor:
    """Put those rows into the journal that have a gradient, of one that is as large as the table."""
    rows = (grad != 0).any(1).nonzero().squeeze(1)
    return table_of(table).put(rows, grad.index_select(0, rows))


def own_keep_scores(
    slopes: Tensor, own_slopes: Tensor | None, query: Tensor, shard: Tensor, ids: Tensor, own_ids: Tensor | None,
    group: int, eps: float, table: int,
) -> Tensor:  # fmt: skip
    """What `lookup_table_gradient` computes, of the rows that are named, into the journal."""
    parts = [ids.reshape(-1)] + ([own_ids] if own_ids is not None else [])
    rows, places = torch.cat(parts).unique(return_inverse=True)
    at, own_at = places.split([ids.numel(), places.numel() - ids.numel()])
    named = shard.index_select(0, rows) if eps >= 0 else shard.new_empty((len(rows), shard.shape[1]))
    given = (slopes, own_slopes, query, named, at.view_as(ids), None if own_ids is None else own_at)
    return table_of(table).put(rows, ops.lookup_table_gradient(*given, group, eps))


IDS = (torch.int64, torch.int32)

declare(
    "own_lookup(Tensor weight, Tensor receipts, Tensor ids, int table) -> Tensor",
    Contract(weight=Array("R D"), receipts=Array("...", None), ids=Array("...I", IDS, Range("R"))),
    reference=own_lookup,
    fake=_lookup_fake,
    backward=_lookup_backward,
    save=_lookup_save,
)
declare(
    "own_keep(Tensor grad, Tensor ids, int table) -> Tensor",
    Contract(grad=Array("...I D"), ids=Array("...I", IDS)),
    reference=own_keep,
    fake=_receipt_fake,
)
declare(
    "own_table(Tensor weight, Tensor receipts, int table) -> Tensor",
    Contract(weight=Array("R D"), receipts=Array("...", None)),
    reference=own_table,
    fake=_table_fake,
    backward=_table_backward,
    save=_table_save,
)
declare(
    "own_keep_dense(Tensor grad, int table) -> Tensor",
    Contract(grad=Array("R D")),
    reference=own_keep_dense,
    fake=_receipt_fake,
)
declare(
    "own_keep_scores(Tensor slopes, Tensor? own_slopes, Tensor query, Tensor shard, Tensor ids, Tensor? own_ids, "
    "int group, float eps, int table) -> Tensor",
    Contract(
        query=Array("T D"),
        shard=Array("R D"),
        ids=Array("T K", INT64, Range("R")),
        group=Whole(1),
        slopes=Array("T*K group", REAL),
        own_slopes=Array("T", REAL),
        own_ids=Array("T", INT64, Range("R")),
    ),
    reference=own_keep_scores,
    fake=_receipt_fake,
)
