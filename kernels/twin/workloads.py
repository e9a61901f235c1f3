"""Launches to project: each op, forward and backward, on a jagged batch with a heavy tail."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .cost import SOCS, Projection, Soc, project
from .dispatch import device
from .launch import Report, reports

ops = torch.ops.turbogr


@dataclass(frozen=True)
class Batch:
    """Sequences whose lengths are log-normal, cut at `longest`, and fill so much of the padded batch."""

    sequences: int = 32
    longest: int = 1024
    fill: float = 0.3
    heads: int = 4
    head_dim: int = 64
    dtype: torch.dtype = torch.float16
    seed: int = 0

    @property
    def lengths(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        shape = torch.randn(self.sequences, generator=generator).exp()
        low, high = 0.0, 1e3 * self.longest
        for _ in range(60):  # the factor that fills the batch as asked, found by halving: cutting makes it no formula
            middle = (low + high) / 2
            if float((shape * middle).clamp(1, self.longest).mean()) < self.fill * self.longest:
                low = middle
            else:
                high = middle
        return (shape * low).clamp(1, self.longest).long()

    @property
    def offsets(self) -> Tensor:
        return torch.cat([torch.zeros(1, dtype=torch.int64), self.lengths.cumsum(0)])

    @property
    def columns(self) -> Tensor:
        return torch.cat([torch.arange(int(n)) for n in self.lengths])

    @property
    def rows(self) -> int:
        return int(self.lengths.sum())

    @property
    def width(self) -> int:
        return self.heads * self.head_dim

    def normal(self, *shape: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed + len(shape))
        return torch.randn(*shape, generator=generator).to(self.dtype).requires_grad_()

    @property
    def pairs(self) -> int:
        """Of a query and a key it sees."""
        return int((self.lengths * (self.lengths + 1) // 2).sum())


def _attention(activation: str) -> Callable[[Batch], None]:
    def run(batch: Batch) -> None:
        q, k, v = (batch.normal(batch.rows, batch.heads, batch.head_dim) for _ in range(3))
        post = 1.0 / batch.longest if activation == "silu" else 1.0
        rows = (batch.offsets, batch.offsets, batch.columns, batch.columns)
        masks = (None,) * 9
        attributes = (activation, 1.0 / math.sqrt(batch.head_dim), post, 0, batch.longest, 0.0)
        result, _ = ops.jagged_attention(q, k, v, *rows, *masks, *attributes)
        result.backward(torch.ones_like(result))

    return run


def _norm_gate(batch: Batch) -> None:
    x, gate = batch.normal(batch.rows, batch.width), batch.normal(batch.rows, batch.width)
    weight, bias = batch.normal(batch.width), batch.normal(batch.width)
    ops.norm_gate(x, gate, weight, bias, 1e-6)[0].sum().backward()


def _rows(batch: Batch) -> None:
    padded = batch.normal(batch.sequences * batch.longest, batch.width)
    first = torch.arange(batch.sequences).repeat_interleave(batch.lengths) * batch.longest
    ops.gather_rows(padded, first + batch.columns).sum().backward()


ITEMS = 20_000


def _embedding(batch: Batch) -> None:
    table = batch.normal(ITEMS, batch.width)
    ids = torch.randint(0, ITEMS, (batch.rows,), generator=torch.Generator().manual_seed(batch.seed))
    ops.embedding(table, ids, -1).sum().backward()


NEGATIVES = 1024


def _sampled_softmax(batch: Batch) -> None:
    query, positive = batch.normal(batch.rows, batch.head_dim), batch.normal(batch.rows, batch.head_dim)
    negative = batch.normal(NEGATIVES, batch.head_dim)
    bounds = torch.tensor([0, batch.rows]), torch.tensor([0, NEGATIVES])
    ops.sampled_softmax(query, positive, negative, *bounds, None, None, None, 1.0)[0].sum().backward()


def _attention_flops(batch: Batch) -> float:
    return 4.0 * batch.pairs * batch.heads * batch.head_dim


def _sampled_flops(batch: Batch) -> float:
    return 2.0 * batch.rows * (NEGATIVES + 1) * batch.head_dim


def _no_flops(batch: Batch) -> float:
    return 0.0


# What runs, and the FLOPs of its forward; a backward needs twice those.
WORKLOADS: dict[str, tuple[Callable[[Batch], None], Callable[[Batch], float]]] = {
    "attention-silu": (_attention("silu"), _attention_flops),
    "attention-softmax": (_attention("softmax"), _attention_flops),
    "norm-gate": (_norm_gate, _no_flops),
    "rows": (_rows, _no_flops),
    "embedding": (_embedding, _no_flops),
    "sampled-softmax": (_sampled_softmax, _sampled_flops),
}


def projections(names: list[str], batch: Batch, socs: list[str]) -> Iterator[tuple[str, Projection]]:
    """Each workload runs once for each number of vector cores; devices that have as many share the run."""
    for name in names:
        run, flops = WORKLOADS[name]
        seen: dict[int, list[Report]] = {}
        for soc in (SOCS[s] for s in socs):
            if soc.vectors not in seen:
                with reports() as found, device(cores=soc.vectors):
                    run(batch)
                seen[soc.vectors] = found
            for report in seen[soc.vectors]:
                yield name, _projected(report, soc, flops(batch))


def _projected(report: Report, soc: Soc, flops: float) -> Projection:
    return project(report, soc, flops * (2 if report.op.endswith("_backward") else 1))


def facts(batch: Batch) -> dict[str, Any]:
    return {
        "sequences": batch.sequences,
        "longest": batch.longest,
        "fill": batch.rows / (batch.sequences * batch.longest),
        "rows": batch.rows,
        "heads": batch.heads,
        "head_dim": batch.head_dim,
        "dtype": str(batch.dtype).removeprefix("torch."),
    }
