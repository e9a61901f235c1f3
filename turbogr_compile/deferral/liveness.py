"""Which waiting tensors may user code still read?

A tensor is dead where every reference to it is accounted for: local variables of functions that are running, which
are set again before they are read, or containers that only such a variable holds. This is proven from bytecode, with
branches and exception handlers taken, and from the count of references. What cannot be proven may be read.
"""

from __future__ import annotations

import dis
import sys
import types
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from .. import _torch
from .record import Value

_FUNCTION = 0x02  # code flag: locals are variables of a function, not globals
_GENERATOR = 0x20 | 0x80 | 0x200
_READS = {"LOAD_FAST", "LOAD_CLOSURE", "LOAD_DEREF", "LOAD_FAST_CHECK", "LOAD_FAST_AND_CLEAR", "LOAD_CLASSDEREF"}
_SETS = {"STORE_FAST", "DELETE_FAST"}
_ENDS = {"RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE", "JUMP_FORWARD", "JUMP_BACKWARD",
         "JUMP_BACKWARD_NO_INTERRUPT", "JUMP_ABSOLUTE"}  # fmt: skip
_KNOWN = sys.implementation.name == "cpython" and sys.version_info[:2] == (3, 11)
_HERE = __name__.rpartition(".")[0]


def may_be_read(values: Sequence[Value]) -> list[Value]:
    """Those that are not proven dead."""
    return [v for v in values if not _dead(v)]


def _dead(value: Value) -> bool:
    tensor = value.tensor()
    if tensor is None or not _KNOWN:
        return False
    # References that no variable has: ours here, and the argument of getrefcount.
    wanted = sys.getrefcount(tensor) - 2
    try:
        if not _all_dead(tensor, wanted):
            return False
    except Exception:
        return False
    # Nobody reads it, so it can leave autograd's graph: its place goes with it, unless somebody else took it up.
    with _torch.below_torch_function(), torch.no_grad():
        tensor.detach_()
    return value.link() is None


def _all_dead(tensor: Any, wanted: int) -> bool:
    """Are so many references to it held by variables that are set before they are read, and by no other?"""
    found = 0
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and found < wanted:
        code = frame.f_code
        if not frame.f_globals.get("__name__", "").startswith(_HERE) and code.co_flags & _FUNCTION:
            count = _in_frame(frame, code, tensor)
            if count is None:
                return False
            found += count
        frame = frame.f_back
    return found == wanted


def _in_frame(frame: types.FrameType, code: types.CodeType, tensor: Any) -> int | None:
    found = 0
    variables = frame.f_locals
    try:
        for name in (*code.co_varnames, *code.co_cellvars, *code.co_freevars):
            held = variables.get(name)
            if held is None or (
                held is not tensor and isinstance(held, (torch.Tensor, torch.nn.Module, int, float, str))
            ):
                continue
            count = 1 if held is tensor else _owned(held, tensor)
            if not count:
                continue
            if name not in code.co_varnames or name in code.co_cellvars or _live(code, frame.f_lasti, name):
                return None
            if held is not tensor and sys.getrefcount(held) > 4:
                return None  # somebody else has the container, too
            found += count
        held = None
    finally:
        variables.clear()  # Python 3.11 keeps this dict, and what is in it, with the frame
    return found


def _owned(held: Any, tensor: Any) -> int:
    """References to the tensor from a container; those of dataclasses and dicts such as a `ModelOutput` count both."""
    items: list[Any] = []
    if isinstance(held, (list, tuple)):
        items += held
    elif isinstance(held, dict):
        items += held.values()
    if hasattr(held, "__dict__") and not isinstance(held, type):
        items += vars(held).values()
    return sum(item is tensor for item in items)


@lru_cache(maxsize=4096)
def _live(code: types.CodeType, at: int, name: str) -> bool:
    """May the variable be read after this instruction, before it is set?"""
    instructions = list(dis.get_instructions(code))
    places = {i.offset: k for k, i in enumerate(instructions)}
    handlers = dis._parse_exception_table(code)  # type: ignore[attr-defined]
    todo, seen = [max(k for offset, k in places.items() if offset <= at) + 1], set()
    # What the running call itself raises is caught in this frame.
    todo += [places[h.target] for h in handlers if h.start <= at < h.end]
    while todo:
        k = todo.pop()
        if k in seen or k >= len(instructions):
            continue
        seen.add(k)
        i = instructions[k]
        todo += [places[h.target] for h in handlers if h.start <= i.offset < h.end]
        if i.opname in _READS and i.argval == name:
            return True
        if i.opname in _SETS and i.argval == name:
            continue
        if i.opname in ("CALL", "PRECALL", "CALL_FUNCTION_EX") and _may_ask_for_locals(code):
            return True
        if i.opcode in dis.hasjrel or i.opcode in dis.hasjabs:
            todo.append(places[i.argval])
        if i.opname not in _ENDS:
            todo.append(k + 1)
    return False


def _may_ask_for_locals(code: types.CodeType) -> bool:
    """The function names `locals`, `eval` or a debugger: its variables may be read without a trace in its bytecode."""
    return not {"locals", "eval", "exec", "vars", "breakpoint", "set_trace", "_getframe", "currentframe"}.isdisjoint(
        code.co_names
    )
