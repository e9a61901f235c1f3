"""What checks of ops cost in a training step of the demo's size.

    python benchmarks/checks.py [--batches 100] [--each]

Every batch is stepped four times in turns, twice with checks and twice without any, so that whatever else the machine
does hits both alike; the time is processor time of the thread. Then checks are timed where they are made, by medians on
the wall. That tells more where differences of whole steps drown in noise, and counts for checks what kernels would wait
for in their place: caches that are cold. `entrance` is what a graph asks of its inputs; an op that is named asks for
itself, and `reference` says that there is no kernel for its dtype.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import turbogr_compile as turbogr
from turbogr_compile.kernels.declare import CONTRACTS
from turbogr_compile.runtime.entrance.gate import Gate
from turbogr_compile.training import build
from turbogr_compile.training.compiled import Loss
from turbogr_compile.training.config import Config
from turbogr_compile.training.data import Batches
from turbogr_compile.training.memory import keep_freed

# Those of examples/demo.py.
SETTINGS = {
    "model": "hstu", "size": "small", "dim": 64, "heads": 2, "layers": 2, "max_len": 256, "batch": 16, "negatives": 64,
    "users": 2000, "items": 1000, "mean_length": 60.0,
}  # fmt: skip
WARM_UP = 25  # steps: the first call compiles, some more are watched
MICRO = 1e6

Step = Callable[[Mapping[str, Tensor]], None]


def step_and_batches(folder: Path) -> tuple[Step, Iterator[Mapping[str, Tensor]]]:
    config = Config.read(SETTINGS)
    histories = build.histories(config, folder / "data")
    batches = Batches(histories, config.batch, config.max_len, 0, config.batch_order, 0, 1)
    torch.manual_seed(0)
    model = build.recommender(config, histories.catalogue)
    table = model.items.weight
    turbogr.row_gradients(model, ["items"])
    dense = torch.optim.AdamW([p for p in model.parameters() if p is not table], fused=True)
    optimizers, loss = (dense, turbogr.RowWiseAdagrad(model, lr=2e-2)), Loss(model, config)

    def step(batch: Mapping[str, Tensor]) -> None:
        loss(batch).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    return step, batches.forever()


@contextmanager
def replaced(around: Callable[[str, Callable[..., Any], Any], Callable[..., Any]]) -> Iterator[None]:
    """Each check by what `around` makes of its name, itself and what it returns where nothing is wrong."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(Gate, "passes", around("entrance", Gate.passes, True)))
        for name, contract in CONTRACTS.items():
            for kind in ("before_kernel", "check"):
                shown = name if kind == "before_kernel" else f"{name}, reference"
                stack.enter_context(mock.patch.object(contract, kind, around(shown, getattr(contract, kind), None)))
        yield


def in_turns(step: Step, batches: Iterator[Mapping[str, Tensor]], count: int) -> tuple[list[float], list[float]]:
    """Seconds of a step with and without checks, for each batch."""
    found: tuple[list[float], list[float]] = [], []
    bare = 0

    def around(name: str, check: Callable[..., Any], fine: Any) -> Callable[..., Any]:
        return lambda *arguments: fine if bare else check(*arguments)

    with replaced(around):
        for number, batch in enumerate(islice(batches, count)):
            taken = [0.0, 0.0]
            for bare in (number % 2, 1 - number % 2, 1 - number % 2, number % 2):
                began = time.thread_time()
                step(batch)
                taken[bare] += (time.thread_time() - began) / 2
            for seconds, one in zip(found, taken, strict=True):
                seconds.append(one)
    return found


def timed(
    step: Step, batches: Iterator[Mapping[str, Tensor]], count: int
) -> tuple[list[float], dict[Any, list[float]]]:
    """Processor time of steps, and seconds of each check in them by its number and name."""
    seen: list[tuple[str, float]] = []

    def around(name: str, check: Callable[..., Any], fine: Any) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            began = time.perf_counter()
            found = check(*arguments)
            seen.append((name, time.perf_counter() - began))
            return found

        return run

    steps, checks = [], defaultdict(list)
    with replaced(around):
        for batch in islice(batches, count):
            seen.clear()
            began = time.thread_time()
            step(batch)
            steps.append(time.thread_time() - began)
            for number, (name, seconds) in enumerate(seen):
                checks[number, name].append(seconds)
    return steps, checks


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--batches", type=int, default=100)
    arguments.add_argument("--each", action="store_true", help="print each check")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    keep_freed()
    with tempfile.TemporaryDirectory() as folder:
        step, batches = step_and_batches(Path(folder))
        for batch in islice(batches, WARM_UP):
            step(batch)
        checked, bare = in_turns(step, batches, options.batches)
        steps, checks = timed(step, batches, options.batches)
    differences = [a - b for a, b in zip(checked, bare, strict=True)]
    low, middle, high = (x * MICRO for x in statistics.quantiles(differences, n=4))
    whole = statistics.median(checked) * MICRO
    print(f"in turns   step {whole:,.0f} us of processor time, checks {middle:,.0f} us (quartiles {low:,.0f} to "
          f"{high:,.0f}): {middle / whole:.2%} of it")  # fmt: skip
    each = {key: statistics.median(seconds) * MICRO for key, seconds in checks.items()}
    whole, total = statistics.median(steps) * MICRO, sum(each.values())
    print(f"timed      step {whole:,.0f} us of processor time, {len(each)} checks {total:,.0f} us: {total / whole:.2%}")
    if options.each:
        for (_, name), micros in each.items():
            print(f"  {micros:8.1f} us  {name}")


if __name__ == "__main__":
    main()
