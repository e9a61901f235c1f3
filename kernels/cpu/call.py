"""From a torch op to a C function: dtypes, pointers, errors.

Each C function takes one pointer to a struct of 64-bit fields and returns NULL, or the text of an error:

    class GatherArguments(Arguments):
        _fields_ = fields("x result rows", "stride width count type threads")     # pointers, then integers

    def gather(library, x, rows):
        result = x.new_empty(...)
        call(library.turbogr_gather_rows, GatherArguments(address(x), ...))
        return result
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

# What the text of an error begins with, by what is raised; anything else is a ValueError.
ERRORS: dict[str, type[Exception]] = {"memory: ": MemoryError, "internal: ": RuntimeError}
# Codes of storage.h.
TYPES = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3}


class Arguments(ctypes.Structure):
    """A struct of 64-bit fields, in the order of its C twin."""


def fields(pointers: str = "", integers: str = "", reals: str = "") -> list[tuple[str, Any]]:
    """Pointers first, then integers, then doubles: no padding, and the C struct reads the same."""
    return [
        *((name, ctypes.c_void_p) for name in pointers.split()),
        *((name, ctypes.c_int64) for name in integers.split()),
        *((name, ctypes.c_double) for name in reals.split()),
    ]


# A tensor without elements has no address of its own, and to kernels NULL says that nobody wants a result.
_NOTHING = ctypes.create_string_buffer(64)
_NOWHERE = ctypes.addressof(_NOTHING)


def address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr() or _NOWHERE


def call(function: Any, arguments: Arguments) -> None:
    """ctypes lets go of the interpreter's lock meanwhile."""
    error = function(ctypes.byref(arguments))
    if error:
        text = ctypes.string_at(error).decode()
        kind = next((kind for kind in ERRORS if text.startswith(kind)), "")
        raise ERRORS.get(kind, ValueError)(text[len(kind) :])
