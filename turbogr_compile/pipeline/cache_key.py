"""The key that decides whether compiled code from an earlier process may be used again.

It covers what can change the code: the passes as ordered and configured, the sources they are made of, the target, and
versions. Dump, verify and logging settings are left out on purpose.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import sys
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from ..registry import HOME, PACKAGE, ROOMS, packages_with, sources_of, version_of
from .options import Options

FORMAT = 2
# Rooms that change no compiled code: they show what happened, or use the compiler as anybody does.
_WITHOUT_CODE = {"show", "commands", "testing", "simulator", "training", "benchmarks", "examples"}
# Of these only what the passes of the pipeline import counts.
_BY_IMPORT = {"passes"}


def cache_key(options: Options) -> str:
    text = json.dumps(key_parts(options), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def key_parts(options: Options) -> dict[str, Any]:
    """The parts of the key by name, so that a miss can be explained."""
    pipeline = options.plan()
    passes = {type(p).__module__ for p in pipeline.passes()}
    parts: dict[str, Any] = {
        "format": FORMAT,
        "pipeline": pipeline.spec,
        "stop_after": options.stop_after,
        "target": options.target,
        "codegen": options.codegen,
        "target_options": dict(options.target_options),
        "sources": {m: _digest(m) for m in sorted({*_compiler(), *_closure(passes)})},
        "row ops": packages_with("turbogr.row_ops"),
        "torch": torch.__version__,
        "turbogr": version_of("turbogr"),
        "torch_npu": version_of("torch_npu"),
    }
    if any(p.rank_dependent for p in pipeline.passes()):
        parts["rank"] = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    return parts


def _compiler() -> Iterator[str]:
    """The compiler's own modules; parsing their imports would take longer than hashing them all."""
    yield from (f"{PACKAGE}.{file.stem}" for file in HOME.glob("*.py") if not file.stem.startswith("__"))
    for room in ROOMS:
        if room not in _WITHOUT_CODE | _BY_IMPORT:
            yield from sources_of(room)


def _closure(modules: Iterable[str]) -> set[str]:
    """Modules of passes and what they import from their own package; libraries are covered by versions."""
    todo, seen = list(modules), set()
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        todo += [*_imports(name), *([name.rpartition(".")[0]] if "." in name else [])]
    return seen


@lru_cache(maxsize=1024)
def _imports(module: str) -> tuple[str, ...]:
    path = _path(module)
    root = module.split(".")[0]
    # Passes of turbogr's own import its compiler, which is covered, and kernels.
    if path is None or (root == PACKAGE and module.split(".")[1:2] not in ([room] for room in _BY_IMPORT)):
        return ()
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found = []
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            found += [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            try:
                base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            except ImportError:
                continue
            found += [base, *(f"{base}.{a.name}" for a in node.names)]
    return tuple(n for n in found if n.split(".")[0] == root and _path(n) is not None)


@lru_cache(maxsize=1024)
def _path(module: str) -> Path | None:
    if module == "__main__":
        file = getattr(sys.modules["__main__"], "__file__", None)
        return Path(file) if file and Path(file).is_file() else None
    loaded = sys.modules.get(module)
    file = getattr(loaded, "__file__", None)
    if file is None:
        try:
            spec = importlib.util.find_spec(module)
        except (ImportError, ValueError, AttributeError):
            return None
        file = spec.origin if spec is not None else None
    return Path(file) if file and file.endswith(".py") and Path(file).is_file() else None


def _digest(module: str) -> str:
    path = _path(module)
    return hashlib.sha256(path.read_bytes()).hexdigest() if path is not None else "?"
