# ruff: noqa: RUF009  (a Figure is as immutable as the float that it is)
"""What is trained: lengths, ids, a model; and what a step of it takes on a device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ..errors import OptionError
from ..runtime.balance import Balancer, Cost
from ..runtime.balance.algorithms import loads_of
from .calibration import Calibration, Kernel
from .cluster import Cluster
from .events import Floats
from .figures import Figure

LENGTHS = ("log-normal", "zipf", "equal")
PUBLIC_MEAN = 11_812  # 322,278,385 interactions of 27,285 users, as KuaiRand-27K is commonly described


@dataclass(frozen=True)
class Workload:
    """An HSTU-like model: per layer one projection to 4 x width, attention, a gate and one projection back."""

    lengths: str = "log-normal"
    sequences: int = 32
    longest: int = 4096
    layers: int = 12
    width: int = 1024
    negatives: float = 1.0
    seed: int = 0
    bytes_per_number: int = 2
    items: Figure = Figure(32_038_725, "rows", "assumed", "items of KuaiRand-27K as commonly quoted; not verified here")
    popularity: Figure = Figure(1.0, "", "assumed", "Zipf exponent of items: how often ids repeat")
    linear_efficiency: Figure = Figure(
        0.7, "", "assumed", "of the peak, for dense layers without a calibrated kernel; default of Ascend/msmodeling"
    )
    loss_negatives: Figure = Figure(128, "", "assumed", "negatives that each token is scored against")
    jitter: Figure = Figure(0.01, "", "assumed", "typical random delay of a device's compute, half-normal")
    load_time: Figure = Figure(2e-6, "s per sequence", "assumed", "host: reading and packing, one step ahead")
    plan_time: Figure = Figure(0.7e-6, "s per sequence", "measured", "planning 16,384 sequences here: about 11 ms")
    launch_time: Figure = Figure(5e-6, "s per kernel", "assumed", "default of Ascend/msmodeling, to be calibrated")

    def __post_init__(self) -> None:
        if self.lengths not in LENGTHS:
            raise OptionError(f"lengths {self.lengths!r}: one of {', '.join(LENGTHS)}")
        for name in ("sequences", "longest", "layers", "width"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.negatives < 0:
            raise OptionError(f"negatives per token cannot be {self.negatives}")

    @property
    def dense(self) -> int:
        """Parameters that all devices hold."""
        return 5 * self.width * self.width * self.layers

    @property
    def row_bytes(self) -> float:
        return float(self.width * self.bytes_per_number)

    def draw(self, steps: int, devices: int) -> np.ndarray:
        """Lengths of every step's global batch."""
        random = np.random.default_rng(self.seed)
        shape = steps, devices * self.sequences
        if self.lengths == "equal":
            return np.full(shape, self.longest)
        if self.lengths == "zipf":
            values = np.arange(1, self.longest + 1)
            share = values**-1.2
            return random.choice(values, shape, p=share / share.sum())
        sigma = 1.2
        drawn = random.lognormal(np.log(PUBLIC_MEAN) - sigma**2 / 2, sigma, shape)
        return np.clip(drawn, min(16, self.longest), self.longest).astype(np.int64)

    def assumptions(self) -> Iterator[dict[str, Any]]:
        """What was asked for; figures of their own are printed beside."""
        texts = {
            "lengths": f"{self.lengths}, at most {self.longest}",
            "sequences": f"{self.sequences} per device and step",
            "model": f"{self.layers} layers of width {self.width}: {self.dense / 1e6:.0f} M dense parameters",
            "negatives": f"{self.negatives:g} rows fetched per token",
            "rows": f"{self.width} numbers of {self.bytes_per_number} bytes",
        }
        source = {
            "lengths": "log-normal sigma 1.2, mean 11.8k before the cut; or Zipf 1.2: synthetic",
            "negatives": "drawn uniformly; several tokens share them where below those scored",
        }
        for name, text in texts.items():
            yield {
                "part": "workload", "name": name, "value": text, "text": text,
                "provenance": "chosen", "source": source.get(name, "as asked for"),
            }  # fmt: skip

    @cached_property
    def _ids(self) -> tuple[Floats, Floats]:
        """Items in bins of like popularity: how many, and the share of draws that each of them gets."""
        edges = np.unique(np.geomspace(1, float(self.items) + 1, 600).astype(np.int64))
        count = np.diff(edges).astype(np.float64)
        share = ((edges[:-1] + edges[1:] - 1) / 2.0) ** -float(self.popularity)
        return count, share / (count * share).sum()

    def distinct(self, drawn: Floats | float) -> Floats:
        """Expected number of different items among so many that users met."""
        count, share = self._ids
        draws = np.atleast_1d(np.asarray(drawn, dtype=np.float64))
        return (count * -np.expm1(-draws[:, None] * share)).sum(1)

    def distinct_negatives(self, drawn: Floats | float) -> Floats:
        items = float(self.items)
        return items * -np.expm1(-np.atleast_1d(np.asarray(drawn, dtype=np.float64)) / items)


@dataclass(frozen=True, eq=False)
class Load:
    """What one step asks of each device."""

    tokens: Floats
    pairs: Floats
    history: Floats  # different rows fetched
    negatives: Floats

    @classmethod
    def of(cls, workload: Workload, lengths: np.ndarray, devices: int, cost: Cost, balanced: bool) -> Load:
        balancer = Balancer("best" if balanced else "given")
        ranks = balancer.plan(cost(lengths), devices, workload.sequences, lengths).ranks
        n = lengths.astype(np.float64)
        tokens, pairs = loads_of(ranks, n, devices), loads_of(ranks, n * (n + 1) / 2, devices)
        return cls(tokens, pairs, workload.distinct(tokens), workload.distinct_negatives(tokens * workload.negatives))


@dataclass(frozen=True)
class Compute:
    """Seconds of the parts of a step on a device: calibrated kernels; where there is none, FLOPs and bytes."""

    workload: Workload
    cluster: Cluster
    calibration: Calibration

    @property
    def kernels(self) -> dict[str, Kernel]:
        return self.calibration.kernels

    def forward(self, load: Load) -> Floats:
        """Of the layers."""
        w = self.workload
        each = self._linear(load.tokens, 1) + self._attention("jagged_attention", load, 2.0)
        each = each + self._stream("norm_gate", load.tokens * w.width, 3) + 4 * w.launch_time
        return w.layers * each

    def backward(self, load: Load) -> Floats:
        w = self.workload
        each = self._linear(load.tokens, 2) + self._attention("jagged_attention_backward", load, 4.0)
        each = each + self._stream("norm_gate_backward", load.tokens * w.width, 5) + 6 * w.launch_time
        return w.layers * each

    def loss(self, load: Load, backward: bool) -> Floats:
        w = self.workload
        work = load.tokens * (w.loss_negatives * w.width)
        name = "sampled_softmax_backward" if backward else "sampled_softmax"
        if name in self.kernels:
            return np.asarray(self.kernels[name](work)) + w.launch_time
        return work * (4.0 if backward else 2.0) / (self.cluster.peak * w.linear_efficiency) + w.launch_time

    def lookup(self, rows: Floats) -> Floats:
        return self._stream("embedding", rows * self.workload.width, 2) + self.workload.launch_time

    def update(self, rows: Floats) -> Floats:
        """Sums of gradients per row and the optimizer's work on them."""
        return self._stream("embedding_backward", rows * self.workload.width, 6) + self.workload.launch_time

    def dense_update(self) -> float:
        """Adam in fp32: reads gradient, weight and two moments, writes three of them."""
        moved = self.workload.dense * 28.0
        return moved / (self.cluster.memory * self.cluster.memory_efficiency) + self.workload.launch_time

    def cost(self) -> Cost:
        """For the balancer: the same seconds, by length."""
        one, two = (
            Load(np.array([n]), np.array([n * (n + 1) / 2]), np.zeros(1), np.zeros(1)) for n in (1024.0, 2048.0)
        )
        nothing = Load(np.zeros(1), np.zeros(1), np.zeros(1), np.zeros(1))
        base, first, second = (float((self.forward(x) + self.backward(x))[0]) for x in (nothing, one, two))
        quadratic = max((second - base) - 2 * (first - base), 0.0) / (2 * 1024.0**2)
        return Cost(0.0, max((first - base) / 1024.0 - quadratic * 1024.0, 0.0), quadratic)

    def flops(self, load: Load) -> Floats:
        """That a step needs: the numerator of MFU."""
        w = self.workload
        scored = 2.0 * load.tokens * w.loss_negatives * w.width
        return 3.0 * (2.0 * w.dense * load.tokens + 4.0 * load.pairs * w.width * w.layers + scored)

    def _linear(self, tokens: Floats, times: int) -> Floats:
        w = self.workload
        name = "linear" if times == 1 else "linear_backward"
        flops = 2.0 * tokens * (w.dense / w.layers)
        if name in self.kernels:
            return np.asarray(self.kernels[name](flops))
        return times * flops / (self.cluster.peak * w.linear_efficiency)

    def _attention(self, name: str, load: Load, products: float) -> Floats:
        w = self.workload
        if name in self.kernels:
            return np.asarray(self.kernels[name](load.tokens * w.width, load.pairs * w.width))
        return 2.0 * products * load.pairs * w.width / (self.cluster.peak * w.linear_efficiency)

    def _stream(self, name: str, numbers: Floats, passes: int) -> Floats:
        """Work that is bound by memory."""
        if name in self.kernels:
            return np.asarray(self.kernels[name](numbers))
        moved = numbers * (passes * self.workload.bytes_per_number)
        return moved / (self.cluster.memory * self.cluster.memory_efficiency)
