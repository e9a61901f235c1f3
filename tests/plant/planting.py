"""Planting a fault in the running process: who holds a reference to the function, or to the table, sees it too."""

from __future__ import annotations

import ast
import gc
import importlib
import sys
from collections.abc import Iterator
from functools import cache
from types import CodeType, FunctionType, ModuleType
from typing import Any

from .faults import Fault, source_of

PACKAGE = "turbogr_compile.passes"


class NotPlanted(Exception):
    """The edit is no program, or nobody would run it."""


def plant(fault: Fault) -> None:
    try:
        _plant(fault)
    except Exception as error:
        raise NotPlanted(f"{type(error).__name__}: {error}") from error


def _plant(fault: Fault) -> None:
    home = importlib.import_module(fault.module)
    tree, changed = fault.planted()
    before = source_of(fault.module).body[fault.statement]
    if isinstance(changed, ast.FunctionDef) and isinstance(before, ast.FunctionDef) and _declares_else(before, changed):
        _declare_again(home, changed)
    elif isinstance(changed, (ast.FunctionDef, ast.ClassDef)):
        _replace_code(home, tree)
    else:
        _run_again(home, tree, changed)
    _forget()


def _declares_else(before: ast.FunctionDef, changed: ast.FunctionDef) -> bool:
    return [ast.dump(d) for d in before.decorator_list] != [ast.dump(d) for d in changed.decorator_list]


def _declare_again(home: ModuleType, changed: ast.FunctionDef) -> None:
    """A rule that is declared by its decorator: `RULES.of("softmax", models=(...))`."""
    rule = vars(home)[changed.name]
    before: dict[str, Any] = {}
    for declares in changed.decorator_list:
        if isinstance(declares, ast.Call) and isinstance(declares.func, ast.Attribute):
            rules: Any = eval(ast.unparse(declares.func.value), vars(home))
            before = {name: known for name, known in rules.items() if known.apply is rule}
            for name in before:
                del rules[name]
    for declares in changed.decorator_list:
        eval(ast.unparse(declares), vars(home))(rule)
    for others in _copies_of(before):
        for name in before:
            others.pop(name)
        others.update({name: known for name, known in rules.items() if known.apply is rule})


def _copies_of(entries: dict[str, Any]) -> list[dict[str, Any]]:
    """Tables that were put together from others."""
    modules = [m for n, m in list(sys.modules.items()) if n.startswith(PACKAGE)]
    tables = [t for m in modules for t in vars(m).values() if isinstance(t, dict)]
    return [t for t in tables if all(t.get(name) is known for name, known in entries.items())]


def _replace_code(home: ModuleType, tree: ast.Module) -> None:
    """Functions keep their identity and get the changed code."""
    new = compile(tree, home.__file__ or "", "exec", dont_inherit=True)
    codes = dict(_functions(new))
    planted = 0
    for function in living().get(home.__file__ or "", ()):
        code = function.__code__
        other = codes.get((code.co_qualname, code.co_firstlineno))
        if other is None or other == code:
            continue
        if other.co_freevars != code.co_freevars:
            raise NotPlanted("it closes over other names")
        function.__code__ = other
        planted += 1
    if not planted:
        raise NotPlanted("no function has the changed code")


def _functions(code: CodeType) -> Iterator[tuple[tuple[str, int], CodeType]]:
    """Those of the module and its classes; what they define inside is part of them."""
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield (inner.co_qualname, inner.co_firstlineno), inner
            if "<locals>" not in inner.co_qualname:
                yield from _functions(inner)


@cache
def living() -> dict[str, list[FunctionType]]:
    """Functions of this process by the file they are from. Looked for once: it takes a walk over all objects."""
    found: dict[str, list[FunctionType]] = {}
    gc.unfreeze()  # what was set aside from collecting is not among all objects
    for thing in gc.get_objects():
        # By type: asking a dead proxy for its class raises.
        if type(thing) is FunctionType and thing.__module__ and thing.__module__.startswith(PACKAGE):
            found.setdefault(thing.__code__.co_filename, []).append(thing)
    return found


def _run_again(home: ModuleType, tree: ast.Module, changed: ast.stmt) -> None:
    """The statement and those after it that define no function: what they declare is declared anew."""
    after = tree.body[tree.body.index(changed) :]
    plain: list[ast.stmt] = [s for s in after if isinstance(s, (ast.Assign, ast.AnnAssign, ast.Expr))]
    before = dict(vars(home))
    exec(compile(ast.Module(plain, []), home.__file__ or "", "exec", dont_inherit=True), vars(home))
    for name, old in before.items():
        if vars(home)[name] is not old:
            _pass_on(name, old, vars(home)[name])


def _pass_on(name: str, old: Any, new: Any) -> None:
    for module in [m for n, m in list(sys.modules.items()) if n.startswith(PACKAGE)]:
        for key, value in list(vars(module).items()):
            if value is old and key in (name, name.lstrip("_")):
                setattr(module, key, new)


def _forget() -> None:
    """Caches of functions hold what they found before."""
    for name, module in list(sys.modules.items()):
        if name.startswith(PACKAGE):
            for value in list(vars(module).values()):
                if hasattr(value, "cache_clear"):
                    value.cache_clear()
