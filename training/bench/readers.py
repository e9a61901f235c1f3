"""Figures out of what benchmarks write. Each reader takes the benchmark's JSON and returns one number."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

Reader = Callable[[Any], float]
GEMM_SIZE = 768  # PEAK_SIZE of benchmarks/measure.py


def _each_round(samples: dict[str, Any], threads: int) -> list[float]:
    """As benchmarks/measure.py has it: processor time on one thread, the clock on the wall on several."""
    if "failed" in samples:
        raise ValueError(f"did not run: {samples['failed']}")
    if threads == 1:
        return [user + system for user, system in zip(samples["user"], samples["system"], strict=True)]
    return samples["wall"]


def _seconds(samples: dict[str, Any], threads: int) -> float:
    return statistics.median(_each_round(samples, threads))


def _group(data: Any, table: str, name: str, part: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A table and its group of that name; of several, the one with most arithmetic."""
    run = next(run for run in data["runs"] if run["table"] == table)
    groups = [g for g in run["groups"] if g["name"].startswith(name) and g["part"] == part]
    return run, max(groups, key=lambda g: g["flops"] or 0)


def times_faster(table: str, over: str, name: str = "", part: str = "forward + backward") -> Reader:
    """Of a table of kernels.py: that way's time over turbogr's."""

    def read(data: Any) -> float:
        run, group = _group(data, table, name, part)
        ways, threads = group["ways"], run["threads"]
        return _seconds(ways[over], threads) / _seconds(ways[run["ours"]], threads)

    return read


def utilisation(table: str, name: str = "", part: str = "forward + backward") -> Reader:
    """FLOPs that the result needs, over time, over the best speed of a matrix product in the same rounds."""

    def read(data: Any) -> float:
        run, group = _group(data, table, name, part)
        gemm = group["ways"]["GEMM"]
        best = (
            min(gemm["wall"]) if run["threads"] > 1 else min(map(sum, zip(gemm["user"], gemm["system"], strict=True)))
        )
        return group["flops"] / _seconds(group["ways"][run["ours"]], run["threads"]) / (2 * GEMM_SIZE**3 / best)

    return read


def packed(key: str, way: str = "packed aten") -> Reader:
    """Of packing.py: what is saved of the padded step's."""
    return lambda data: 1 - data["ways"][way][key] / data["ways"]["padded eager"][key]


def packed_times_faster(data: Any) -> float:
    pairs = zip(data["times"]["padded eager"], data["times"]["packed aten"], strict=True)
    return statistics.median(padded / ours for padded, ours in pairs)


def sampling_times_faster(way: str) -> Reader:
    """Of sampling.py: the best of Inductor's ways over this one."""

    def read(data: Any) -> float:
        times = _sampling_times(data)
        return min(t for n, t in times.items() if n.startswith("Inductor")) / times[way]

    return read


def sampling_shared(data: Any) -> float:
    """Of sampling.py: time of the loss with eight times the negatives over that without."""
    times = _sampling_times(data)
    return times["fused, 8 share"] / times["fused"]


def _sampling_times(data: Any) -> dict[str, float]:
    run = data["runs"][0]
    return {n: _seconds(s, run["threads"]) for n, s in run["samples"].items() if "failed" not in s}


def ahead(part: str, over: str) -> Reader:
    """Of offload.py: time of a step without looking ahead over that with it."""
    return lambda data: data[part]["seconds per step"][over] / data[part]["seconds per step"]["ahead"]


def pipelined(way: str) -> Reader:
    """Of pipeline.py: a step that waits for every exchange over one that runs ahead."""
    return lambda data: statistics.median(data["sync"]) / statistics.median(data[way])


def quality_lost(way: str) -> Reader:
    """Of quality.py: HR@10 of padded eager minus that of the way, means over seeds."""
    return lambda data: statistics.mean(data["padded eager, fp32"]) - statistics.mean(data[way])


def quality_noise(data: Any) -> float:
    """Of quality.py: deviation of padded eager between seeds."""
    values = data["padded eager, fp32"]
    return statistics.stdev(values) if len(values) > 1 else 0.0


def imbalance(key: str) -> Reader:
    """Of balance.py: log-normal lengths, cut at 4096, linear and quadratic cost, the largest number of ranks."""

    def read(data: Any) -> float:
        rows = [r for r in data if r["lengths"] == "log-normal, 4096" and r["cost"] != "L²"]
        return max(rows, key=lambda r: r["world"])[key]

    return read


def seconds_a_layer(data: Any) -> float:
    """Of analysis_time.py: what one layer more adds, for HSTU."""
    depths = {int(layers): found["whole"] for layers, found in data["hstu"].items()}
    few, many = min(depths), max(depths)
    return (depths[many] - depths[few]) / (many - few)


def overhead(what: str) -> Reader:
    """Of overhead.py: turbogr's time over Inductor's."""
    return lambda data: statistics.median(data[what]["turbogr"]) / statistics.median(data[what]["inductor"])


def simulated(variant: str, key: str) -> Reader:
    """Of `turbogr simulate`: at the largest number of devices."""

    def read(data: Any) -> float:
        found = [o for o in data["outcomes"] if o["variant"] == variant]
        return max(found, key=lambda o: o["devices"])[key]

    return read


def at(*path: Any) -> Reader:
    """What stands there."""

    def read(data: Any) -> float:
        for key in path:
            data = data[key]
        if data is None:
            raise ValueError(f"no figure at {' / '.join(map(str, path))}")
        return float(data)

    return read
