"""The training job at small size: padded eager and turbogr train side by side, and a page tells how it went.

    python examples/demo.py [--steps 200] [--out out]

Generates histories of users, trains the same unmodified padded HSTU twice on the same batches, in a process each, step
by step in turns, so that whatever else the machine does hits both alike. One thread computes; turbogr prepares its next
batch on another. Writes run folders to OUT/demo and the page to OUT/report/index.html.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import sys
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

WAYS = ("eager", "turbogr")
SETTINGS = {
    "model": "hstu", "size": "small", "dim": 64, "heads": 2, "layers": 2, "max_len": 256, "batch": 16, "negatives": 64,
    "dropout": 0.0, "evaluate_users": 500, "save_every": 0, "threads": 1,
}  # fmt: skip
USERS, ITEMS, MEAN_LENGTH = 2000, 1000, 60


class Turns:
    """One process at a time takes a step. The first step compiles, and is nobody's turn."""

    def __init__(self, context: Any, count: int, steps: int) -> None:
        self.steps = steps
        self.begun = context.Barrier(count)
        self.turns = [context.Semaphore(0) for _ in range(count)]

    def after_step(self, number: int, step: int) -> None:
        if step == 1:
            self.begun.wait()
            if number == 0:
                return
        else:
            self.turns[(number + 1) % len(self.turns)].release()
        if step < self.steps:
            self.turns[number].acquire()


def train_one(number: int, settings: dict[str, Any], out: Path, turns: Turns) -> None:
    if settings["backend"] == "turbogr":
        os.environ["TURBOGR_DUMP"] = str(out / "dump")  # what each pass did, for the viewer
    from turbogr_compile.training.config import Config
    from turbogr_compile.training.loop import train

    train(Config.read(settings), out, quiet=number > 0, after_step=lambda step: turns.after_step(number, step))


def side_by_side(data: Path, out: Path, steps: int) -> list[Path]:
    """Run folders, baseline first."""
    context = multiprocessing.get_context("spawn")
    turns = Turns(context, len(WAYS), steps)
    common = {**SETTINGS, "data": str(data), "steps": steps, "evaluate_every": max(steps // 4, 1)}
    started = []
    for number, way in enumerate(WAYS):
        process = context.Process(target=train_one, args=(number, {**common, "backend": way}, out / way, turns))
        process.start()
        started.append(process)
    left = {process.sentinel: process for process in started}
    while left:
        for sentinel in wait(list(left)):
            process = left.pop(sentinel)  # type: ignore[call-overload]
            process.join()
            if process.exitcode:
                for other in left.values():  # it would wait for its turn for ever
                    other.terminate()
                sys.exit(f"demo: {WAYS[started.index(process)]} failed; its reason is above")
    return [out / way for way in WAYS]


def summary(folders: list[Path]) -> str:
    """Both curves in a few lines, then what they cost."""
    from turbogr_compile.training.report import compare, read_run, words

    base, ours = (read_run(folder) for folder in folders)
    curves = dict(base.values("loss")), dict(ours.values("loss"))
    steps = sorted(curves[0])
    found = compare(ours, base)
    lines = ["", f"{'step':>6}  {base.name:>10}  {ours.name:>10}"]
    for step in sorted({steps[i * (len(steps) - 1) // 7] for i in range(8)}):
        lines.append(f"{step:>6}  {curves[0][step]:>10.6f}  {curves[1][step]:>10.6f}")
    lines += ["", f"largest difference  {words.scientific(found.largest_difference)} in {found.same_steps} steps"]
    for text, show, of in (
        ("time of a step", words.seconds_text, lambda run: run.seconds()),
        ("items a second", words.count, lambda run: run.tokens_per_second()),
        ("MFU", words.percent, lambda run: run.mfu()),
        ("peak memory", words.byte_text, lambda run: run.peak_memory()),
        ("HR@10", lambda v: words.percent(v, 2), lambda run: run.quality("hr@10")),
    ):
        lines.append(f"{text:18}  {base.name} {show(of(base))}, {ours.name} {show(of(ours))}")
    padding = words.percent(ours.padding())
    lines += [f"speed-up            {words.factor(found.speedup)}, of {padding} padding", "", "what was rewritten", ""]
    lines += [entry["text"] for entry in ours.facts.get("passes", [])[:1]]
    return "\n".join(lines)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--steps", type=int, default=200)
    arguments.add_argument("--out", type=Path, default=Path("out"))
    options = arguments.parse_args()
    if options.steps < 2:
        sys.exit("demo: --steps must be at least 2: the first one only compiles")
    os.environ["OMP_NUM_THREADS"] = str(SETTINGS["threads"])

    from turbogr_compile.training.data import generate
    from turbogr_compile.training.report import write_report

    folder = options.out / "demo"
    shutil.rmtree(folder, ignore_errors=True)
    data = generate(folder / "data", users=USERS, items=ITEMS, mean_length=MEAN_LENGTH, seed=0)
    folders = side_by_side(Path(data), folder, options.steps)
    print(summary(folders))
    page = write_report(folders, options.out / "report" / "index.html", title="HSTU, padded eager and turbogr")
    print(f"\nopen {page}")


if __name__ == "__main__":
    main()
