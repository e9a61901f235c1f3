"""The command line. Each module is a command: `SUMMARY`, `arguments(parser)` and `run(options)`, which gives the exit
status. Packages add commands through the entry-point group `turbogr.commands`.

Importing a command is cheap: torch and the compiler are imported by `run`, so that help and mistakes are answered at
once.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from ..errors import OptionError, PipelineError, TurbogrError, did_you_mean
from ..files import Damaged
from ..registry import Registry, version_of
from .common.output import FAILED, INTERRUPTED, WRONG_USE


def _load(imported: Any) -> ModuleType:
    """A module with a summary, arguments, and something to run."""
    right = isinstance(getattr(imported, "SUMMARY", None), str)
    if not right or not callable(getattr(imported, "arguments", None)) or not callable(getattr(imported, "run", None)):
        raise OptionError("a command is a module with SUMMARY (a text), arguments(parser) and run(options)")
    return imported


COMMANDS: Registry[ModuleType] = Registry("command", "turbogr.commands", _load, OptionError, "commands")


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0, 1 when a check failed or something was found, 2 when the command was wrong."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    _show_anything()
    try:
        if odd := next((word for word in given if "\0" in word), None):
            raise OptionError(f"no argument can hold a NUL, and {odd!r} does")
        options = parser(given).parse_args(given)
        return options.run(options)
    except (OptionError, PipelineError) as error:
        sys.stderr.write(f"turbogr: {error}\n")
        return WRONG_USE
    except TurbogrError as error:
        sys.stderr.write(f"turbogr: {error}\n")
        return FAILED
    except KeyboardInterrupt:
        sys.stderr.write("turbogr: interrupted\n")
        return INTERRUPTED
    except BrokenPipeError:  # `turbogr ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Damaged as error:
        sys.stderr.write(f"turbogr: {_one_line(error)}\n")
        return WRONG_USE
    except OSError as error:  # a file that is not there, not ours, or on a disk that is full
        where = f": {error.filename}" if error.filename else ""
        sys.stderr.write(f"turbogr: {error.strerror or error}{where}\n")
        return WRONG_USE if isinstance(error, _WRONG) else FAILED
    except MemoryError as error:
        sys.stderr.write(f"turbogr: out of memory{f': {_one_line(error)}' if str(error) else ''}\n")
        return FAILED


# What the file system says of a wrong argument; its other troubles are failures.
_WRONG = (FileNotFoundError, NotADirectoryError, IsADirectoryError, FileExistsError, PermissionError)


def _show_anything() -> None:
    """What a terminal has no letters for is shown by its number, as on stderr: names and files may hold any text."""
    if getattr(sys.stdout, "errors", "") == "strict" and hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def parser(given: Sequence[str]) -> argparse.ArgumentParser:
    """Of all commands; arguments only of those that are named, since some take long to list."""
    whole = _Parser(prog="turbogr", description="A compiler for generative recommenders.")
    whole.add_argument("--version", action=_Version, nargs=0, help="print the version and end")
    commands = whole.add_subparsers(title="commands", required=True, metavar="COMMAND")
    named = next((word for word in given if not word.startswith("-")), None)
    for name in COMMANDS.names():
        _add(commands, name, name == named)
    return whole


def _add(commands: Any, name: str, named: bool) -> None:
    try:
        module = COMMANDS.find(name)
    except TurbogrError:  # a package that is broken harms nobody who does not ask for it
        if named:
            raise
        return
    summary = module.SUMMARY.replace("%", "%%")
    command = commands.add_parser(name, help=summary, description=summary, conflict_handler="resolve")
    command.add_argument("--json", action="store_true", help="print data instead of text")
    if named:
        try:
            module.arguments(command)  # may want a --json of its own
        except Exception as error:
            raise TurbogrError(f"command '{name}' ({module.__name__}) cannot say what it takes: {error!r}") from error
    command.set_defaults(run=module.run)


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *given: Any) -> None:
        parser.exit(message=f"turbogr {version_of('turbogr') or 'of a checkout that is not installed'}\n")


class _Parser(argparse.ArgumentParser):
    """argparse, with the closest name for a mistyped command or flag."""

    def error(self, message: str) -> Any:
        if "invalid choice" in message and "'" in message:
            wrong = message.split("'")[1]
            message += did_you_mean(wrong, COMMANDS.names())
        if message.startswith("unrecognized arguments: --"):
            wrong = message.split()[2].partition("=")[0]
            message += did_you_mean(wrong, self.flags)
        super().error(message)

    @property
    def flags(self) -> list[str]:
        """Those of the commands that were named."""
        groups = [a for a in self._actions if isinstance(a, argparse._SubParsersAction)]
        return [flag for group in groups for parser in group.choices.values() for flag in parser._option_string_actions]
