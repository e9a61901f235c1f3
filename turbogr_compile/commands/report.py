"""`turbogr report`: one page about run folders."""

from __future__ import annotations

import argparse

from .common.output import show

SUMMARY = "write one page about run folders: curves, speed, memory, quality, remarks"


def arguments(command: argparse.ArgumentParser) -> None:
    from ..training.report.command import add_arguments

    add_arguments(command)


def run(options: argparse.Namespace) -> int:
    from ..training.report.command import report

    page = report(options)
    show(options, {"page": str(page)}, str(page))
    return 0
