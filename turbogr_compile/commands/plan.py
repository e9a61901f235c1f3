"""`turbogr plan`: what a training run would need, before it runs."""

from __future__ import annotations

import argparse

from .common.output import show

SUMMARY = "what a training run would need of memory and disk, by part, and what this machine has"


def arguments(command: argparse.ArgumentParser) -> None:
    from ..training.command import add_arguments

    add_arguments(command)
    command.add_argument("--ranks", type=int, default=1, metavar="N", help="processes that share the item table (1)")


def run(options: argparse.Namespace) -> int:
    from ..training.command import plan

    show(options, *plan(options))
    return 0
