"""What stands ready for the C++ kernels on this machine; looking builds nothing and creates no folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .build import REALS, SERIAL, SOURCES, Recipe, mode
from .cache import Cache, Refused, user_folder
from .toolchain import Compiler, Unavailable, chosen_isa, find_compiler, machine_isa, sanitizers


def _files() -> Any:
    """Looked up late: a source tree on the path offers this folder as a package `kernels` to whoever looks for one."""
    from ... import files

    return files


def state() -> dict[str, Any]:
    """Mode, compiler, vectors, folder, and which libraries are built; `missing` says what stands in the way."""
    missing: list[dict[str, str]] = []
    found: dict[str, Any] = {
        "settings": "right",
        "mode": "",
        "compiler": "",
        "isa": "",
        "machine isa": machine_isa(),
        "sanitizers": "",
    }
    for name, ask in (("mode", mode), ("isa", chosen_isa), ("sanitizers", sanitizers)):
        try:
            found[name] = ask()
        except ValueError as error:
            found["settings"] = "wrong"
            missing.append({"what": str(error), "remedy": "correct it, or unset it"})
    compiler = None
    try:
        compiler = find_compiler()
        found["compiler"] = compiler.version.splitlines()[0]
    except Unavailable as error:
        missing.append({"what": error.what, "remedy": error.remedy})
    cache, found["cache"], refused = _cache()
    found["libraries"] = [_library(real, found, compiler, cache) for real in dict.fromkeys(REALS.values())]
    if refused and not all(library["built"] for library in found["libraries"]):
        remedy = "name a folder of your own in TURBOGR_CACHE_DIR"
        missing.append({"what": f"{refused}, so each process compiles anew", "remedy": remedy})
    return {**found, "missing": missing}


def _cache() -> tuple[Cache | None, str, str]:
    """The user's cache where there is one, its name, and what speaks against filling it."""
    try:
        folder = user_folder()
    except Refused as reason:
        return None, "", str(reason)
    if refused := _files().obstacle(folder):
        return None, str(folder), refused
    if not folder.is_dir():
        return None, str(folder), ""
    return Cache(folder), str(folder), "" if _files().is_writable(folder) else f"{folder} is not writable"


def _library(real: str, found: dict[str, Any], compiler: Compiler | None, cache: Cache | None) -> dict[str, Any]:
    path, failure = None, ""
    if cache and found["isa"]:
        recipe = Recipe(SOURCES, real, found["isa"], found["sanitizers"])
        stem = recipe.stem_by(compiler) if compiler else recipe.stem
        path = cache.find(stem)
        failure = "" if path else _failure(cache.log(stem))
    return {
        "library": real,
        "dtypes": [str(dtype).removeprefix("torch.") for dtype, r in REALS.items() if r == real],
        "built": path is not None,
        "file": str(path) if path else "",
        "threads": path is None or SERIAL not in path.name,
        "failure": failure,
    }


def _failure(log: Path) -> str:
    """The last attempt to build, where it failed."""
    try:
        return f"{log.read_text(errors='replace').splitlines()[0]} (all messages: {log})"
    except (OSError, IndexError):
        return ""
