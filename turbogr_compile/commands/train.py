"""`turbogr train`: the main job."""

from __future__ import annotations

import argparse

from .common.output import INTERRUPTED, show

SUMMARY = "train a recommender: HSTU, SASRec or FuXi, on files or generated data"


def arguments(command: argparse.ArgumentParser) -> None:
    from ..training.command import add_arguments

    add_arguments(command)


def run(options: argparse.Namespace) -> int:
    from ..training.command import train

    data, text, interrupted = train(options)
    if text:
        show(options, data, text)
    return INTERRUPTED if interrupted else 0
