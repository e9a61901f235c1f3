"""`turbogr bench`: every figure the project claims, on the machine at hand."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from ...errors import OptionError
from ...files import read_json, reading
from . import views
from .catalogue import BENCHMARKS
from .run import FORMAT, SIZES, choose, failed, machine, run
from .worth import measured


def add_arguments(command: argparse.ArgumentParser) -> None:
    names = ", ".join(b.name for b in BENCHMARKS)
    command.add_argument("--size", choices=SIZES, default="full",
                         help="full: what the README's table is made of, about an hour on a quiet machine; "
                         "tiny: does everything run, about 5 minutes")  # fmt: skip
    command.add_argument("--only", action="append", default=[], metavar="NAME", help=f"some of them: {names}")
    command.add_argument("--json", type=Path, metavar="FILE", help="write everything there, samples included")
    command.add_argument("--keep", action="store_true",
                         help="with --json of an earlier run: measure --only some again, the others stay")  # fmt: skip
    command.add_argument("--html", type=Path, metavar="FILE", help="write a page there")
    command.add_argument("--markdown", action="store_true", help="print the README's table")
    command.add_argument("--worth", action="store_true",
                         help="measure nothing but the prices of option 'worth', and print them")  # fmt: skip
    command.add_argument("--from", dest="earlier", type=Path, metavar="FILE",
                         help="measure nothing: show what an earlier run wrote with --json")  # fmt: skip


def bench(options: argparse.Namespace) -> int:
    """0, or 1 where a benchmark failed."""
    if options.worth and options.earlier:
        raise OptionError("--worth measures prices, and --from measures nothing: one of them")
    if options.worth:
        sys.stdout.write(f"{measured()}\n")
        return 0
    only = [name for text in options.only for name in text.split(",")]
    chosen = choose(only)
    # What asks to end is an interruption like any other: benchmarks must not outlive it.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    others = _others(options, {b.name for b in chosen}) if options.keep else []
    write = _writer(options, others)
    results = read(options.earlier) if options.earlier else run(chosen, options.size, _say, write)
    if options.earlier and only:
        names = {b.name for b in chosen}
        with reading(options.earlier):
            results = {**results, "benchmarks": [b for b in results["benchmarks"] if b["name"] in names]}
    with reading(options.earlier) if options.earlier else nullcontext():
        results = write(results)
        shown = views.markdown(results) if options.markdown else views.text(results)
        status = 1 if failed(results) else 0
    sys.stdout.write(shown.rstrip("\n") + "\n")
    return status


def _others(options: argparse.Namespace, again: set[str]) -> list[dict[str, Any]]:
    """What an earlier run on this machine measured, but for what is measured again."""
    if options.json is None or options.earlier:
        raise OptionError("--keep keeps what the file of --json has: turbogr bench --only NAME --json FILE --keep")
    earlier = read(options.json)
    if (earlier["size"], earlier["machine"]) != (options.size, machine()):
        raise OptionError(f"{options.json} was measured on another machine, with other versions or at another size")
    return [b for b in earlier["benchmarks"] if b["name"] not in again]


def _writer(options: argparse.Namespace, others: list[dict[str, Any]]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Writes the files that are asked for; after each benchmark, so that an interrupted run leaves what it has."""
    order = {b.name: i for i, b in enumerate(choose([]))}

    def write(results: dict[str, Any]) -> dict[str, Any]:
        if others:
            every = sorted([*others, *results["benchmarks"]], key=lambda b: order.get(b["name"], len(order)))
            results = {**results, "benchmarks": every}
        if options.json:
            views.write(options.json, json.dumps(results, indent=1) + "\n")
        if options.html:
            views.write(options.html, views.page(results))
        return results

    return write


def read(path: Path) -> dict[str, Any]:
    try:
        found = read_json(path)
    except (OSError, ValueError) as error:
        raise OptionError(f"cannot read results from {path}: {error}") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT or "benchmarks" not in found:
        raise OptionError(f"{path} was not written by this version's `turbogr bench --json`: run it again")
    return found


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
