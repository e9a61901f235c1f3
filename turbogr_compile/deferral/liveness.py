"""Which waiting tensors may user code still read?

A tensor is dead where every reference to it is accounted for: local variables of functions that are running, which
are set again before they are read, or containers that only such a variable holds. This is proven from bytecode, with
branches and exception handlers taken, and from the count of references. What cannot be proven may be read.
"""

from __future__ import annotations

import dis
import sys
import types
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from .. import _torch
from .record import Value

_FUNCTION = 0x02  # code flag: locals are variables of a function, not globals
_READS = {"LOAD_FAST", "LOAD_CLOSURE", "LOAD_DEREF", "LOAD_FAST_CHECK", "LOAD_FAST_AND_CLEAR", "LOAD_CLASSDEREF"}
_SETS = {"STORE_FAST", "DELETE_FAST"}
_ENDS = {"RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE", "JUMP_FORWARD", "JUMP_BACKWARD",
         "JUMP_BACKWARD_NO_INTERRUPT", "JUMP_ABSOLUTE"}  # fmt: skip
_KNOWN = sys.implementation.name == "cpython" and sys.version_info[:2] == (3, 11)
# Between user code and us. A tensor that one of these has, too, is not proven dead.
_BETWEEN = (__name__.rpartition(".")[0], "torch._dynamo.", "torch._tensor", "torch.overrides", "torch.autograd")
_PLAIN = (type(None), torch.Tensor, torch.nn.Module, int, float, str, types.FunctionType, types.MethodType)  # hold none
_NO_CONTAINERS = {*_PLAIN, bool, type, types.ModuleType, types.BuiltinFunctionType}


def may_be_read(values: Sequence[Value]) -> list[Value]:
    """Those that are not proven dead."""
    if not values or not _KNOWN:
        return list(values)
    try:
        unread = _unread([v.tensor() for v in values])
    except Exception:
        return list(values)
    return [v for v in values if id(v.tensor()) not in unread or not _leaves(v)]


def _leaves(value: Value) -> bool:
    """Nobody reads it, so it can leave autograd's graph: its place goes with it, unless somebody else took it up."""
    with _torch.below_torch_function():
        value.tensor().detach_()
    return value.link() is None


def _unread(tensors: list[Any]) -> set[int]:
    """Ids of those that are held by variables which are set before they are read, and by nothing else."""
    tensors.append(object())  # nobody else has this one: its references are ours
    *counts, ours = [sys.getrefcount(t) for t in tensors]
    held = zip(tensors[:-1], counts, strict=True)
    left = {id(t): n - ours for t, n in held if t is not None and weakref.getweakrefcount(t) == 1}  # that is ours
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and any(left.values()):
        if frame.f_code.co_flags & _FUNCTION and not frame.f_globals.get("__name__", "").startswith(_BETWEEN):
            _account(frame, left)
        frame = frame.f_back
    return {t for t, n in left.items() if n == 0}


def _account(frame: types.FrameType, left: dict[int, int]) -> None:
    """Take away references that variables of the frame have; what may be read by way of them is forgotten."""
    code, variables = frame.f_code, frame.f_locals
    try:
        for name in variables:
            held = variables[name]
            if id(held) in left:
                found = [id(held)]
            elif type(held) in _NO_CONTAINERS or isinstance(held, _PLAIN):
                continue
            else:
                found = [id(item) for item in _items(held) if id(item) in left]
            if not found:
                continue
            others = id(held) not in left and sys.getrefcount(held) > 4  # somebody else has the container, too
            local = name in code.co_varnames and name not in code.co_cellvars
            for t in found:
                if others or not local or _live(code, frame.f_lasti, name):
                    left.pop(t, None)
                elif t in left:
                    left[t] -= 1
        held = None
    finally:
        variables.clear()  # Python 3.11 keeps this dict, and what is in it, with the frame


def _items(held: Any) -> list[Any]:
    """What a container refers to; dataclasses and dicts such as a `ModelOutput` refer twice."""
    items: list[Any] = []
    if isinstance(held, (list, tuple)):
        items += held
    elif isinstance(held, dict):
        items += held.values()
    if hasattr(held, "__dict__") and not isinstance(held, type):
        items += vars(held).values()
    return items


_ANSWERS: dict[int, tuple[types.CodeType, dict[tuple[int, str], bool]]] = {}  # by id: a code object has a slow hash


def _live(code: types.CodeType, at: int, name: str) -> bool:
    """May the variable be read after this instruction, before it is set?"""
    known = _ANSWERS.get(id(code))
    if known is None:
        if len(_ANSWERS) >= 4096:
            _ANSWERS.clear()
        known = _ANSWERS[id(code)] = code, {}
    answers = known[1]
    answer = answers.get((at, name))
    if answer is None:
        answer = answers[at, name] = _may_be_loaded(code, at, name)
    return answer


def _may_be_loaded(code: types.CodeType, at: int, name: str) -> bool:
    instructions = list(dis.get_instructions(code))
    places = {i.offset: k for k, i in enumerate(instructions)}
    handlers = dis._parse_exception_table(code)  # type: ignore[attr-defined]
    running = max(k for offset, k in places.items() if offset <= at)
    # What the running call itself raises is caught in this frame; `if tensor:` runs in the jump, whose end is open.
    todo, seen = [running + 1, *(places[h.target] for h in handlers if h.start <= at < h.end)], set()
    if _jumps(instructions[running]):
        todo.append(places[instructions[running].argval])
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
        if _jumps(i):
            todo.append(places[i.argval])
        if i.opname not in _ENDS:
            todo.append(k + 1)
    return False


def _jumps(instruction: dis.Instruction) -> bool:
    return instruction.opcode in dis.hasjrel or instruction.opcode in dis.hasjabs


def _may_ask_for_locals(code: types.CodeType) -> bool:
    """The function names `locals`, `eval` or a debugger: its variables may be read without a trace in its bytecode."""
    return not {"locals", "eval", "exec", "vars", "breakpoint", "set_trace", "_getframe", "currentframe"}.isdisjoint(
        code.co_names
    )
