"""Faults made mechanically from source: a condition negated or dropped, a number shifted by one, an entry left out.

A fault is one edit of one function, or of one statement of a module (a declaration, a table). Nothing is written to
disk.
"""

from __future__ import annotations

import ast
import copy
import importlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

Change = Callable[[Any], None]
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Fault:
    """One edit of one node of a module: the statement of it, and the node within, by number."""

    module: str
    line: int
    what: str
    where: str  # qualified name of the function, or what the statement begins with
    lines: frozenset[int]  # one of these runs where the fault can matter
    statement: int
    node: int
    kind: str  # one of KINDS, or nothing: a crude edit, which says little about the rules
    change: Change = field(repr=False, compare=False)

    def planted(self) -> tuple[ast.Module, ast.stmt]:
        """The module with the fault, and the statement that has it."""
        tree = source_of(self.module)
        changed = copy.deepcopy(tree.body[self.statement])
        self.change(next(n for i, n in enumerate(ast.walk(changed)) if i == self.node))
        body = [*tree.body]
        body[self.statement] = ast.fix_missing_locations(changed)
        return ast.Module(body, []), changed

    def __str__(self) -> str:
        return f"{self.module}:{self.line} {self.where}: {self.what}"


@cache
def source_of(module: str) -> ast.Module:
    return ast.parse(inspect.getsource(importlib.import_module(module)))


def faults(module: str) -> Iterator[Fault]:
    """All of a module, in the order of its source."""
    for number, statement in enumerate(source_of(module).body):
        if isinstance(statement, (ast.Import, ast.ImportFrom)) or _is_text(statement) or _is_typing(statement):
            continue
        owners, begins, only_tell = dict(_owners(statement)), _beginnings(statement), set(_telling(statement))
        for place, node in enumerate(ast.walk(statement)):
            for kind, what, change in changes(node) if node in owners else ():
                line, tells = getattr(node, "lineno", begins[node]), node in only_tell
                lines = frozenset({line, begins[node]})
                yield Fault(module, line, what, owners[node], lines, number, place, "" if tells else kind, change)


def _beginnings(statement: ast.stmt) -> dict[ast.AST, int]:
    """The first line of the innermost statement that a node is in."""
    found: dict[ast.AST, int] = {}

    def visit(node: ast.AST, line: int) -> None:
        found[node] = line = node.lineno if isinstance(node, ast.stmt) else line
        for child in ast.iter_child_nodes(node):
            visit(child, line)

    visit(statement, statement.lineno)
    return found


def _owners(statement: ast.stmt) -> Iterator[tuple[ast.AST, str]]:
    """Nodes that may be changed, with the function they are in. Annotations, texts and signatures stay as they are."""
    if isinstance(statement, ast.FunctionDef):
        yield from _inside(statement, statement.name)
    elif isinstance(statement, ast.ClassDef):
        for member in statement.body:
            if isinstance(member, ast.FunctionDef):
                yield from _inside(member, f"{statement.name}.{member.name}")
    elif isinstance(statement, (ast.Assign, ast.AnnAssign)) and statement.value is not None:
        target = statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
        yield from ((n, ast.unparse(target)) for n in _walk(statement.value))
    elif isinstance(statement, ast.Expr):
        yield from ((n, ast.unparse(statement)[:40]) for n in _walk(statement.value))


def _inside(function: Function, where: str) -> Iterator[tuple[ast.AST, str]]:
    declares = [d for d in function.decorator_list if isinstance(d, ast.Call) and _declares(d)]
    for part in [*declares, *function.body]:
        yield from ((node, where) for node in _walk(part))


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """Without texts for the user, assertions and annotations: what is wrong there changes no number."""
    if isinstance(node, (ast.JoinedStr, ast.Assert, ast.Raise)) or _is_text(node) or _is_remark(node):
        return
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _walk(child)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_typing(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def _is_remark(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and _called(node.value) in ("_miss", "miss", "missed")
    )


def _telling(statement: ast.stmt) -> Iterator[ast.AST]:
    """What decides about texts alone: a function that returns one, a choice between none and a remark."""
    for node in ast.walk(statement):
        text = isinstance(node, ast.FunctionDef) and getattr(node.returns, "id", "") == "str"
        if text or (isinstance(node, ast.If) and all(map(_remarks, node.body))):
            yield from ast.walk(node)


def _remarks(statement: ast.stmt) -> bool:
    return (
        _is_text(statement)
        or _is_remark(statement)
        or (
            isinstance(statement, ast.Assign)
            and all(getattr(t, "id", "") in ("text", "hint") for t in statement.targets)
        )
    )


def _declares(node: ast.Call) -> bool:
    """`row_op("sum", models=...)`, `RULES.of("sum", models=...)`."""
    return any(k.arg == "models" or k.arg is None for k in node.keywords) and _called(node) in ("row_op", "of")


def _called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


# --- what can be done to a node ---------------------------------------------------------------------------


# Of what rules consist of: names in `models=`, conditions, facts about zeros, axes and positions, sets, checks.
KINDS = ("argument", "condition", "zeros", "axis", "set", "check")


def changes(node: ast.AST) -> Iterator[tuple[str, str, Change]]:
    """(kind, what, change)"""
    for types, kind, make in _CHANGES:
        if isinstance(node, types):
            yield from ((kind, what, change) for what, change in make(node))


def _conditions(node: Any) -> Iterator[tuple[str, Change]]:
    if isinstance(node.test, ast.Compare) and len(node.test.ops) == 1 and type(node.test.ops[0]) in _NEGATED:
        return  # the comparison itself is turned round
    yield f"negate `{_short(node.test)}`", lambda n: setattr(n, "test", ast.UnaryOp(ast.Not(), n.test))


def _branches(node: ast.If) -> Iterator[tuple[str, Change]]:
    yield f"drop the check `{_short(node.test)}`", lambda n: setattr(n, "test", ast.Constant(False))


def _choices(node: ast.IfExp) -> Iterator[tuple[str, Change]]:
    yield f"always `{_short(node.body)}`", lambda n: setattr(n, "test", ast.Constant(True))
    yield f"always `{_short(node.orelse)}`", lambda n: setattr(n, "test", ast.Constant(False))


def _filters(node: ast.comprehension) -> Iterator[tuple[str, Change]]:
    for i, test in enumerate(node.ifs):
        yield f"drop the filter `{_short(test)}`", _without("ifs", i)


def _operands(node: ast.BoolOp) -> Iterator[tuple[str, Change]]:
    for i, value in enumerate(node.values):
        holds = isinstance(node.op, ast.And)  # what an operand that is not there comes to
        yield f"drop `{_short(value)}`", _putting("values", i, lambda holds=holds: ast.Constant(holds))  # type: ignore[misc]


def _shifted(node: ast.Compare) -> Iterator[tuple[str, Change]]:
    yield from _comparisons(node, _ORDERED)


def _turned(node: ast.Compare) -> Iterator[tuple[str, Change]]:
    yield from _comparisons(node, _NEGATED)


def _comparisons(node: ast.Compare, kinds: dict[type[ast.cmpop], type[ast.cmpop]]) -> Iterator[tuple[str, Change]]:
    for i, kind in enumerate(node.ops):
        if type(kind) in kinds:
            other = kinds[type(kind)]
            yield f"`{_short(node)}` with {other.__name__}", _putting("ops", i, other)


def _numbers(node: ast.Constant) -> Iterator[tuple[str, Change]]:
    if type(node.value) is int:
        yield f"{node.value} + 1", lambda n: setattr(n, "value", n.value + 1)
        yield f"{node.value} - 1", lambda n: setattr(n, "value", n.value - 1)


def _flags(node: ast.Constant) -> Iterator[tuple[str, Change]]:
    if type(node.value) is bool:
        yield f"not {node.value}", lambda n: setattr(n, "value", not n.value)


def _members(node: Any) -> Iterator[tuple[str, Change]]:
    if isinstance(node, ast.Set) or (node.elts and all(isinstance(e, ast.Constant) for e in node.elts)):
        yield from _left_out(node)


def _entries(node: Any) -> Iterator[tuple[str, Change]]:
    if node.elts and not all(isinstance(e, ast.Constant) for e in node.elts):
        yield from _left_out(node)


def _left_out(node: Any) -> Iterator[tuple[str, Change]]:
    if not isinstance(getattr(node, "ctx", None), ast.Store):
        yield from ((f"leave out {_short(value)}", _without("elts", i)) for i, value in enumerate(node.elts))


def _pairs(node: ast.Dict) -> Iterator[tuple[str, Change]]:
    for i, key in enumerate(node.keys):
        yield f"leave out {_short(key) if key else _short(node.values[i])}", _without_pair(i)


def _arguments(node: ast.Call) -> Iterator[tuple[str, Change]]:
    for i, keyword in enumerate(node.keywords):
        yield f"without {keyword.arg or '**'}={_short(keyword.value)}", _without("keywords", i)
    other = {"any": "all", "all": "any", "min": "max", "max": "min"}.get(_called(node))
    if other and isinstance(node.func, ast.Name):
        yield f"{node.func.id} for {other}", lambda n: setattr(n.func, "id", other)
    elif other:
        yield f".{_called(node)} for .{other}", lambda n: setattr(n.func, "attr", other)
    names = [i for i, a in enumerate(node.args) if isinstance(a, ast.Constant)] if _declares(node) else []
    if len(names) > 1:
        yield from ((f"leave out {_short(node.args[i])}", _without("args", i)) for i in names)


# A declaration that says too much: it reads every argument, rows are never mixed, zeros of the operand are zeros of
# the result.
def _reads_all(node: ast.Call) -> Iterator[tuple[str, Change]]:
    if _declares(node):
        yield "every argument is said to be read", _saying("models", _EVERYTHING)


def _never_mixes(node: ast.Call) -> Iterator[tuple[str, Change]]:
    if _declares(node) and _called(node) == "row_op" and any(k.arg in ("mixes", None) for k in node.keywords):
        yield "rows are never mixed", _saying("mixes", "lambda *_: None")


def _keeps_zeros(node: ast.Call) -> Iterator[tuple[str, Change]]:
    if _declares(node) and _called(node) == "row_op":
        yield "zeros of the first operand", _saying("zeros", "lambda z, n: z.support(n.args[0])")


# In whatever way the declaration asks: '*' among them, and any other name too.
_EVERYTHING = "type('Everything', (tuple,), {'__contains__': lambda *_: True})(['*'])"


def _saying(name: str, text: str) -> Change:
    """With another value for a keyword, wherever it came from."""

    def change(node: Any) -> None:
        node.keywords = [k for k in node.keywords if k.arg != name]
        family = next((k for k in node.keywords if k.arg is None), None)  # **FAMILY
        if family is not None:
            family.value = _expression(f"{{**{ast.unparse(family.value)}, '{name}': {text}}}")
        else:
            node.keywords.append(ast.keyword(name, _expression(text)))

    return change


def _expression(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def _arithmetic(node: ast.BinOp) -> Iterator[tuple[str, Change]]:
    yield from _computed(node, _COMPUTED)


def _joined(node: ast.BinOp) -> Iterator[tuple[str, Change]]:
    yield from _computed(node, _JOINED)


def _computed(node: ast.BinOp, kinds: dict[type[ast.operator], type[ast.operator]]) -> Iterator[tuple[str, Change]]:
    if type(node.op) in kinds:
        other = kinds[type(node.op)]
        yield f"`{_short(node)}` with {other.__name__}", lambda n: setattr(n, "op", other())


def _statements(node: ast.Expr) -> Iterator[tuple[str, Change]]:
    if isinstance(node.value, ast.Call):
        yield f"drop `{_short(node)}`", lambda n: setattr(n, "value", ast.Constant(None))


def _additions(node: ast.AugAssign) -> Iterator[tuple[str, Change]]:
    yield f"drop `{_short(node)}`", lambda n: setattr(n, "value", ast.IfExp(ast.Constant(False), n.value, _nothing(n)))


def _nothing(node: ast.AugAssign) -> ast.expr:
    """What changes nothing: the value itself in a union, one in a product, else zero or nothing."""
    if isinstance(node.op, (ast.BitOr, ast.BitAnd)):
        same: Any = copy.deepcopy(node.target)
        same.ctx = ast.Load()
        return same
    text = "1" if isinstance(node.op, ast.Mult) else f"type({ast.unparse(node.target)})()"
    return ast.parse(text, mode="eval").body


def _slices(node: ast.Slice) -> Iterator[tuple[str, Change]]:
    for part in ("lower", "upper"):
        if getattr(node, part) is not None:
            yield f"slice without its {part} bound", lambda n, part=part: setattr(n, part, None)  # type: ignore[misc]


_ORDERED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
}  # fmt: skip
_NEGATED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
}  # fmt: skip
_JOINED: dict[type[ast.operator], type[ast.operator]] = {ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd}
_CHANGES: tuple[tuple[Any, str, Callable[[Any], Iterator[tuple[str, Change]]]], ...] = (
    (ast.Call, "argument", _reads_all),
    (ast.If, "condition", _branches), (ast.comprehension, "condition", _filters), (ast.BoolOp, "condition", _operands),
    (ast.Compare, "condition", _shifted),
    (ast.Call, "zeros", _keeps_zeros),
    (ast.Call, "axis", _never_mixes), (ast.Constant, "axis", _numbers),
    ((ast.Set, ast.Tuple, ast.List), "set", _members), (ast.AugAssign, "set", _additions), (ast.BinOp, "set", _joined),
    (ast.Expr, "check", _statements),
    ((ast.If, ast.IfExp, ast.While), "", _conditions), (ast.IfExp, "", _choices), (ast.Compare, "", _turned),
    (ast.Constant, "", _flags), ((ast.Set, ast.Tuple, ast.List), "", _entries), (ast.Dict, "", _pairs),
    (ast.Call, "", _arguments), (ast.BinOp, "", _arithmetic), (ast.Slice, "", _slices),
)  # fmt: skip


def _short(node: ast.AST) -> str:
    text = ast.unparse(node)
    return text if len(text) <= 60 else text[:57] + "..."


def _without(part: str, number: int) -> Change:
    def change(node: Any) -> None:
        getattr(node, part).pop(number)

    return change


def _without_pair(number: int) -> Change:
    def change(node: Any) -> None:
        node.keys.pop(number)
        node.values.pop(number)

    return change


def _putting(part: str, number: int, make: Callable[[], Any]) -> Change:
    def change(node: Any) -> None:
        getattr(node, part)[number] = make()

    return change
