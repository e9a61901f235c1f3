"""What kernels take, as formulas fitted to times: measured on this machine, or projected by the AscendC twin.

Each op takes a fixed time, plus a time per row and number in it, plus, for attention, one per pair of rows.
"""

from __future__ import annotations

import json
import math
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import OptionError
from ..files import read_json, replace_file
from ..runtime.balance.cost import robust_fit
from .events import Floats

HERE = "here"
SHIPPED = Path(__file__).with_name("ascend910b.json")
NEGATIVES = 1024  # of the loss, in the twin's workload
Point = tuple[float, float, float]  # seconds, work by rows, work by pairs


@dataclass(frozen=True)
class Kernel:
    """seconds = fixed + row * (rows x width) + pair * (pairs x width), and at least least_pair * (pairs x width).

    What a loss counts are rows x negatives; what a dense layer counts are FLOPs.
    """

    fixed: float
    row: float
    pair: float
    error: float  # largest relative error of the fit over its points
    points: int
    least_pair: float = 0.0

    def __call__(self, rows: Floats | float, pairs: Floats | float = 0.0) -> Floats | float:
        return np.maximum(self.fixed + self.row * rows + self.pair * pairs, self.least_pair * pairs)


@dataclass(frozen=True)
class Calibration:
    """Kernels of a device. An op without an entry is priced by its FLOPs or bytes."""

    device: str
    provenance: str
    source: str
    head_dim: int
    kernels: dict[str, Kernel] = field(default_factory=dict)

    def assumptions(self) -> Iterator[dict[str, Any]]:
        for name, kernel in self.kernels.items():
            parts = [f"{kernel.fixed * 1e6:.3g} µs"] if kernel.fixed else []
            unit = "FLOP" if name.startswith("linear") else "number"
            parts += [f"{kernel.row * 1e12:.4g} ps per {unit}"] if kernel.row else []
            parts += [f"{kernel.pair * 1e12:.4g} ps per pair and number"] if kernel.pair else []
            least = f", at least {kernel.least_pair * 1e12:.4g} of those" if kernel.least_pair else ""
            source = f"{self.source}; {kernel.points} sizes, worst error of the fit {kernel.error:.0%}"
            yield {
                "part": "kernels",
                "name": name,
                "value": asdict(kernel),
                "text": (" + ".join(parts) or "0") + least,
                "provenance": self.provenance,
                "source": source,
            }


def load_calibration(path: Path, device: str) -> Calibration:
    """One device of a file."""
    try:
        data = read_json(path, dict)
        devices = data["devices"]
        if device not in devices and list(devices) == [HERE]:
            device = HERE  # a file of measurements has one device, whatever the cluster is made of
        if device not in devices:
            raise OptionError(f"{path} has no device {device!r}: {', '.join(devices)}")
        found = dict(devices[device])
        kernels = {name: Kernel(**values) for name, values in found.pop("kernels").items()}
        return Calibration(device=device, kernels=kernels, **found)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        what = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        raise OptionError(f"{path} is no calibration (turbogr simulate --calibrate writes one): {what}") from error


def save_calibrations(path: Path, calibrations: list[Calibration]) -> None:
    devices = {}
    for one in calibrations:
        devices[one.device] = {k: v for k, v in asdict(one).items() if k != "device"}
    try:
        replace_file(path, json.dumps({"writer": "turbogr simulate", "devices": devices}, indent=1) + "\n")
    except OSError as error:
        raise OptionError(f"cannot write {path}: {error.strerror}") from error


def fit(points: list[Point]) -> Kernel:
    """Robust, no part below 0."""
    seconds = np.array([p[0] for p in points])
    features = np.array([[1.0, p[1], p[2]] for p in points])
    fixed, row, pair = robust_fit(features, seconds)
    error = np.abs(features @ np.array([fixed, row, pair]) / seconds - 1.0)
    return Kernel(fixed, row, pair, float(error.max()), len(points))


# --- projected -------------------------------------------------------------------------------------------


# Sequences and their length. Rows and pairs of rows must not grow together, or a fit cannot tell them apart.
TWIN_SIZES = ((16, 256), (8, 512), (4, 1024), (8, 1024))


def project_twin(
    socs: list[str], sizes: tuple[tuple[int, int], ...] = TWIN_SIZES, head_dim: int = 128
) -> list[Calibration]:
    """Runs each kernel in the AscendC twin at a few sizes. Needs g++; takes minutes.

    Batches of a job are far larger than these and their sequences longer. So what is uneven between cores is taken out;
    attention is priced by its cores, not by the memory that bounds it at these sizes; and pairs are not taken to become
    cheaper than they were in the largest batch that was run.
    """
    from ..kernels.twin.cost import SOCS
    from ..kernels.twin.workloads import Batch, projections

    points: dict[tuple[str, str], list[Point]] = {}
    for sequences, longest in sizes:
        batch = Batch(sequences, longest, fill=1.0, heads=2, head_dim=head_dim)
        for name, found in projections(["attention-silu", "norm-gate", "embedding", "sampled-softmax"], batch, socs):
            rows, pairs = batch.rows * batch.width, batch.pairs * batch.width if name == "attention-silu" else 0
            if name == "sampled-softmax":
                rows = batch.rows * NEGATIVES * batch.head_dim
            soc = SOCS[found.soc]
            even = found.cycles / (soc.megahertz * 1e6) / (1.0 + found.imbalance)
            seconds = even if name == "attention-silu" else max(even, found.memory_bytes / soc.bandwidth)
            points.setdefault((found.soc, found.op), []).append((seconds, float(rows), float(pairs)))
    source = f"AscendC twin (turbogr cost), head size {head_dim}, float16, cores evenly loaded"
    found_kernels: dict[str, dict[str, Kernel]] = {soc: {} for soc in socs}
    for (device, op), found_points in points.items():
        kernel = fit(found_points)
        largest = max(found_points, key=lambda point: point[2])
        found_kernels[device][op] = replace(kernel, least_pair=largest[0] / largest[2] if largest[2] else 0.0)
    return [Calibration(name, "projected", source, head_dim, kernels) for name, kernels in found_kernels.items()]


# --- measured --------------------------------------------------------------------------------------------


def measure_here(sizes: tuple[int, ...] = (64, 192, 384), head_dim: int = 64, seconds: float = 0.2) -> Calibration:
    """Times the CPU kernels of this machine at a few sizes."""
    from .. import kernels  # noqa: F401  defines the ops

    points: dict[str, list[Point]] = {}
    for longest in sizes:
        for name, forward, work in _ops(longest, head_dim):
            points.setdefault(name, []).append((_time(forward, seconds), *work))
            result = forward()
            gradient = torch.ones_like(result)

            def backward(result: Tensor = result, gradient: Tensor = gradient) -> Any:
                return result.backward(gradient, retain_graph=True)

            points.setdefault(f"{name}_backward", []).append((_time(backward, seconds), *work))
    source = f"timed here: {platform.machine()}, {torch.get_num_threads()} threads, float32"
    return Calibration(HERE, "measured", source, head_dim, {name: fit(p) for name, p in points.items()})


def _ops(longest: int, head_dim: int) -> Iterator[tuple[str, Callable[[], Tensor], tuple[float, float]]]:
    from ..kernels.twin.workloads import ITEMS, Batch

    ops = torch.ops.turbogr
    batch = Batch(8, longest, 0.6, 2, head_dim, torch.float32)
    rows, width, pairs = batch.rows, batch.width, batch.pairs
    q, k, v = (batch.normal(rows, batch.heads, head_dim) for _ in range(3))
    where = (batch.offsets, batch.offsets, batch.columns, batch.columns)
    attributes = ("silu", 1.0 / math.sqrt(head_dim), 1.0 / longest, 0, longest, 0.0)
    by_rows = float(rows * width), 0.0
    yield (
        "jagged_attention",
        lambda: ops.jagged_attention(q, k, v, *where, *(None,) * 9, *attributes)[0],
        (by_rows[0], float(pairs * width)),
    )
    x, gate = batch.normal(rows, width), batch.normal(rows, width)
    scale, shift = batch.normal(width), batch.normal(width)
    yield "norm_gate", lambda: ops.norm_gate(x, gate, scale, shift, 1e-6)[0], by_rows
    table = batch.normal(ITEMS, width)
    ids = torch.randint(0, ITEMS, (rows,), generator=torch.Generator().manual_seed(0))
    yield "embedding", lambda: ops.embedding(table, ids, -1), by_rows
    query, positive = batch.normal(rows, head_dim), batch.normal(rows, head_dim)
    negative = batch.normal(NEGATIVES, head_dim)
    bounds = torch.tensor([0, rows]), torch.tensor([0, NEGATIVES])
    work = float(rows * NEGATIVES * head_dim), 0.0
    yield (
        "sampled_softmax",
        lambda: ops.sampled_softmax(query, positive, negative, *bounds, None, None, None, 1.0)[0],
        work,
    )
    weight = batch.normal(4 * width, width)
    yield "linear", lambda: torch.nn.functional.linear(x, weight), (2.0 * rows * weight.numel(), 0.0)


def _time(call: Callable[[], Any], seconds: float) -> float:
    """The median of calls, after two that warm up."""
    call(), call()
    taken: list[float] = []
    while sum(taken) < seconds or len(taken) < 5:
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)
