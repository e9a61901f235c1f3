"""`turbogr view`: the viewer page of a dump directory."""

from __future__ import annotations

import argparse
import webbrowser
from pathlib import Path

from ..errors import OptionError, TurbogrError
from ..files import reading
from .common.output import show
from .common.progress import progress

SUMMARY = "write the viewer page of a dump directory"


def arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("directory", type=Path, help="dump directory")
    command.add_argument("--open", action="store_true", help="open the page in the browser")


def run(options: argparse.Namespace) -> int:
    from ..show.view import write_view

    if not (options.directory / "run.json").is_file():
        raise OptionError(f"{str(options.directory)!r} is not a dump directory: no run.json in it")
    try:
        with progress("drawing"), reading(options.directory):
            page = write_view(options.directory)
    except TurbogrError as error:  # the dump is not one that can be shown
        raise OptionError(str(error)) from error
    show(options, {"page": str(page)}, str(page))
    if options.open:
        webbrowser.open(page.absolute().as_uri())
    return 0
