"""Every figure the project claims: what it is, what measures it, how to read it, where it is stated.

A benchmark is a script of benchmarks/ or a command of turbogr, with arguments for a size that only shows that it runs
(tiny) and for the one that the README's table is made of (full).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..report import words
from . import readers as r

MEASURED, SIMULATED = "measured", "simulated"
PROVENANCES = {
    MEASURED: "on the machine at hand, in this run",
    SIMULATED: "by turbogr's simulator of clusters, from assumptions that it prints",
    "paper-reported": "from the abstract of arXiv 2605.13433: Ascend NPUs, another model, KuaiRand-27K; definitions "
    "are not known, and no agreement is claimed",
}
README, PERFORMANCE, SCALING, SAMPLING = "README.md", "docs/performance.md", "docs/scaling.md", "docs/sampling.md"
Show = Callable[[float], str]


@dataclass(frozen=True)
class Claim:
    """One figure. `paper` is what the paper reports about something of that name."""

    id: str
    what: str
    read: Callable[[Any], float]
    show: Show
    stated: str
    paper: str = ""
    provenance: str = MEASURED


@dataclass(frozen=True)
class Benchmark:
    """`script` is a file of benchmarks/, or 'turbogr' for a command; arguments come without --json."""

    name: str
    what: str
    script: str
    tiny: tuple[str, ...]
    full: tuple[str, ...]
    claims: tuple[Claim, ...]

    def arguments(self, size: str) -> tuple[str, ...]:
        return self.tiny if size == "tiny" else self.full

    def command(self, size: str) -> str:
        """As a user would type it in the checkout."""
        shown = "turbogr" if self.script == "turbogr" else f"python benchmarks/{self.script}"
        return " ".join([shown, *(f"'{a}'" if " " in a else a for a in self.arguments(size))])


def _kernels(table: str, what: str, *claims: Claim) -> Benchmark:
    chosen = ("--only", table) + (() if table == "compile" else ("--malloc", "tuned"))
    tiny = ("--size", "tiny", *chosen, "--threads", "1")
    return Benchmark(table, what, "kernels.py", tiny, (*chosen, "--threads", "2"), claims)


def _packing(model: str, *claims: Claim) -> Benchmark:
    common = ("--model", model, "--ways", "packed aten")
    return Benchmark(
        f"packing-{model}",
        f"{model} padded to 1024, 30 % of the positions hold an item, width 64, 2 layers: forward and backward",
        "packing.py",
        (*common, "--rounds", "1", "--steps", "1", "--length", "128", "--batch", "4"),
        (*common, "--rounds", "2"),
        claims,
    )


def _points(value: float) -> str:
    return f"{100 * value:.2f} points"


BENCHMARKS = (
    _kernels(
        "step", "training step of an unmodified padded model, 30 % of the positions hold an item, 2 layers, AdamW",
        Claim("step-hstu", "HSTU (N 1024, D 256), padded Inductor / turbogr",
              r.times_faster("step", "padded Inductor", "HSTU", "step"), words.factor, README, "latency 2.2x"),
        Claim("step-hstu-mfu", "HSTU, share of the speed of a matrix product that turbogr reaches",
              r.utilisation("step", "HSTU", "step"), words.percent, README, "MFU 54.71 %"),
        Claim("step-by-hand", "HSTU packed by hand with turbogr's kernels / turbogr",
              r.times_faster("step", "by hand, kernels", "HSTU", "step"), words.factor, PERFORMANCE),
        Claim("step-sasrec", "SASRec (N 200, D 128), padded Inductor / turbogr",
              r.times_faster("step", "padded Inductor", "SASRec", "step"), words.factor, README),
    ),
    _kernels(
        "attention", "HSTU attention (SiLU, causal), forward and backward",
        Claim("attention-padded", "padded Inductor / turbogr", r.times_faster("attention", "padded Inductor"),
              words.factor, README),
        Claim("attention-loop", "loop over histories / turbogr", r.times_faster("attention", "bmm loop"),
              words.factor, PERFORMANCE),
    ),
    _kernels(
        "biases", "HSTU attention with biases by distance and time, forward and backward",
        Claim("biases-padded", "padded Inductor / turbogr", r.times_faster("biases", "padded Inductor"),
              words.factor, PERFORMANCE),
    ),
    _kernels(
        "softmax", "softmax attention, forward and backward",
        Claim("softmax-loop", "loop of SDPA over histories / turbogr", r.times_faster("softmax", "SDPA loop"),
              words.factor, PERFORMANCE),
    ),
    _kernels(
        "compile", "cold compile of the HSTU step, kernels included",
        Claim("compile-cold", "Inductor / turbogr", r.times_faster("compile", "padded Inductor", "HSTU", "wall"),
              words.factor, PERFORMANCE),
    ),
    _packing(
        "hstu",
        Claim("packing-hstu-memory", "peak memory of tensors saved", r.packed("peak"), words.percent, README,
              "memory 70 % less"),
        Claim("packing-hstu-flops", "FLOPs saved", r.packed("flops"), words.percent, PERFORMANCE),
        Claim("packing-hstu-time", "padded eager / turbogr, time", r.packed_times_faster, words.factor, PERFORMANCE),
    ),
    _packing(
        "sasrec",
        Claim("packing-sasrec-memory", "peak memory of tensors saved", r.packed("peak"), words.percent, PERFORMANCE),
        Claim("packing-sasrec-time", "padded eager / turbogr, time", r.packed_times_faster, words.factor, PERFORMANCE),
    ),
    Benchmark(
        "sampling", "sampled softmax: loss and gradients, table of 1,000,000 x 128, 512 negatives for each of 1024",
        "sampling.py", ("--quick", "--malloc", "tuned"), ("--malloc", "tuned"),
        (
            Claim("sampling-fused", "best of Inductor / fused", r.sampling_times_faster("fused"), words.factor,
                  README),
            Claim("sampling-half", "best of Inductor / fused, FP16 copy of the table",
                  r.sampling_times_faster("fused FP16"), words.factor, README),
            Claim("sampling-shared", "eight positions share negatives: eight times as many, time over that of fused",
                  r.sampling_shared, words.factor, README),
        ),
    ),
    Benchmark(
        "offload", "what does not need parameters runs one batch ahead on a second core", "offload.py",
        ("--steps", "2", "--rounds", "2", "--groups", "4"), (),
        (
            Claim("offload-sampling", "negatives drawn in the graph / drawn ahead, time of a step",
                  r.ahead("sampling", "in the graph"), words.factor, README),
            Claim("offload-packing", "rows of packing found before the step / ahead, time of a step",
                  r.ahead("packing", "before"), words.factor, SAMPLING),
        ),
    ),
    Benchmark(
        "overlap", "two ranks, 20 ms of injected latency for each collective, compute that sleeps", "overlap.py",
        ("--compute-by", "sleep", "--rounds", "2"), ("--compute-by", "sleep"),
        (
            Claim("overlap-cut", "exposed communication hidden behind compute", r.at("summary", "step median", "cut"),
                  words.percent, README, "all-to-all 75.9 % less"),
        ),
    ),
    Benchmark(
        "pipeline", "two ranks, sharded table, 15 ms of injected latency for each of four exchanges, 60 ms of compute",
        "pipeline.py", ("--rounds", "1", "--steps", "3", "--latency", "0.002", "--compute", "0.005"), (),
        (
            Claim("pipeline-prefetch", "every exchange waited for / prefetch, exact", r.pipelined("prefetch"),
                  words.factor, SCALING),
            Claim("pipeline-semi-async", "every exchange waited for / semi-async, opt-in", r.pipelined("semi-async"),
                  words.factor, SCALING),
        ),
    ),
    Benchmark(
        "balance", "imbalance between 512 ranks, log-normal lengths cut at 4096, 32 sequences each", "balance.py",
        ("--draws", "1", "--window", "2"), (),
        (
            Claim("balance-given", "as drawn", r.imbalance("given"), words.percent, README, "imbalance 47 %"),
            Claim("balance-best", "balanced, one step at a time", r.imbalance("best"), lambda v: words.percent(v, 2),
                  README, "imbalance 2.4 %"),
            Claim("balance-seconds", "planning a step, processor time", r.imbalance("seconds"), words.seconds_text,
                  SCALING),
        ),
    ),
    Benchmark(
        "analysis", "what row analysis and packing add to compiling, HSTU", "analysis_time.py",
        ("--models", "hstu", "--layers", "1", "2", "--rounds", "1"), ("--models", "hstu", "--layers", "1", "8"),
        (Claim("analysis-layer", "for each layer", r.seconds_a_layer, words.seconds_text, PERFORMANCE),),
    ),
    Benchmark(
        "overhead", "a model in which no pass fires, both by Inductor", "overhead.py",
        ("--rounds", "1", "--steps", "3", "--layers", "1"), ("--rounds", "3"),
        (
            Claim("overhead-step", "turbogr / Inductor, time of a step", r.overhead("step"), words.factor, PERFORMANCE),
            Claim("overhead-compile", "turbogr / Inductor, cold compile", r.overhead("cold"), words.factor,
                  PERFORMANCE),
        ),
    ),
    Benchmark(
        "quality", "HR@10 on generated data, 3 seeds, all opt-in features, against padded eager in fp32", "quality.py",
        ("--eager", "--seeds", "1", "--steps", "3"), ("--eager", "--seeds", "3"),
        (
            Claim("quality-exact", "lost by turbogr, default passes", r.quality_lost("turbogr, exact, fp32"), _points,
                  PERFORMANCE),
            Claim("quality-all", "lost with all opt-in features", r.quality_lost("turbogr, all features"), _points,
                  README),
            Claim("quality-noise", "deviation of padded eager between seeds", r.quality_noise, _points, README),
        ),
    ),
    Benchmark(
        "memory", "HSTU with 0.2 B dense parameters, batches of 8 x 1024, bf16 storage, one process", "turbogr",
        ("train", "--size", "tiny", "--steps", "3", "--compare-memory", "--quiet"),
        ("train", "--size", "large", "--storage", "bf16", "--steps", "3", "--compare-memory", "--quiet"),
        (
            Claim("memory-peak", "peak of a training step", r.at("compared", "turbogr", "peak"), words.byte_text,
                  README),
            Claim("memory-eager", "times as much needed by padded eager", r.at("compared", "ratio"), words.factor,
                  README,
                  "memory 70 % less"),
            Claim("memory-mfu", "share of the speed of a matrix product", r.at("mfu"), words.percent, README,
                  "MFU 54.71 %"),
        ),
    ),
    Benchmark(
        "simulate", "up to 1024 Ascend 910B2, every feature on; nothing has run on an NPU", "turbogr",
        ("simulate", "--devices", "8,16", "--steps", "1"), ("simulate",),
        (
            Claim("simulate-naive", "utilisation, everything one after another", r.simulated("naive", "utilisation"),
                  words.percent, SCALING, provenance=SIMULATED),
            Claim("simulate-utilisation", "utilisation", r.simulated("+ semi-async", "utilisation"),
                  words.percent, README, "NPU utilisation 94 %", SIMULATED),
            Claim("simulate-scaling", "throughput per device over that of 8 devices",
                  r.simulated("+ semi-async", "scaling"), lambda v: f"{v:.3f}", README, "scaling 0.97", SIMULATED),
        ),
    ),
)  # fmt: skip
