"""turbogr's CPU kernels against what people use without them, in one command.

    python benchmarks/kernels.py [--only attention,softmax] [--quick] [--json results.json] [--html results.html]

Tables (--only): {tables}.

Every table is measured in processes of its own: under glibc's default malloc and under one that keeps large blocks
("tuned"; --malloc), with 1 thread by processor time and with 2 by the clock on the wall (--threads). Inside a process,
ways take turns in rotating order, results are compared before anything is timed, and the speed of a matrix product is
taken in the same rounds: MFU is FLOPs of packed rows and causal pairs, over time, over that. Batches are heavy-tailed:
log-normal lengths, 30 % of the padded positions hold an item.

A full run takes about 25 minutes and wants the machine for itself; --quick takes about 2 for a first look. Meta's
reference joins in where its checkout is given (--meta PATH, or META_GR in the environment).
"""

from __future__ import annotations

import argparse
import difflib
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attention
import chart
import report
import row_ops
import steps
import torch
from measure import MALLOC, Neighbours, machine, say
from plan import SIZES, Disagreement, Settings, Table

from turbogr_compile.kernels import state

TABLES = {table.name: table for table in (*attention.TABLES, *row_ops.TABLES, *steps.TABLES)}


def main() -> None:
    options = parse()
    if options.cold:
        number, _, way = options.cold.partition(":")
        print(json.dumps(steps.cold_compile(int(number), way, Settings(options.size))))
    elif options.measure:
        measure_one(options)
    else:
        run_all(options)


# --- options -----------------------------------------------------------------------------------------


def parse() -> argparse.Namespace:
    words = argparse.ArgumentParser(
        prog="kernels.py",
        description=(__doc__ or "").format(tables=", ".join(TABLES)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    words.add_argument("--only", metavar="TABLES", help="names of tables, by comma")
    words.add_argument("--threads", help="numbers of threads, by comma; 1,2 unless said")
    words.add_argument("--malloc", help="tuned, default or both, by comma; both unless said")
    words.add_argument("--quick", dest="size", action="store_const", const="quick", default="full", help="a first look")
    words.add_argument("--meta", type=Path, help="checkout of meta-recsys/generative-recommenders")
    words.add_argument("--json", type=Path, help="write all samples to this file")
    words.add_argument("--html", type=Path, help="write a chart to this file")
    words.add_argument("--size", choices=SIZES, help=argparse.SUPPRESS)
    words.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)  # here, one table, into --json
    words.add_argument("--cold", help=argparse.SUPPRESS)  # here, one compilation
    options = words.parse_args()
    quick = options.size != "full"
    options.only = one_of("table", options.only, list(TABLES))
    options.malloc = one_of("malloc", options.malloc, ["tuned"] if quick else list(MALLOC), list(MALLOC))
    options.threads = thread_counts(options.threads, quick)
    options.meta = meta_checkout(options.meta)
    for path in filter(None, (options.json, options.html)):
        if not path.parent.is_dir():
            sys.exit(f"kernels.py: cannot write {path}: there is no directory {path.parent}")
    return options


def one_of(what: str, given: str | None, default: list[str], known: list[str] | None = None) -> list[str]:
    known = known or default
    names = [name.strip() for name in given.split(",")] if given else default
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            sys.exit(f"kernels.py: unknown {what} {name!r}{hint}; known: {', '.join(known)}")
    return names


def thread_counts(given: str | None, quick: bool) -> list[int]:
    cores = machine()["cores"]
    if given is None:
        most = min(2, cores)
        return [most] if quick else sorted({1, most})
    for number in given.split(","):
        if not number.strip().isdecimal() or not 1 <= int(number) <= cores:
            sys.exit(f"kernels.py: --threads takes numbers from 1 to {cores}, the cores at hand; got {number!r}")
    return sorted({int(number) for number in given.split(",")})


def meta_checkout(given: Path | None) -> Path | None:
    path = given or (Path(os.environ["META_GR"]) if os.environ.get("META_GR") else None)
    if path is not None and not (path / attention.META_FILE).is_file():
        source = "--meta" if given else "META_GR"
        sys.exit(f"kernels.py: {source} is no checkout of generative-recommenders: no {path / attention.META_FILE}")
    return path


# --- all tables, each in processes of its own --------------------------------------------------------


def run_all(options: argparse.Namespace) -> None:
    kernels = state()
    facts = {**machine(), "kernels": f"for {kernels['isa']} by {kernels['compiler'] or 'no compiler'}"}
    results: dict[str, Any] = {"machine": facts, "size": options.size, "runs": []}
    print(report.about(results["machine"]), end="\n\n", flush=True)
    began, failed = time.perf_counter(), []
    for table, malloc, threads in conditions(options):
        say(f"{time.perf_counter() - began:5.0f} s  {table.name}, {malloc} malloc, {threads} threads")
        run = in_own_process(table, malloc, threads, options)
        if run is None:
            failed.append(f"{table.name} ({malloc} malloc, {threads} threads)")
            continue
        results["runs"].append(run)
        print(report.text(report.sheet(run)), flush=True)
        write(results, options)
    for shown in report.allocator(results["runs"]):
        print(report.text(shown))
    say(f"{time.perf_counter() - began:5.0f} s in all")
    if failed:
        sys.exit(f"kernels.py: no figures for {', '.join(failed)}: the reasons are above")


def conditions(options: argparse.Namespace) -> Iterator[tuple[Table, str, int]]:
    for name in options.only:
        table = TABLES[name]
        if table.once:
            yield table, table.once, max(options.threads)
            continue
        for malloc in options.malloc:
            for threads in options.threads:
                yield table, malloc, threads


def in_own_process(table: Table, malloc: str, threads: int, options: argparse.Namespace) -> dict[str, Any] | None:
    """None where it failed, and has said why."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_") and k != "GLIBC_TUNABLES"}
    # The reference in place of a kernel would be measured without a word.
    environment = {"TURBOGR_KERNELS": "required", **inherited, **MALLOC[malloc], "OMP_NUM_THREADS": str(threads)}
    with tempfile.TemporaryDirectory() as folder:
        into = Path(folder) / "run.json"
        command = [sys.executable, __file__, "--measure", "--only", table.name, "--malloc", malloc]
        command += ["--threads", str(threads), "--size", options.size, "--json", str(into)]
        command += ["--meta", str(options.meta)] if options.meta else []
        done = subprocess.run(command, env=environment)
        return json.loads(into.read_text()) if done.returncode == 0 else None


def write(results: dict[str, Any], options: argparse.Namespace) -> None:
    """After each table, so that an interrupted run leaves what it has."""
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    if options.html:
        options.html.write_text(chart.html(results), encoding="utf-8")


# --- one table, here ---------------------------------------------------------------------------------


def measure_one(options: argparse.Namespace) -> None:
    (name,), (malloc,), (threads,) = options.only, options.malloc, options.threads
    table = TABLES[name]
    warnings.filterwarnings("ignore")
    logging.getLogger("torch").setLevel(logging.ERROR)  # nested tensors tell at length why they cannot
    torch.set_num_threads(threads)
    neighbours = Neighbours()
    try:
        groups = list(table.results(Settings(options.size, threads, malloc, options.meta)))
    except Disagreement as error:
        sys.exit(f"kernels.py: {name}: {error}")
    described = {field: getattr(table, field) for field in ("title", "ours", "against", "about", "unit")}
    run = {"table": name, "malloc": malloc, "threads": threads, "neighbours": neighbours.share()}
    run |= {**described, "groups": groups}
    options.json.write_text(json.dumps(run))


if __name__ == "__main__":
    main()
