"""`turbogr report`: one page about run folders."""

from __future__ import annotations

import argparse
from pathlib import Path

from .page import write_report


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folders that `turbogr train` wrote")
    command.add_argument("--html", type=Path, default=Path("report.html"), metavar="FILE", help="default: report.html")
    command.add_argument("--baseline", metavar="NAME", help="the run that others are compared with; default: eager")
    command.add_argument("--title", default="Training with turbogr")


def report(options: argparse.Namespace) -> Path:
    return write_report(options.runs, options.html, title=options.title, baseline=options.baseline)
