"""From a graph node to the user's own line of code, through every rewrite."""

from __future__ import annotations

import inspect
import linecache
import os
import re
import sysconfig
import traceback
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import fx

from ..registry import HOME, ROOMS

_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+)(?:, in (?P<function>.+))?$')
# The compiler itself: the package, and in a checkout the rooms beside it that are not programs of users.
_OURS = tuple(str(p) + os.sep for p in (HOME, *(ROOMS[room] for room in ("passes", "lowering", "kernels"))))
_LIBRARIES = tuple(
    {str(Path(torch.__file__).resolve().parent) + os.sep}
    | {sysconfig.get_paths()[k] + os.sep for k in ("stdlib", "platstdlib", "purelib", "platlib")}
)


@dataclass(frozen=True)
class Site:
    """A place in the source code of a pass."""

    path: str
    line: int

    def __str__(self) -> str:
        return f"{short_path(self.path)}:{self.line}"


def site_of(obj: Any) -> Site:
    """File and line of a class or function."""
    return _site_of(obj)


@lru_cache(maxsize=1024)
def _site_of(obj: Any) -> Site:
    try:
        return Site(inspect.getsourcefile(obj) or "?", inspect.getsourcelines(obj)[1])
    except (OSError, TypeError):
        return Site(getattr(obj, "__module__", "?"), 0)


def declaration_site(cls: Any, attribute: str) -> Site:
    """Line where `attribute` (after, before, needs) is declared in the class body of a pass."""
    return _declaration_site(cls, attribute)


@lru_cache(maxsize=1024)
def _declaration_site(cls: Any, attribute: str) -> Site:
    for owner in cls.__mro__:
        if attribute not in vars(owner):
            continue
        override = vars(owner).get("_declared_at")
        if override is not None:
            return override
        base = site_of(owner)
        try:
            source = inspect.getsource(owner).splitlines()
        except (OSError, TypeError):
            return base
        for offset, text in enumerate(source):
            if re.match(rf"\s*{attribute}\b\s*[:=]", text):
                return Site(base.path, base.line + offset)
        return base
    return site_of(cls)


def short_path(path: str) -> str:
    """Path without the machine in it: relative to the working directory or to the package, or the last two parts."""
    p = Path(path)
    if not p.is_absolute():
        return path
    for root in (Path.cwd(), HOME.parent):
        if p.is_relative_to(root):
            return p.relative_to(root).as_posix()
    return "/".join(p.parts[-2:])


@dataclass(frozen=True)
class UserLine:
    """A line of the user's code."""

    file: str
    line: int
    code: str = ""
    function: str = ""

    @property
    def where(self) -> str:
        return f"{short_path(self.file)}:{self.line}"

    def __str__(self) -> str:
        return f"{self.where}  {self.code}" if self.code else self.where


@dataclass(frozen=True)
class Origin:
    """Which pass and rule made a node, and from which nodes (names in the graph before)."""

    pass_name: str
    rule: str
    sources: tuple[str, ...]


@lru_cache(maxsize=4096)
def is_library(file: str) -> bool:
    return file.startswith(_LIBRARIES) or file.startswith(_OURS) or file.startswith("<")


@lru_cache(maxsize=4096)
def user_line(stack_trace: str | None) -> UserLine | None:
    """Innermost frame outside torch, site-packages and turbogr; else the innermost frame there is."""
    if not stack_trace:
        return None
    frames = [found for text in stack_trace.splitlines() if (found := _FRAME.match(text))]
    if not frames:
        return None
    best = next((f for f in reversed(frames) if not is_library(f["file"])), frames[-1])
    line = int(best["line"])
    return UserLine(best["file"], line, linecache.getline(best["file"], line).strip(), best["function"] or "")


def line_of(node: fx.Node) -> UserLine | None:
    return user_line(node.meta.get("stack_trace"))


def inherit(node: fx.Node, sources: list[fx.Node], origin: Origin) -> None:
    """Give a new node the identity of the nodes it came from, ours and PyTorch's own keys alike."""
    node.meta.setdefault("turbogr", origin)
    # The last source in graph order is the one whose value is replaced: its line explains the node best.
    # `recompute` and `ac_graph_id` are activation checkpointing's marks.
    for key in ("stack_trace", "nn_module_stack", "source_fn_stack", "from_node", "recompute", "ac_graph_id"):
        if node.meta.get(key):
            continue
        for source in reversed(sources):
            if source.meta.get(key):
                node.meta[key] = source.meta[key]
                break


def line_of_error(error: BaseException, file: str | None = None) -> UserLine | None:
    """Innermost frame of a traceback in `file`, or else in the user's own code."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [f for f in frames if (f.filename == file if file else not is_library(f.filename))]
    if not theirs:
        return None
    return UserLine(theirs[-1].filename, theirs[-1].lineno or 0, theirs[-1].line or "", theirs[-1].name)
