"""`turbogr run`: a pipeline on a function."""

from __future__ import annotations

import argparse
from pathlib import Path

from .common.model import compiled, model_arguments
from .common.output import show

SUMMARY = "run a pipeline on a function"


def arguments(command: argparse.ArgumentParser) -> None:
    model_arguments(command)
    command.add_argument("--dump", metavar="DIR", type=Path, help="write dumps and the viewer page there")


def run(options: argparse.Namespace) -> int:
    report = compiled(options, dump=options.dump, on_error="raise")
    page = f"\n\nviewer: {options.dump / 'index.html'}" if options.dump else ""
    show(options, list(report.records), str(report) + page)
    return 0
