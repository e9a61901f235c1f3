"""Calls of jagged_attention, exact results for them, and how large what is added up in those is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from turbogr_compile.kernels import attention_reference as kernel
from turbogr_compile.kernels.twin import attention

F16, BF16, F32, I32, I64 = torch.float16, torch.bfloat16, torch.float32, torch.int32, torch.int64
INDEX = {F16: I64, BF16: I32, F32: I64}  # each pair is one compilation
TOLERANCE = {F16: 2e-3, BF16: 1.6e-2, F32: 1e-5}  # of the sum of magnitudes
LENGTHS = (0, 1, 15, 16, 17, 255, 256, 257)
FAR = 1 << 40
BOUNDS = (1, 2, 3, 5, 8, 60, 61, 62, 63, 64, 3600, 86400)


@dataclass(frozen=True)
class Case:
    keys: tuple[int, ...] = (17, 0, 40)
    queries: tuple[int, ...] | None = None  # of each sequence; where None, the rows of keys
    heads: int = 2
    groups: int = 1
    depth: int = 16
    value_depth: int | None = None
    dtype: torch.dtype = F16
    activation: str = "silu"
    window: tuple[int, int] = (0, FAR)
    holes: bool = False  # columns that no row has
    valid: bool = False
    pair_mask: str = ""  # dims that are not 1: some of "shqk"
    bias: str = ""
    position: int = 0  # rows of the table, 0 for none
    time: int = 0
    scale: float | None = None
    post_scale: float | None = None
    around: int = 0  # rows before the first sequence, and behind the last
    spread: float = 1.0  # of the numbers
    dropout: float = 0.0
    first: int = 0  # the first column
    seed: int = 0

    @property
    def columns(self) -> int:
        longest = max((*self.keys, *(self.queries or ()), 1))
        return 2 * longest + 3 if self.holes else longest

    def inputs(self) -> kernel.Inputs:
        random = torch.Generator().manual_seed(self.seed)
        value_depth = self.value_depth or self.depth
        lengths = self.keys, self.queries or self.keys
        key_offsets, query_offsets = (torch.tensor([self.around, *each]).cumsum(0) for each in lengths)
        key_rows, query_rows = (int(x[-1]) + self.around for x in (key_offsets, query_offsets))

        def normal(*shape: int, dtype: torch.dtype = F32) -> Tensor:
            return (self.spread * torch.randn(*shape, generator=random)).to(dtype)

        def columns(each: tuple[int, ...]) -> Tensor:
            chosen = [torch.randperm(self.columns, generator=random)[:n].sort().values for n in each]
            dense = [torch.arange(n) for n in each]
            edge = torch.zeros(self.around, dtype=I64)
            return torch.cat([edge, *(chosen if self.holes else dense), edge]) + self.first

        def times(rows: int) -> Tensor:
            return 1_700_000_000 + torch.randint(0, 5000, (rows,), generator=random).cumsum(0)

        def sizes(dims: str) -> list[int]:
            full = {"s": len(self.keys), "h": self.heads, "q": self.columns, "k": self.columns}
            return [size if name in dims else 1 for name, size in full.items()]

        key_columns, key_times = columns(self.keys), times(key_rows)
        own = self.queries is None
        return kernel.Inputs(
            query=normal(query_rows, self.heads, self.depth, dtype=self.dtype),
            key=normal(key_rows, self.groups, self.depth, dtype=self.dtype),
            value=normal(key_rows, self.groups, value_depth, dtype=self.dtype),
            query_offsets=query_offsets,
            key_offsets=key_offsets,
            query_columns=key_columns if own else columns(self.queries),
            key_columns=key_columns,
            key_valid=torch.rand(key_rows, generator=random) > 0.2 if self.valid else None,
            pair_mask=torch.rand(sizes(self.pair_mask), generator=random) > 0.3 if self.pair_mask else None,
            bias=normal(*sizes(self.bias)) if self.bias else None,
            position_bias=normal(self.position, 2 * self.columns - 1) if self.position else None,
            time_bias=normal(self.time, len(BOUNDS) + 1) if self.time else None,
            time_bounds=torch.tensor(BOUNDS) if self.time else None,
            query_times=(key_times if own else times(query_rows)) if self.time else None,
            key_times=key_times if self.time else None,
            dropout_seed=torch.tensor(-0x123456789ABCDEF + self.seed) if self.dropout else None,
            activation=self.activation,
            scale=self.depth**-0.5 if self.scale is None else self.scale,
            post_scale=(0.01 if self.activation == "silu" else 1.0) if self.post_scale is None else self.post_scale,
            min_distance=max(self.window[0], -FAR),
            max_distance=self.window[1],
            dropout=self.dropout,
        )

    def grad(self) -> Tensor:
        a = self.inputs()
        random = torch.Generator().manual_seed(self.seed + 1)
        return torch.randn(*a.query.shape[:2], a.value.shape[2], generator=random).to(self.dtype)


def wide(a: kernel.Inputs) -> kernel.Inputs:
    """The same numbers in float64."""
    return kernel.Inputs(*(x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in a))


class Sizes:
    """Sums of the magnitudes of what is added up in results and gradients; a weight has an error of its own size."""

    def __init__(self, a: kernel.Inputs, grad: Tensor | None = None) -> None:
        self.a = a = wide(a)
        self.result = a.query.new_zeros(*a.query.shape[:2], a.value.shape[2])
        self.grads = kernel.Gradients(a, [True] * 7)
        for part in kernel._sequences(a):
            self.add(part, None if grad is None else grad.double())

    def add(self, part: Any, grad: Tensor | None) -> None:
        a = self.a
        weights = part.scaled(self.weights(part), part.kept()).abs()
        values = part.shared(a.value).abs()
        self.result[part.queries] = part.by_head(part.by_group(weights) @ values).transpose(0, 1)
        if grad is None:
            return
        slopes = part.by_head(part.grouped(grad.abs()) @ values.transpose(1, 2))
        slopes = part.scaled(slopes, part.kept()).abs_()
        if a.activation == "softmax":
            shares = self.weights(part)
            slopes = shares * (slopes + (slopes * shares).sum(-1, keepdim=True))
        else:
            slopes = slopes * (1.1 if part.hidden() is None else 1.1 * ~part.hidden())
        into = self.grads
        into.value[part.keys] = (part.by_group(weights).transpose(1, 2) @ part.grouped(grad.abs())).transpose(0, 1)
        positive = a._replace(query=a.query.abs(), key=a.key.abs(), scale=abs(a.scale))
        same = kernel.OneSequence(positive, part.index, part.queries, part.keys, None)
        kernel._add_products(same, slopes, into)
        kernel._add_biases(same, slopes, into)

    def weights(self, part: Any) -> Tensor:
        if self.a.activation == "softmax":
            return kernel._softmax(part)[0]
        # Where silu is next to nothing, the score it comes from still has its rounding error.
        return kernel.POINTWISE["silu"].weights(part.scores(), part.hidden())


def near(found: Tensor, exact: Tensor, size: Tensor, dtype: torch.dtype) -> None:
    assert found.shape == exact.shape
    assert torch.isfinite(found).all()
    floor = 1e-7 if dtype == F16 else 1e-12  # half of what the smallest halves are apart
    bad = (found.double() - exact).abs() > TOLERANCE[dtype] * size + floor
    assert not bad.any(), f"{int(bad.sum())} of {bad.numel()} are off, first at {bad.nonzero()[0].tolist()}"


def check_forward(case: Case, cores: int = 2) -> tuple[Tensor, Tensor]:
    a = case.inputs()
    result, log_sum = attention.jagged_attention(*a, cores=cores, index=INDEX[case.dtype])
    exact, exact_sum = kernel.attention(*wide(a))
    assert result.dtype == case.dtype and log_sum.dtype == F32
    near(result, exact, Sizes(a).result, case.dtype)
    torch.testing.assert_close(log_sum.double(), exact_sum, rtol=1e-5, atol=1e-5)
    return result, log_sum


def run_backward(
    case: Case, cores: int = 2, wanted: tuple[bool, ...] = (True,) * 7, **options: Any
) -> tuple[Tensor, ...]:
    a = case.inputs()
    result, log_sum = kernel.attention(*wide(a))
    saved = result.to(case.dtype), log_sum.float()
    return attention.jagged_attention_backward(
        case.grad(), *saved, *a, list(wanted), cores=cores, index=INDEX[case.dtype], **options
    )


def check_backward(case: Case, cores: int = 2, wanted: tuple[bool, ...] = (True,) * 7, **options: Any) -> None:
    a, grad = case.inputs(), case.grad()
    found = run_backward(case, cores, wanted, **options)
    exact = kernel.attention_backward(grad.double(), *kernel.attention(*wide(a)), *wide(a), list(wanted))
    sizes = Sizes(a, grad).grads
    for name, x, y, want in zip(kernel.DIFFERENTIABLE, found, exact, wanted, strict=True):
        assert x.shape == y.shape
        given = getattr(a, name)
        if want and given is not None:
            assert x.dtype == given.dtype
            near(x, y, getattr(sizes, name), case.dtype)
