"""`turbogr bench`: every figure that the project claims."""

from __future__ import annotations

import argparse

SUMMARY = "measure every figure that the project claims, on this machine"


def arguments(command: argparse.ArgumentParser) -> None:
    from ..training.bench.command import add_arguments

    add_arguments(command)


def run(options: argparse.Namespace) -> int:
    from ..training.bench.command import bench

    return bench(options)
