"""Running benchmarks, each in a process of its own. One that fails says why, and the others still run."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch

from ...errors import OptionError, did_you_mean
from ...registry import ROOMS
from .catalogue import BENCHMARKS, Benchmark

FORMAT = 1
SIZES = ("tiny", "full")
SCRIPTS = ROOMS["benchmarks"]
# Tiny sizes are two at once, on machines that may be busy: threads that wait for each other cost more than they save.
ENVIRONMENT: dict[str, dict[str, str]] = {
    "tiny": {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"},
    "full": {},
}
TOLD = 400  # characters of an error
LONGEST = {"tiny": 1200.0, "full": 7200.0}  # seconds of one benchmark


def choose(only: Sequence[str]) -> list[Benchmark]:
    """All, or those that are named, by themselves or by one of their claims."""
    if not only:
        return list(BENCHMARKS)
    owners = {claim.id: b for b in BENCHMARKS for claim in b.claims} | {b.name: b for b in BENCHMARKS}
    chosen = []
    for name in only:
        if name not in owners:
            known = ", ".join(b.name for b in BENCHMARKS)
            raise OptionError(f"no benchmark is named {name!r}{did_you_mean(name, owners)}; there are {known}")
        chosen.append(owners[name])
    return [b for b in BENCHMARKS if b in chosen]


def run(
    benchmarks: Sequence[Benchmark], size: str, say: Callable[[str], None], after: Callable[[dict[str, Any]], Any]
) -> dict[str, Any]:
    """Everything measured, as plain data; `after` gets what there is, each time. Tiny sizes run two at once."""
    results: dict[str, dict[str, Any]] = {}
    processes, pool = _Processes(), ThreadPoolExecutor(2 if size == "tiny" else 1)
    try:
        waiting = {pool.submit(run_one, b, size, processes): b for b in benchmarks}
        for done in as_completed(waiting):
            found = results[waiting[done].name] = done.result()
            state = "done" if found["error"] is None else f"FAILED: {found['error'].splitlines()[-1]}"
            say(f"[{len(results)}/{len(benchmarks)}] {found['name']}: {state} ({found['seconds']:.0f} s)")
            after(_together(benchmarks, results, size))
    finally:
        processes.end()
        pool.shutdown(cancel_futures=True)
    return _together(benchmarks, results, size)


def _together(benchmarks: Sequence[Benchmark], results: dict[str, Any], size: str) -> dict[str, Any]:
    done = [results[b.name] for b in benchmarks if b.name in results]
    return {"format": FORMAT, "size": size, "machine": machine(), "benchmarks": done}


def run_one(benchmark: Benchmark, size: str, processes: _Processes) -> dict[str, Any]:
    began = time.perf_counter()
    data, error = None, None
    with tempfile.TemporaryDirectory() as folder:
        try:
            data = _data_of(benchmark, size, Path(folder), processes)
        except _Failure as failure:
            error = str(failure)
    claims = []
    for claim in benchmark.claims:
        value, why = None, error
        if error is None:
            try:
                value = claim.read(data)
            except Exception as wrong:  # whatever the benchmark wrote, it is not what the catalogue expects
                why = f"cannot read {claim.id} from what {benchmark.script} wrote: {type(wrong).__name__}: {wrong}"
        claims.append({
            "id": claim.id, "what": claim.what, "value": value, "text": None if value is None else claim.show(value),
            "provenance": claim.provenance, "stated": claim.stated, "paper": claim.paper, "error": why,
        })  # fmt: skip
    return {
        "name": benchmark.name, "what": benchmark.what, "command": benchmark.command(size),
        "seconds": time.perf_counter() - began,
        "error": error or next((c["error"] for c in claims if c["error"]), None), "claims": claims, "data": data,
    }  # fmt: skip


class _Failure(Exception):
    """A benchmark ended without figures."""


def _data_of(benchmark: Benchmark, size: str, folder: Path, processes: _Processes) -> Any:
    """Its JSON: a script writes it to a file, a command of turbogr to standard output."""
    into = folder / "results.json"
    if benchmark.script == "turbogr":
        command = [sys.executable, "-m", "turbogr_compile", *benchmark.arguments(size), "--json"]
    else:
        command = [sys.executable, str(SCRIPTS / benchmark.script), *benchmark.arguments(size), "--json", str(into)]
    status, out, err = processes.run(command, folder, LONGEST[size], ENVIRONMENT[size])
    if status is None:
        raise _Failure(f"{benchmark.script} took longer than {LONGEST[size]:.0f} s and was ended")
    if status != 0:
        raise _Failure(f"{benchmark.script} ended with status {status}: {last_words(err) or last_words(out)}")
    try:
        return json.loads(out if benchmark.script == "turbogr" else into.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _Failure(f"{benchmark.script} wrote no JSON: {error}") from error


def last_words(text: str) -> str:
    """The last line that says something: of a traceback, its error."""
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    return lines[-1][:TOLD] if lines else ""


class _Processes:
    """Benchmarks start processes of their own: each has a session, so that all of it can be ended."""

    def __init__(self) -> None:
        self._alive: set[subprocess.Popen[str]] = set()
        self._ended = False

    def end(self) -> None:
        self._ended = True
        for process in list(self._alive):
            _end(process)

    def run(
        self, command: Sequence[str], folder: Path, longest: float, environment: dict[str, str]
    ) -> tuple[int | None, str, str]:
        if self._ended:
            return None, "", ""
        process = subprocess.Popen(
            command,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**environment, **os.environ},
        )
        self._alive.add(process)
        try:
            out, err = process.communicate(timeout=longest)
            return process.returncode, out, err
        except subprocess.TimeoutExpired:
            _end(process)
            process.communicate()
            return None, "", ""
        finally:
            self._alive.discard(process)


def _end(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def machine() -> dict[str, Any]:
    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return {
        "cpu": cpu, "cores": os.cpu_count(), "system": platform.system(), "python": platform.python_version(),
        "torch": torch.__version__,
    }  # fmt: skip


def failed(results: dict[str, Any]) -> list[dict[str, Any]]:
    return [b for b in results["benchmarks"] if b["error"] is not None]
