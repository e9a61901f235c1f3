"""What surrounds attention: the token-wise part of a block, and turbogr's row kernels one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jagged
import torch
import torch.nn.functional as F
from jagged import Batch
from plan import OURS, Group, Settings, Table, Way, both_parts, by_turns
from torch import Tensor, nn

PLAIN = "aten"


# --- token-wise block --------------------------------------------------------------------------------


class Block(nn.Module):
    """An HSTU block without its attention; a product and a sum stand in for it, so that every part is used."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.out_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.uvqk, self.out = nn.Linear(dim, 4 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        u, v, q, k = F.silu(self.uvqk(self.norm(x))).chunk(4, dim=-1)
        return x + self.out(self.out_norm(v + q * k) * u)

    def by_kernels(self, x: Tensor) -> Tensor:
        u, v, q, k = jagged.silu_split(self.uvqk(self.norm(x)))
        return x + self.out(jagged.norm_gate(v + q * k, self.out_norm, u))


def block_groups(settings: Settings) -> Iterator[Group]:
    full = [(16, 1024, 512), (64, 256, 256)] if settings.malloc == "tuned" else [(16, 1024, 512)]
    for sequences, longest, dim in settings.pick(full, [(16, 256, 128)], [(3, 16, 8)]):
        torch._dynamo.reset()
        yield from _block(Batch.heavy_tailed(sequences, longest), dim)


def _block(batch: Batch, dim: int) -> Iterator[Group]:
    torch.manual_seed(0)
    block = Block(dim)
    packed, grad = torch.randn(batch.rows, dim).requires_grad_(), torch.randn(batch.rows, dim)
    padded = batch.padded(packed.detach()).requires_grad_()
    weights = tuple(block.parameters())

    def on_packed(run) -> Way:
        return Way(lambda x, *_: run(x), (packed, *weights), grad)

    def on_padded(run) -> Way:
        return Way(lambda x, *_: run(x), (padded, *weights), batch.padded(grad))

    def comparable(x: Tensor) -> Tensor:
        return batch.packed(x) if x.dim() == 3 else x

    ways = {
        "padded eager": on_padded(block),
        "padded Inductor": on_padded(torch.compile(block, dynamic=False)),
        "packed eager": on_packed(block),
        "packed Inductor": on_packed(torch.compile(block, dynamic=False)),
        OURS: on_packed(block.by_kernels),
    }
    flops = 2 * batch.rows * 5 * dim**2
    facts = {"rows": batch.rows, "padded FLOPs / jagged FLOPs": round(1 / batch.fill, 2)}
    yield from both_parts(f"B{batch.sequences} N{batch.longest} D{dim}", ways, flops, facts, comparable)


# --- row kernels -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RowOp:
    """A kernel, what torch has for it, and what both are called with."""

    name: str
    plain: Callable[..., Any]
    ours: Callable[..., Any]
    inputs: tuple[Tensor, ...]
    flops: float | None = None


def row_groups(settings: Settings) -> Iterator[Group]:
    sequences, longest, dim, items = settings.pick(
        (16, 1024, 256, 10_000), (16, 256, 128, 5_000), (3, 16, 8, 20)
    )  # fmt: skip
    batch = Batch.heavy_tailed(sequences, longest)
    for op in row_ops(batch, dim, items):
        torch._dynamo.reset()
        size = f"{batch.rows} x {dim}" + (f" x {items}" if op.flops else "")
        yield from both_parts(f"{op.name} {size}", _ways(op), op.flops, {})


def _ways(op: RowOp) -> dict[str, Way]:
    runs = {PLAIN: op.plain, "Inductor": torch.compile(op.plain, dynamic=False), OURS: op.ours}
    grads = [torch.randn_like(x) for x in _tuple(op.plain(*op.inputs))]
    return {name: Way(run, op.inputs, grads) for name, run in runs.items()}


def row_ops(batch: Batch, dim: int, items: int) -> Iterator[RowOp]:
    torch.manual_seed(0)
    turbogr = torch.ops.turbogr
    places = batch.valid.flatten().nonzero().flatten()
    count = batch.valid.numel()
    ids, targets = torch.randint(0, items, (2, batch.rows))
    norm = nn.LayerNorm(dim)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape).requires_grad_()

    padded, packed, table = random(count, dim), random(batch.rows, dim), random(items, dim)
    yield RowOp(
        "gather_rows",
        lambda x: x.index_select(0, places),
        lambda x: turbogr.gather_rows(x, places),
        (padded,),
    )
    yield RowOp(
        "scatter_rows",
        lambda x: x.new_zeros(count, dim).index_add(0, places, x),
        lambda x: turbogr.scatter_rows(x, places, count),
        (packed,),
    )
    yield RowOp("embedding", lambda t: F.embedding(ids, t), lambda t: jagged.lookup(t, ids), (table,))
    yield RowOp(
        "silu_split", lambda x: F.silu(x).chunk(4, dim=-1), jagged.silu_split, (random(batch.rows, 4 * dim),)
    )  # fmt: skip
    yield RowOp(
        "norm_gate",
        lambda x, gate: norm(x) * gate,
        lambda x, gate: jagged.norm_gate(x, norm, gate),
        (packed, random(batch.rows, dim)),
    )
    yield RowOp(
        "linear_cross_entropy",
        lambda x, weight: F.cross_entropy(F.linear(x, weight), targets),
        lambda x, weight: turbogr.linear_cross_entropy_total(x, weight, None, targets, None, 1.0, -100, 0.0, True),
        (packed, table),
        2 * batch.rows * items * dim,
    )


def _tuple(x: Any) -> tuple[Tensor, ...]:
    return (x,) if isinstance(x, Tensor) else tuple(x)


TABLES = (
    Table(
        "block",
        "Token-wise block: norm, D to 4D, SiLU, norm, gate, D to D",
        OURS,
        ("padded Inductor", "padded eager", "packed eager"),
        by_turns(block_groups),
        "turbogr: packed rows, silu_split and norm_gate by kernels, products by torch.",
    ),
    Table(
        "rows",
        "Row kernels",
        OURS,
        (PLAIN, "Inductor"),
        by_turns(row_groups),
        "Sizes are of what is packed: rows x width, and classes.",
        once="tuned",
    ),
)
