"""`turbogr bisect`: the pass and the rewrite that changed the numbers."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from ..errors import OptionError
from ..files import read_json
from .common.model import compiled, model_arguments, run_again, settings_of
from .common.output import FAILED, show
from .common.progress import progress

SUMMARY = "find the pass and the rewrite that changed the numbers"


def arguments(command: argparse.ArgumentParser) -> None:
    model_arguments(command, needed=False)
    command.add_argument("--fast", action="store_true", help="binary search; trusts that no later pass masks the error")
    command.add_argument("--oracle", metavar="CMD", help="instead of a model, a command that fails on wrong numbers; "
                         "it is run with TURBOGR_STOP_AFTER and TURBOGR_PIPELINE set")  # fmt: skip


def run(options: argparse.Namespace) -> int:
    from ..check.bisection import Snapshots, find_culprits

    options.verify = options.verify or "fast"  # a difference is what is looked for, not a reason to stop

    if options.oracle:
        return _by_command(options)
    if options.model is None:
        raise OptionError("name what to bisect as file.py:function, or give a command with --oracle")
    snapshots = Snapshots()
    compiled(options, on_error="raise", instruments=[snapshots])
    with progress("comparing") as say:
        found = find_culprits(snapshots, options.fast, say)
    again = run_again(options)
    data = [
        {"graph": f.graph, "pass": f.spec, "site": f.site, "rewrite": f.rewrite, "rewrites": f.rewrites, "rule": f.rule,
         "line": str(f.line or ""), "what": f.verdict.text, "before": f.verdict.before, "after": f.verdict.after,
         "good": f"{again} --stop-after {f.good}", "bad": f"{again} --stop-after {f.bad}"}
        for f in found
    ]  # fmt: skip
    text = "\n\n".join(
        f"{f}\n  good: {again} --stop-after {f.good}\n  bad:  {again} --stop-after {f.bad}" for f in found
    )
    stops = sum(len(kept) for _, _, kept in snapshots.runs)
    same = f"numbers are the same after each of the {stops} passes that changed a graph"
    show(options, data, text or same)
    return FAILED if found else 0


def _by_command(options: argparse.Namespace) -> int:
    """Pass and rewrite after which the user's command begins to fail."""
    from ..check.bisection import first_bad
    from ..pipeline.options import Options

    command = shlex.split(options.oracle)
    if shutil.which(command[0]) is None:
        raise OptionError(f"--oracle: no command {command[0]!r}")
    environment = dict(os.environ)
    if options.pipeline is not None or options.add or options.without:
        settings = {k: v for k, v in settings_of(options).items() if k != "dynamic"}
        environment["TURBOGR_PIPELINE"] = Options.read(settings).plan().spec

    def fails(stop_after: str) -> bool:
        say(f"TURBOGR_STOP_AFTER={stop_after} {options.oracle}")
        env = {**environment, "TURBOGR_STOP_AFTER": stop_after}
        return subprocess.run(command, env=env, stdout=subprocess.DEVNULL).returncode != 0

    with progress(f"running {options.oracle}"), tempfile.TemporaryDirectory() as folder:
        names = _passes_of_program(command, environment, Path(folder) / "dump")
    with progress("bisecting") as say:
        if fails(f"{names[0]}:0"):
            show(options, {"pass": None}, "the command fails with no pass run at all: not turbogr's passes")
            return FAILED
        guilty = first_bad(len(names), lambda i: fails(names[i]), fast=True)
        if guilty is None:
            show(options, {"pass": None}, "the command succeeds with all passes")
            return 0
        name = names[guilty]
        high = next((k for k in (1 << i for i in range(12)) if fails(f"{name}:{k}")), 0)
        low = high // 2
        rewrite = high and low + 1 + (first_bad(high - low, lambda i: fails(f"{name}:{low + 1 + i}"), fast=True) or 0)
    good = f"TURBOGR_STOP_AFTER={name}:{rewrite - 1 if rewrite else 0}"
    bad = f"TURBOGR_STOP_AFTER={name}" + (f":{rewrite}" if rewrite else "")
    where = f"{name}, rewrite {rewrite}" if rewrite else f"{name}, outside of its rewrites"
    show(options, {"pass": name, "rewrite": rewrite, "good": good, "bad": bad},
           f"{where}\n  good: {good} {options.oracle}\n  bad:  {bad} {options.oracle}")  # fmt: skip
    return FAILED


def _passes_of_program(command: list[str], environment: dict[str, str], folder: Path) -> list[str]:
    """Names of the passes that the program really runs: it may choose its pipeline itself."""
    subprocess.run(command, env={**environment, "TURBOGR_DUMP": str(folder)}, stdout=subprocess.DEVNULL)
    if not (folder / "run.json").is_file():
        raise OptionError("--oracle: the command compiled nothing with backend 'turbogr', or sets a dump of its own")
    records = [read_json(f, dict) for f in folder.glob("rank*/*/record.json")]
    ordered: list[dict[str, Any]] = max((r["order"]["passes"] for r in records), key=len, default=[])
    return [p["name"] for p in ordered if p["present"]]
