"""`model.py:fn` on the command line: the function to compile and the arguments to compile it for."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ...errors import OptionError, did_you_mean
from ...graph.provenance import line_of_error
from ...graph.shapes import parse_inputs, real_inputs


def load(spec: str, inputs: str | None) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """The callable named by 'file.py:name' or 'package.module:name', and arguments for it.

    Arguments come from `inputs` ('f32[b=32, 64] i64[32]'), or from a function `<name>_inputs` beside it that returns a
    tensor, a sequence of arguments, or a mapping of keyword arguments.
    """
    place, colon, name = spec.rpartition(":")
    if not colon or not name:
        raise OptionError(f"name what to compile as file.py:function or package.module:function, got {spec!r}")
    module = load_module(place)
    if not hasattr(module, name):
        known = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        raise OptionError(f"{place} has no {name!r}{did_you_mean(name, known)}")
    fn = getattr(module, name)
    if inspect.isclass(fn) and issubclass(fn, torch.nn.Module):
        fn = _run(fn, f"{spec} cannot be made without arguments; define a function that builds and calls it")
    if not callable(fn):
        raise OptionError(f"{spec} is not callable")
    return fn, *_arguments(module, name, inputs)


def load_module(place: str) -> ModuleType:
    """A module by file or by name."""
    if not place.endswith(".py"):
        return _run(lambda: importlib.import_module(place), f"cannot import {place!r}")
    path = Path(place)
    if not path.is_file():
        raise OptionError(f"no file {place!r}")
    # Files beside the model must be importable from it, as when Python runs it as a script.
    sys.path.insert(0, str(path.parent.resolve()))
    found = importlib.util.spec_from_file_location(path.stem, path)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[path.stem] = module
    loader = found.loader
    _run(lambda: loader.exec_module(module), f"cannot import {place!r}")
    return module


def _run(action: Callable[[], Any], otherwise: str) -> Any:
    """Call the user's code; what it raises becomes one line with its place."""
    try:
        return action()
    except Exception as error:
        line = line_of_error(error)
        where = f"\n  {line}" if line else ""
        raise OptionError(f"{otherwise}: {type(error).__name__}: {error}{where}") from error


def _arguments(module: ModuleType, name: str, inputs: str | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if inputs is not None:
        return tuple(real_inputs(parse_inputs(inputs))), {}
    maker = getattr(module, f"{name}_inputs", None)
    if maker is None:
        raise OptionError(
            f"no inputs for {name!r}: pass --inputs 'f32[b=32, 64] i64[32]', or define {name}_inputs() beside it"
        )
    made = _run(maker, f"{name}_inputs() failed")
    if isinstance(made, Mapping):
        return (), dict(made)
    if isinstance(made, Sequence) and not isinstance(made, torch.Tensor):
        return tuple(made), {}
    return (made,), {}
