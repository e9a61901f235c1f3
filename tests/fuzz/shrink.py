"""A failing program, made as small as it can be while it fails in the same way.

Works on the text alone: an expression is replaced by a part of itself, a keyword is dropped, a batch is left out. What
comes out need not make sense; it must run in eager, and differ.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import replace

from .judge import judge
from .program import Line, Program

BUDGET = 250  # programs tried


class Shrinker:
    """Tries smaller programs until none of them fails."""

    def __init__(self, program: Program, fails: Callable[[Program], bool], budget: int = BUDGET) -> None:
        self.best, self.fails, self.left = program, fails, budget
        self._tried: set[str] = {program.text}

    def run(self) -> Program:
        while self.left > 0 and any([self.step(c) for c in (fewer_batches, no_outputs, simpler_lines, simpler_sizes)]):
            pass
        return self.best

    def step(self, candidates: Callable[[Program], Iterator[Program]]) -> bool:
        """Take every improvement of a kind; was there one?"""
        improved, again = False, True
        while again and self.left > 0:
            again = False
            for program in candidates(self.best):
                if self.accepts(program):
                    improved = again = True
                    break
        return improved

    def accepts(self, program: Program) -> bool:
        program = without_dead_lines(program)
        if program.text in self._tried or self.left <= 0:
            return False
        self._tried.add(program.text)
        self.left -= 1
        if not self.fails(program):
            return False
        self.best = program
        return True


def shrink(program: Program, budget: int = BUDGET) -> Program:
    """The smallest program found that fails as this one does."""
    first = judge(program)

    def fails(candidate: Program) -> bool:
        found = judge(candidate)
        # By about as much: a cast that rounds is not why a loss is off by a half.
        return found.status == first.status and found.error >= min(first.error, 1e-3)

    return Shrinker(program, fails, budget).run()


def without_dead_lines(program: Program) -> Program:
    alive, kept = {program.loss, *program.outputs}, []
    for line in reversed(program.lines):
        if line.name in alive or "_(" in line.text:  # written in place
            kept.append(line)
            alive |= {n.id for n in ast.walk(ast.parse(line.text)) if isinstance(n, ast.Name)}
    return program.with_lines(kept[::-1])


def fewer_batches(program: Program) -> Iterator[Program]:
    for k in program.kinds:
        yield replace(program, kinds=(k,))
    for k in program.kinds[1:]:
        yield replace(program, kinds=(program.kinds[0], k))


def no_outputs(program: Program) -> Iterator[Program]:
    if program.outputs:
        yield replace(program, outputs=())
        yield from (replace(program, outputs=(o,)) for o in program.outputs if len(program.outputs) > 1)


def simpler_sizes(program: Program) -> Iterator[Program]:
    sizes = program.sizes
    if sizes.open:
        yield replace(program, sizes=replace(sizes, open=False))
    if sizes.pad:
        yield replace(program, sizes=replace(sizes, pad=0))
    if sizes.H > 1:
        yield replace(program, sizes=replace(sizes, H=1))


def simpler_lines(program: Program) -> Iterator[Program]:
    for number in reversed(range(len(program.lines))):
        line = program.lines[number]
        if not line.text.isidentifier():
            for text in simpler(line.text):
                lines = [*program.lines]
                lines[number] = Line(line.name, text)
                yield _without_copies(program.with_lines(lines))


def _without_copies(program: Program) -> Program:
    """`a = b` is b."""
    names: dict[str, str] = {}
    lines = []
    for line in program.lines:
        text = _renamed(line.text, names)
        if text.isidentifier() and line.name not in (program.loss, *program.outputs):
            names[line.name] = text
        else:
            lines.append(Line(line.name, text))
    return program.with_lines(lines)


def _renamed(text: str, names: dict[str, str]) -> str:
    tree = ast.parse(text, mode="eval")
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            node.id = names.get(node.id, node.id)
    return ast.unparse(tree)


def simpler(text: str) -> Iterator[str]:
    """Smaller expressions, the smallest first: parts in the place of the whole, then calls without a keyword."""
    tree = ast.parse(text, mode="eval")
    found: dict[str, None] = {}
    methods = {id(n.func) for n in ast.walk(tree) if isinstance(n, ast.Call)}
    for node in ast.walk(tree):
        if id(node) in methods or not isinstance(
            node, (ast.Call, ast.BinOp, ast.UnaryOp, ast.Subscript, ast.Attribute, ast.Compare, ast.IfExp)
        ):
            continue
        for part in _parts(node):
            found[_replaced(tree, node, part)] = None
        if isinstance(node, ast.Call):
            for k in range(len(node.keywords)):
                call = ast.Call(node.func, node.args, node.keywords[:k] + node.keywords[k + 1 :])
                found[_replaced(tree, node, call)] = None
    yield from sorted((f for f in found if f != text), key=len)


def _parts(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.Call):
        owner = [node.func.value] if isinstance(node.func, ast.Attribute) and not _is_module(node.func.value) else []
        return [*owner, *(a for a in node.args if not isinstance(a, ast.Constant))]
    if isinstance(node, ast.BinOp):
        return [node.left, node.right]
    if isinstance(node, ast.Compare):
        return [node.left, *node.comparators]
    if isinstance(node, ast.IfExp):
        return [node.body]
    if isinstance(node, ast.UnaryOp):
        return [node.operand]
    assert isinstance(node, (ast.Subscript, ast.Attribute))
    return [] if _is_module(node.value) else [node.value]


def _is_module(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("torch", "F")


def _replaced(tree: ast.Expression, old: ast.AST, new: ast.AST) -> str:
    """The text of the tree with one node replaced; the tree stays as it is."""

    def copy(node: ast.AST) -> ast.AST:
        if node is old:
            node = new
        fresh = type(node)()
        for name, value in ast.iter_fields(node):
            if isinstance(value, list):
                value = [copy(v) if isinstance(v, ast.AST) else v for v in value]
            elif isinstance(value, ast.AST):
                value = copy(value)
            setattr(fresh, name, value)
        return fresh

    return ast.unparse(ast.fix_missing_locations(copy(tree)))
