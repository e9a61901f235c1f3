"""Does quality suffer? HR@10 over seeds: padded eager in fp32 against turbogr with everything opt-in on.

    python benchmarks/quality.py [--seeds 3] [--steps 300] [--out FOLDER] [--json FILE]

A seed decides parameters, batches and draws; data are the same for all. Each line is a run of its own with the whole
catalogue ranked for users whose last item was held out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from turbogr_compile.training.config import Config
from turbogr_compile.training.data import generate
from turbogr_compile.training.loop import train

EAGER, EXACT = "padded eager, fp32", "turbogr, exact, fp32"
WAYS = {
    EAGER: {"backend": "eager"},
    EXACT: {},
    "turbogr, all features": {"features": "all"},
    "turbogr, all features, bf16 storage": {"features": "all", "storage": "bf16"},
}


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--seeds", type=int, default=3)
    words.add_argument("--steps", type=int, default=250)
    words.add_argument("--model", default="hstu")
    words.add_argument("--size", default="tiny")
    words.add_argument("--eager", action="store_true", help="also padded eager, which takes longer")
    words.add_argument("--out", type=Path, help="keep the runs in this folder")
    words.add_argument("--json", type=Path, help="write HR@10 of every run to this file")
    options = words.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        out = options.out or Path(scratch)
        preset = Config.read({"size": options.size})
        data = generate(out / "data", users=preset.users, items=preset.items, mean_length=preset.mean_length)
        ways = {name: way for name, way in WAYS.items() if options.eager or name != EAGER}
        found: dict[str, list[float]] = {name: [] for name in ways}
        for seed in range(options.seeds):
            for name, way in ways.items():
                found[name].append(quality(options, way, seed, data, out))
        if options.out:
            (out / "quality.json").write_text(json.dumps(found, indent=1))
        if options.json:
            options.json.write_text(json.dumps(found, indent=1))
    base = found[EAGER if options.eager else EXACT]
    print(f"{options.model} {options.size}, {options.steps} steps, {options.seeds} seeds: HR@10, mean ± deviation")
    for name, values in found.items():
        print(f"  {name:36s} {told(values)}   {statistics.mean(values) - statistics.mean(base):+.4f}")


def quality(options: argparse.Namespace, way: dict[str, str], seed: int, data: Path, out: Path) -> float:
    shared = {"model": options.model, "size": options.size, "steps": options.steps, "save_every": 0, "data": str(data)}
    config = Config.read({**shared, "seed": seed, "threads": 1, **way})
    name = "-".join(["run", *map(str, way.values()), str(seed)])
    found = train(config, out / name, quiet=True).summary["hr@10"]
    print(f"{name}: {found:.4f}", flush=True)
    return found


def told(values: list[float]) -> str:
    return f"{statistics.mean(values):.4f} ± {statistics.stdev(values) if len(values) > 1 else 0:.4f}"


if __name__ == "__main__":
    main()
