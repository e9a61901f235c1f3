"""`make fuzz-ops N=…`: calls of ops from their contracts, in a process of their own.

A process that dies has its last call reported, and another one goes on behind it. Every call follows from its seed:

    python -m tests.fuzz_ops --n 20000 --seed 7        # calls 7·2^32, 7·2^32 + 1, …
    python -m tests.fuzz_ops --case 30064771079        # one of them again
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import resource
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

SHIFT = 32
ROOM = 512 << 20  # bytes beyond those of the process: calls that ask for more must be refused, not served
LIMITS = ":max_allocation_size_mb=256:allocator_may_return_null=1"  # the same for the address sanitizer
UNSEEN = ":ignore_noninstrumented_modules=1"  # torch itself, and the OpenMP that it waits by


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--n", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=86_400.0)
    parser.add_argument("--case", type=int, help="one call, by its seed")
    parser.add_argument("--json", type=Path, help="a line about the run is added there")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--first", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case is not None:
        return _one(options.case)
    return _work(options) if options.worker else _watch(options)


def _one(case: int) -> int:
    from .calls import call
    from .judge import judge

    made = call(case)
    sys.stdout.write(f"{made.op} ({made.kind})\n" + "".join(f"  {_shown(x)}\n" for x in made.arguments))
    wrong = judge(made)
    sys.stdout.write(f"{wrong or 'right'}\n")
    return bool(wrong)


def _shown(x: object) -> str:
    import torch

    if isinstance(x, torch.Tensor):
        head = f"{x.dtype} {tuple(x.shape)} strides {x.stride()} on {x.device}"
        return head if x.is_meta or x.numel() > 12 else f"{head} {x.tolist()}"
    return repr(x)


# --- the process that makes the calls ----------------------------------------------------------------


def _work(options: argparse.Namespace) -> int:
    """Where it is stands in the file; what was wrong is printed, a line of JSON each."""
    import warnings

    from .calls import call
    from .judge import judge

    judge(call(0))  # what is loaded on first use is there
    warnings.simplefilter("ignore")
    if not os.environ.get("LD_PRELOAD"):  # sanitizers have limits of their own, and map all there is
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + ROOM, resource.RLIM_INFINITY))
    end = time.monotonic() + options.seconds
    counts: Counter[str] = Counter()
    with options.worker.open("r+b") as file, mmap.mmap(file.fileno(), 8) as place:
        for number in range(options.first, options.n):
            if time.monotonic() > end:
                break
            place[:8] = struct.pack("q", number)
            case = (options.seed << SHIFT) + number
            made = call(case)
            wrong = judge(made)
            counts[f"{made.op} {made.kind}"] += 1
            if wrong:
                sys.stdout.write(json.dumps({"case": case, "op": made.op, "kind": made.kind, "wrong": wrong}) + "\n")
                sys.stdout.flush()
        else:
            number = options.n
    sys.stdout.write(json.dumps({"counts": counts, "next": number}) + "\n")
    return 0


# --- the process that watches ------------------------------------------------------------------------


def _watch(options: argparse.Namespace) -> int:
    start, first, finds = time.monotonic(), 0, []
    counts: Counter[str] = Counter()
    with tempfile.NamedTemporaryFile() as place:
        while first < options.n and (left := options.seconds - (time.monotonic() - start)) > 0:
            place.seek(0)
            place.write(struct.pack("q", first))
            place.flush()
            command = [sys.executable, "-m", "tests.fuzz_ops", "--worker", place.name, "--first", str(first)]
            command += ["--n", str(options.n), "--seed", str(options.seed), "--seconds", str(left)]
            environment = {
                **os.environ,
                "ASAN_OPTIONS": os.environ.get("ASAN_OPTIONS", "detect_leaks=0") + LIMITS,
                "TSAN_OPTIONS": os.environ.get("TSAN_OPTIONS", "halt_on_error=1") + LIMITS + UNSEEN,
            }
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", env=environment)
            lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
            finds += [line for line in lines if "wrong" in line]
            if lines and "counts" in lines[-1]:
                counts.update(lines[-1]["counts"])
                first = lines[-1]["next"]
                break
            at = struct.unpack("q", Path(place.name).read_bytes()[:8])[0]
            finds.append({"case": (options.seed << SHIFT) + at, "wrong": f"exit status {done.returncode}",
                          "said": done.stderr[-300:]})  # fmt: skip
            counts["before a process died"] += at - first + 1
            first = at + 1
            if len(finds) > 50:
                break
    for find in finds[:20]:
        sys.stdout.write(json.dumps(find)[:500] + "\n")
    seconds = time.monotonic() - start
    calls = sum(counts.values())
    named = len({name.split()[0] for name in counts})
    sys.stdout.write(f"{calls} calls of {named} ops, {len(finds)} finds, {seconds:.0f} s\n")
    if options.json:
        kinds = Counter()
        for name, count in counts.items():
            kinds[name.rpartition(" ")[2]] += count
        line = {"seed": options.seed, "calls": calls, "kinds": kinds, "finds": len(finds), "seconds": round(seconds)}
        with options.json.open("a") as file:
            file.write(json.dumps(line) + "\n")
    return bool(finds)


if __name__ == "__main__":
    sys.exit(main())
