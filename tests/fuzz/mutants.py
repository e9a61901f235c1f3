"""Faults made mechanically from source: a condition negated or dropped, a number shifted by one, an entry left out.

A mutant replaces the code of one function in the running process, or takes one entry from one table of a module; who
holds a reference to the function sees the fault too. Nothing is written to disk.
"""

from __future__ import annotations

import ast
import copy
import importlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType, ModuleType
from typing import Any


@dataclass(frozen=True)
class Mutant:
    module: str
    line: int
    what: str
    where: str  # qualified name of the function, or name of the table
    plant: Callable[[], None]

    def __str__(self) -> str:
        return f"{self.module}:{self.line} {self.where}: {self.what}"


def mutants(module: str) -> Iterator[Mutant]:
    """All of a module, in the order of its source."""
    home = importlib.import_module(module)
    yield from _tables(home)
    tree = ast.parse(inspect.getsource(home))
    for qualname, function in functions(tree):
        target = _found(home, qualname)
        if target is None:
            continue
        for line, what, changed in edits(function):
            code = _compiled(tree, function, changed, qualname, home)
            if code is not None and code.co_freevars == target.__code__.co_freevars:
                yield Mutant(module, line, what, qualname, _replacing(home, target, code))


def functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Functions and methods, not those inside of functions: these are part of their owner's code."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from ((f"{node.name}.{n.name}", n) for n in node.body if isinstance(n, ast.FunctionDef))


# --- edits ------------------------------------------------------------------------------------------------


def edits(function: ast.FunctionDef) -> Iterator[tuple[int, str, ast.FunctionDef]]:
    """(line, what was done, the function with one thing changed)."""
    for number, node in enumerate(ast.walk(function)):
        for what, change in _changes(node):
            changed = copy.deepcopy(function)
            twin = next(n for i, n in enumerate(ast.walk(changed)) if i == number)
            change(twin)
            yield getattr(node, "lineno", function.lineno), what, ast.fix_missing_locations(changed)


def _changes(node: ast.AST) -> Iterator[tuple[str, Callable[[Any], None]]]:
    if isinstance(node, (ast.If, ast.IfExp, ast.While)):
        text = ast.unparse(node.test)[:60]
        yield f"negate `{text}`", _negate
    if isinstance(node, ast.If) and _only_leaves(node):
        yield f"drop the check `{ast.unparse(node.test)[:60]}`", lambda n: setattr(n, "test", ast.Constant(False))
    if isinstance(node, ast.comprehension):
        for i, test in enumerate(node.ifs):
            yield f"drop the filter `{ast.unparse(test)[:60]}`", _without("ifs", i)
    if isinstance(node, ast.BoolOp):
        for i, value in enumerate(node.values):
            yield f"drop `{ast.unparse(value)[:60]}`", _without("values", i)
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _SWAPS:
        yield f"`{ast.unparse(node)[:60]}` off by one", lambda n: setattr(n, "ops", [_SWAPS[type(n.ops[0])]()])
    if isinstance(node, ast.Constant) and type(node.value) is int:
        yield f"{node.value} + 1", lambda n: setattr(n, "value", n.value + 1)
    if isinstance(node, ast.Set) and len(node.elts) > 1:
        for i, value in enumerate(node.elts):
            yield f"leave out {ast.unparse(value)[:40]}", _without("elts", i)


_SWAPS = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}


def _without(field: str, number: int) -> Callable[[Any], None]:
    def change(node: Any) -> None:
        getattr(node, field).pop(number)

    return change


def _negate(node: Any) -> None:
    node.test = ast.UnaryOp(ast.Not(), node.test)


def _only_leaves(node: ast.If) -> bool:
    """A guard: all it does is to return, to raise or to go on with the next."""
    return not node.orelse and len(node.body) == 1 and isinstance(node.body[0], (ast.Return, ast.Raise, ast.Continue))


# --- planting ---------------------------------------------------------------------------------------------


def _found(home: ModuleType, qualname: str) -> FunctionType | None:
    found: Any = home
    for part in qualname.split("."):
        found = vars(found).get(part)
        found = found.fget if isinstance(found, property) else found
        found = getattr(found, "__func__", None) or getattr(found, "func", None) or found
        found = inspect.unwrap(found) if callable(found) else found
        if found is None:
            return None
    return found if isinstance(found, FunctionType) and found.__module__ == home.__name__ else None


def _compiled(
    tree: ast.Module, old: ast.FunctionDef, new: ast.FunctionDef, qualname: str, home: ModuleType
) -> CodeType | None:
    """The code of the changed function, compiled where it stands."""
    body = [_replaced(node, old, new) for node in tree.body]
    try:
        code = compile(ast.Module(body, []), home.__file__ or "", "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return None
    for part in qualname.split("."):
        inner = [c for c in code.co_consts if isinstance(c, CodeType) and c.co_name == part]
        if len(inner) != 1:
            return None
        code = inner[0]
    return code


def _replaced(node: ast.stmt, old: ast.FunctionDef, new: ast.FunctionDef) -> ast.stmt:
    if node is old:
        return new
    if isinstance(node, ast.ClassDef) and old in node.body:
        twin = copy.copy(node)
        twin.body = [new if n is old else n for n in node.body]
        return twin
    return node


def _replacing(home: ModuleType, target: FunctionType, code: CodeType) -> Callable[[], None]:
    def plant() -> None:
        target.__code__ = code
        for value in vars(home).values():
            if hasattr(value, "cache_clear"):
                value.cache_clear()

    return plant


def _tables(home: ModuleType) -> Iterator[Mutant]:
    """Sets and dicts of the module that can lose an entry."""
    for name, value in list(vars(home).items()):
        if name.startswith("__") or not isinstance(value, (set, dict)) or not value:
            continue
        line = next((i for i, t in enumerate(inspect.getsource(home).splitlines(), 1) if t.startswith(name)), 0)
        if line:
            for entry in list(value):
                yield Mutant(home.__name__, line, f"leave out {entry!r}", name, _leaving_out(value, entry))


def _leaving_out(table: Any, entry: Any) -> Callable[[], None]:
    def plant() -> None:
        table.pop(entry, None) if isinstance(table, dict) else table.discard(entry)

    return plant
