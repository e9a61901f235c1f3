"""Causal attention on a heavy-tailed batch: HSTU's SiLU, with and without relative biases, and softmax."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jagged import Batch, Biases, attend, silu_loop, softmax_loop
from plan import FORWARD, OURS, Group, Settings, Table, Way, both_parts, by_turns
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

META_FILE = Path("generative_recommenders/ops/pytorch/pt_hstu_attention.py")
META = "Meta's reference"
TIME_BUCKETS = 128


@dataclass(frozen=True)
class Shape:
    sequences: int
    longest: int
    heads: int
    width: int

    def __str__(self) -> str:
        return f"B{self.sequences} N{self.longest} H{self.heads} d{self.width}"

    def facts(self, batch: Batch) -> dict[str, Any]:
        return {
            "rows": batch.rows,
            "fill": round(batch.fill, 3),
            "padded FLOPs / jagged FLOPs": round(batch.padded_pairs / batch.causal_pairs, 2),
        }

    def flops(self, batch: Batch) -> float:
        """Of the forward: two products over causal pairs."""
        return 4 * self.heads * self.width * batch.causal_pairs


SHORT, LONG = Shape(128, 256, 4, 64), Shape(16, 1024, 4, 64)
LONGER, NARROW = Shape(8, 2048, 4, 64), Shape(16, 1024, 8, 32)
QUICK, TINY = Shape(16, 256, 4, 64), Shape(3, 20, 2, 8)


def shapes(settings: Settings, *more: Shape) -> tuple[Shape, ...]:
    """One shape is enough to see what the default allocator costs; all of them would take too long."""
    full = (LONG, *more) if settings.malloc == "tuned" else (LONG,)
    return settings.pick(full, (QUICK,), (TINY,))


@dataclass(frozen=True)
class Rows:
    """Random queries, keys, values and the gradient of the result; packed, and the same ones padded."""

    batch: Batch
    packed: tuple[Tensor, ...]
    padded: tuple[Tensor, ...]
    grad: Tensor

    @staticmethod
    def random(shape: Shape, heads_first: bool = False) -> Rows:
        """Padded ones are (B, N, H, d), or (B, H, N, d) with heads first."""
        torch.manual_seed(0)
        batch = Batch.heavy_tailed(shape.sequences, shape.longest)
        drawn = [torch.randn(batch.rows, shape.heads, shape.width) for _ in range(4)]
        padded = [batch.padded(x) for x in drawn[:3]]
        padded = [x.transpose(1, 2).contiguous() for x in padded] if heads_first else padded
        return Rows(batch, _leaves(drawn[:3]), _leaves(padded), drawn[3])

    def on_packed(self, run: Callable[..., Tensor], *more: Tensor) -> Way:
        return Way(run, (*self.packed, *more), self.grad)

    def on_padded(self, run: Callable[..., Tensor], *more: Tensor, heads_first: bool = False) -> Way:
        grad = self.batch.padded(self.grad)
        return Way(run, (*self.padded, *more), grad.transpose(1, 2).contiguous() if heads_first else grad)

    def comparable(self, x: Tensor) -> Tensor:
        """As packed rows, whatever a way made of them."""
        if x.is_nested:
            return x.values()
        if x.dim() < 4:
            return x
        return self.batch.packed(x if x.shape[1] == self.batch.longest else x.transpose(1, 2))


def _leaves(tensors: list[Tensor]) -> tuple[Tensor, ...]:
    return tuple(x.clone().requires_grad_() for x in tensors)


# --- SiLU --------------------------------------------------------------------------------------------


def silu_groups(settings: Settings) -> Iterator[Group]:
    for shape in shapes(settings, SHORT, NARROW, LONGER):
        yield from _silu(shape, settings.meta)


def _silu(shape: Shape, meta: Path | None) -> Iterator[Group]:
    torch._dynamo.reset()
    rows = Rows.random(shape)
    batch, N, scale = rows.batch, rows.batch.longest, shape.width**-0.5
    causal = torch.ones(N, N).tril()

    def padded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.einsum("bnhd,bmhd->bhnm", q, k) * scale
        return torch.einsum("bhnm,bmhd->bnhd", F.silu(scores) / N * causal, v)

    ways = {
        "padded eager": rows.on_padded(padded),
        "padded Inductor": rows.on_padded(torch.compile(padded, dynamic=False)),
        "bmm loop": rows.on_packed(silu_loop(batch)),
        OURS: rows.on_packed(lambda q, k, v: attend(q, k, v, batch, "silu", scale, 1 / N)),
    }
    if meta is not None:
        run = meta_attention(meta)
        theirs = rows.on_packed(lambda q, k, v: run(N, scale, q, k, v, batch.offsets))
        ways = {META: theirs, **ways}
    yield from both_parts(str(shape), ways, shape.flops(batch), shape.facts(batch), rows.comparable)


def meta_attention(checkout: Path) -> Callable[..., Tensor]:
    """Meta's own PyTorch attention: one file of the checkout, and the fbgemm ops it calls."""
    try:
        importlib.import_module("fbgemm_gpu")
    except (ImportError, OSError) as error:
        return _cannot(f"needs the package fbgemm-gpu-cpu: {error}")
    spec = importlib.util.spec_from_file_location("pt_hstu_attention", checkout / META_FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.pytorch_hstu_mha


def _cannot(why: str) -> Callable[..., Tensor]:
    def run(*arguments: Any) -> Tensor:
        raise RuntimeError(why)

    return run


# --- SiLU with relative biases -----------------------------------------------------------------------


def biased_groups(settings: Settings) -> Iterator[Group]:
    for shape in shapes(settings):
        yield from _biased(shape)


def _biased(shape: Shape) -> Iterator[Group]:
    torch._dynamo.reset()
    rows = Rows.random(shape)
    batch, N, scale = rows.batch, rows.batch.longest, shape.width**-0.5
    causal = torch.ones(N, N).tril()
    times = batch.padded(torch.randint(1, 100_000, (batch.rows,)).cumsum(0))
    following = torch.cat([times[:, 1:], times[:, -1:]], dim=1)
    tables = _leaves([torch.randn(2 * N - 1) * 0.02, torch.randn(TIME_BUCKETS + 1) * 0.02])
    bounds, query_times, key_times = time_bounds(), batch.packed(following), batch.packed(times)

    def padded(q: Tensor, k: Tensor, v: Tensor, by_distance: Tensor, by_time: Tensor) -> Tensor:
        apart = following.unsqueeze(2) - times.unsqueeze(1)
        bias = toeplitz(by_distance, N) + by_time.index_select(0, bucket(apart).view(-1)).view(-1, N, N)
        scores = torch.einsum("bnhd,bmhd->bhnm", q, k) * scale + bias.unsqueeze(1)
        return torch.einsum("bhnm,bmhd->bnhd", F.silu(scores) / N * causal, v)

    def loop(q: Tensor, k: Tensor, v: Tensor, by_distance: Tensor, by_time: Tensor) -> Tensor:
        later, now = query_times.split(batch.sizes), key_times.split(batch.sizes)

        def bias(number: int) -> Tensor:
            n = batch.sizes[number]
            apart = later[number][:, None] - now[number][None, :]
            by_bucket = by_time.index_select(0, bucket(apart).view(-1)).view(n, n)
            return toeplitz(by_distance[N - n : N + n - 1], n) + by_bucket

        return silu_loop(batch, bias)(q, k, v)

    def jagged(q: Tensor, k: Tensor, v: Tensor, by_distance: Tensor, by_time: Tensor) -> Tensor:
        biases = Biases(by_distance, by_time, bounds, query_times, key_times)
        return attend(q, k, v, batch, "silu", scale, 1 / N, biases)

    ways = {
        "padded eager": rows.on_padded(padded, *tables),
        "padded Inductor": rows.on_padded(torch.compile(padded, dynamic=False), *tables),
        "bmm loop": rows.on_packed(loop, *tables),
        OURS: rows.on_packed(jagged, *tables),
    }
    yield from both_parts(str(shape), ways, shape.flops(batch), shape.facts(batch), rows.comparable)


def toeplitz(table: Tensor, n: int) -> Tensor:
    """(n, n) with entry i - j + n - 1 of the table; the cheapest spelling, forward and backward."""
    return table.unfold(0, n, 1).flip(1)


def bucket(apart: Tensor) -> Tensor:
    """Times apart on a logarithmic scale, as published HSTU models have it."""
    return (apart.abs().clamp(min=1).log() / 0.301).long().clamp(0, TIME_BUCKETS)


def time_bounds() -> Tensor:
    """The shortest time apart for each bucket but the first, by bisection."""
    wanted = torch.arange(1, TIME_BUCKETS + 1)
    low, high = torch.zeros_like(wanted), torch.full_like(wanted, 2**62)
    for _ in range(63):
        middle = (low + high) // 2
        reached = bucket(middle) >= wanted
        low, high = torch.where(reached, low, middle + 1), torch.where(reached, middle, high)
    return high


# --- softmax -----------------------------------------------------------------------------------------


def softmax_groups(settings: Settings) -> Iterator[Group]:
    for shape in shapes(settings, SHORT):
        yield from _softmax(shape)


def _softmax(shape: Shape) -> Iterator[Group]:
    torch._dynamo.reset()
    rows = Rows.random(shape, heads_first=True)
    batch, N, scale = rows.batch, rows.batch.longest, shape.width**-0.5
    visible = torch.ones(N, N, dtype=torch.bool).tril() & batch.valid[:, None, None, :]

    def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=visible)

    def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    ways = {
        "SDPA padded, mask": rows.on_padded(masked, heads_first=True),
        "SDPA padded, causal": rows.on_padded(causal, heads_first=True),
        "FlexAttention": rows.on_packed(flex(batch)),
        "nested tensors": nested(rows),
        "SDPA loop": rows.on_packed(softmax_loop(batch)),
        OURS: rows.on_packed(lambda q, k, v: attend(q, k, v, batch, "softmax", scale)),
    }
    yield from both_parts(str(shape), ways, shape.flops(batch), shape.facts(batch), rows.comparable)


def flex(batch: Batch) -> Callable[..., Tensor]:
    """All histories as one long sequence, under a mask of documents."""
    owner = torch.repeat_interleave(torch.arange(batch.sequences), batch.lengths)

    def same_history(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (owner[i] == owner[j]) & (i >= j)

    blocks = create_block_mask(same_history, None, None, batch.rows, batch.rows, device="cpu")
    compiled = torch.compile(flex_attention, dynamic=False)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads_first = (x.transpose(0, 1).unsqueeze(0).contiguous() for x in (q, k, v))
        return compiled(*heads_first, block_mask=blocks)[0].transpose(0, 1)

    return run


def nested(rows: Rows) -> Way:
    """torch's jagged nested tensors."""
    batch = rows.batch

    def wrap(x: Tensor) -> Tensor:
        bounds = {"min_seqlen": int(batch.lengths.min()), "max_seqlen": batch.longest}
        return torch.nested.nested_tensor_from_jagged(x.detach(), batch.offsets, **bounds)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(*heads_first, is_causal=True).transpose(1, 2)

    return Way(run, tuple(wrap(x).requires_grad_() for x in rows.packed), wrap(rows.grad))


# --- from one thread to many -------------------------------------------------------------------------

ONE, ALL = "1 thread", "all threads"


def scaling_groups(settings: Settings) -> Iterator[Group]:
    """One thread and all of them take turns in one process."""
    shape = settings.pick(LONG, QUICK, TINY)
    for activation in ("silu", "softmax"):
        yield from _scaling(shape, activation, settings.threads)
    a, b, c = torch.randn(3, *settings.pick((1024, 1024), (512, 512), (16, 16))).unbind()
    yield Group("matrix product", FORWARD, _on_threads(lambda: torch.mm(a, b, out=c), settings.threads))


def _scaling(shape: Shape, activation: str, threads: int) -> Iterator[Group]:
    rows = Rows.random(shape)
    batch, scale = rows.batch, shape.width**-0.5
    way = rows.on_packed(lambda q, k, v: attend(q, k, v, batch, activation, scale))
    result = way.run(*way.inputs)

    def backward() -> None:
        torch.autograd.grad(result, way.inputs, way.grad, retain_graph=True)

    for part, run in ((FORWARD, way.forward), ("backward", backward)):
        yield Group(f"{activation} {shape}", part, _on_threads(run, threads))


def _on_threads(run: Callable[[], Any], threads: int) -> dict[str, Callable[[], Any]]:
    def with_threads(count: int) -> Callable[[], None]:
        def counted() -> None:
            torch.set_num_threads(count)
            run()

        return counted

    return {ONE: with_threads(1), ALL: with_threads(threads)}


TABLES = (
    Table(
        "attention",
        "HSTU attention: SiLU, causal",
        OURS,
        ("padded Inductor", "padded eager", "bmm loop"),
        by_turns(silu_groups),
        "padded: two einsums and a mask over (B, H, N, N); bmm loop: packed rows, one history after the other.",
    ),
    Table(
        "biases",
        "HSTU attention with biases by distance and by time",
        OURS,
        ("padded Inductor", "padded eager", "bmm loop"),
        by_turns(biased_groups),
        "both tables are learned; padded ways build the (B, N, N) bias, the loop one (n, n) after the other.",
    ),
    Table(
        "softmax",
        "Softmax attention, causal",
        OURS,
        ("SDPA padded, causal", "SDPA loop"),
        by_turns(softmax_groups),
        "FlexAttention: all histories as one sequence under a mask of documents.",
    ),
    Table(
        "scaling",
        "From one thread to all",
        ALL,
        (ONE,),
        by_turns(scaling_groups),
        "both take turns in one process; time on the wall.",
        once="tuned",
    ),
)
