"""Commands that compile a function of the user's: their arguments, the settings these make, compiling it."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import OptionError, TurbogrError
from .progress import progress

if TYPE_CHECKING:
    from ...api import Report

_OF_COMPILE = ("pipeline", "target", "codegen", "verify", "stop_after", "without")


def model_arguments(command: argparse.ArgumentParser, needed: bool = True) -> None:
    command.add_argument("model", nargs=None if needed else "?", help="file.py:function or package.module:function")
    command.add_argument("--inputs", metavar="SPECS", help="e.g. 'f32[b=32, 64] i64[32]'; default: <function>_inputs()")
    command.add_argument("--pipeline", metavar="SPEC", help="passes to run, e.g. 'remove-noops, my-pass{size=16}'")
    command.add_argument("--add", action="append", default=[], metavar="SPEC", help="add a pass to the pipeline")
    command.add_argument("--without", action="append", default=[], metavar="PASS", help="leave a pass out of it")
    command.add_argument("--target", help="default: cpu")
    command.add_argument("--codegen", help="code generator of the target")
    command.add_argument("--target-option", action="append", default=[], metavar="NAME=VALUE",
                         help="a setting that only this target has, e.g. oo_level=O1")  # fmt: skip
    command.add_argument("--verify", help="off, fast, strict, numeric, validate or shadow[:calls]")
    command.add_argument("--dynamic", action="store_true", help="symbolic sizes")
    command.add_argument("--stop-after", metavar="PASS[:K]", help="stop after a pass, or after its k-th rewrite")
    command.add_argument("--no-backward", action="store_true", help="do not run the backward")
    load_argument(command)


def load_argument(command: argparse.ArgumentParser) -> None:
    command.add_argument("--load", action="append", default=[], metavar="MODULE", help="import first (passes of yours)")


def import_first(options: argparse.Namespace) -> None:
    from .loading import load_module

    for module in options.load:
        load_module(module)


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """What the command line says about compiling; imports the passes it names first."""
    import_first(options)
    given = {k: v for k in _OF_COMPILE if (v := getattr(options, k)) not in (None, [])}
    given |= {"passes": options.add} if options.add else {}
    given |= {"target_options": _target_options(options.target_option)} if options.target_option else {}
    return given | ({"dynamic": True} if options.dynamic else {})


def _target_options(given: Sequence[str]) -> dict[str, Any]:
    """'oo_level=O1' is a text; true, false and numbers are what they look like."""
    found = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals:
            raise OptionError(f"--target-option takes NAME=VALUE, got {text!r}")
        try:
            found[name] = json.loads(value)
        except (ValueError, RecursionError):
            found[name] = value
    return found


def run_again(options: argparse.Namespace) -> str:
    """The command that runs the same thing."""
    words = ["turbogr", "run", options.model]
    for name in ("inputs", "pipeline", "target", "codegen", "verify"):
        words += [f"--{name}", value] if (value := getattr(options, name)) else []
    for name in ("target_option", "add", "without", "load"):
        for value in getattr(options, name):
            words += [f"--{name.replace('_', '-')}", value]
    return shlex.join(words + ["--dynamic"] * options.dynamic + ["--no-backward"] * options.no_backward)


def compiled(options: argparse.Namespace, **more: Any) -> Report:
    """The function, compiled and run once, and what the compiler has to say."""
    from ...api import explain
    from .loading import load

    if more.get("dump") is not None:
        _check_dump(more["dump"])
    settings = settings_of(options) | {k: v for k, v in more.items() if v is not None}
    fn, args, kwargs = load(options.model, options.inputs)
    if kwargs:
        plain = fn
        fn = lambda: plain(**kwargs)  # noqa: E731
    with progress(f"compiling {options.model}"):
        try:
            return explain(fn, *args, backward=not options.no_backward, **settings)
        except TurbogrError:
            raise
        except Exception as error:
            raise _failure(options, lambda: fn(*args), error) from error


def _check_dump(directory: Path) -> None:
    """On the command line a dump that cannot be written is a wrong command, not something to work around."""
    from ...show.dump import open_directory

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        opened = open_directory(directory.absolute(), 0, os.getpid())
    if opened.refusal:
        raise OptionError(f"cannot dump there: {opened.refusal}")


def _failure(options: argparse.Namespace, eager: Callable[[], Any], error: Exception) -> TurbogrError:
    """What the model's author needs to know: torch reports at length, the same error in eager is brief."""
    from ...graph.provenance import line_of_error

    what = f"compiling {options.model}"
    try:
        eager()
    except Exception as plain:
        what, error = options.model, plain
    line = line_of_error(error)
    text = [f"{what} raised {type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"]
    text += [f"  {line}"] if line else []
    text += ["  are --inputs what it takes?"] if options.inputs else []
    return TurbogrError("\n".join(text))
