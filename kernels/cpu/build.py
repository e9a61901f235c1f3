"""The C++ kernels as a shared library: compiled on first use with the system's compiler, kept in the user's cache.

    library(torch.float32)        # loaded, built before if need be; None where the reference has to serve

The environment has the last word: TURBOGR_KERNELS=off goes without kernels, =required makes their absence an error;
TURBOGR_ISA, TURBOGR_CACHE_DIR, TURBOGR_SANITIZE and CXX choose vectors, folder, sanitizers and compiler.

A process that is forked after kernels ran in several threads must not run them in several threads: the OpenMP runtime
would wait for threads that were not forked along. Workers of a DataLoader are safe: torch gives them one thread.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from .cache import Cache, Refused, temporary_folder, user_folder
from .toolchain import (
    EXPORTS,
    CompileError,
    Compiler,
    Unavailable,
    chosen_isa,
    find_compiler,
    flags,
    link_flags,
    sanitizers,
)


def _files() -> Any:
    """Looked up late: a source tree on the path offers this folder as a package `kernels` to whoever looks for one."""
    from ... import files

    return files


log = logging.getLogger("turbogr_compile.kernels")

SOURCES = Path(__file__).parent
# The library that serves a dtype.
REALS = {torch.float32: "float", torch.float16: "half", torch.bfloat16: "half", torch.float64: "double"}
MODES = ("auto", "off", "required")
LIBRARY = "kernels.so"
SERIAL = "-serial"  # in the name of a library without OpenMP

_UNKNOWN: Any = object()
_loaded: dict[torch.dtype | None, ctypes.CDLL | None] = {}
_failed: dict[str, tuple[str, str]] = {}  # not tried again where kernels are required: each attempt takes seconds
_once = threading.Lock()


def library(dtype: torch.dtype | None) -> ctypes.CDLL | None:
    """Kernels for tensors of a dtype; None where there are none, and the reference has to serve."""
    found = _loaded.get(dtype, _UNKNOWN)
    return _first_use(dtype) if found is _UNKNOWN else found


def _first_use(dtype: torch.dtype | None) -> ctypes.CDLL | None:
    real = REALS.get(dtype) if dtype is not None else None
    with _once:
        if real is None:
            _loaded[dtype] = None
        elif dtype not in _loaded:
            found = _kernels_or_remark(real)
            _loaded.update({d: found for d, r in REALS.items() if r == real})
        return _loaded[dtype]


def _forked() -> None:
    """Another thread of the parent may have held the lock; it does not exist here."""
    global _once
    _once = threading.Lock()


os.register_at_fork(after_in_child=_forked)


def _kernels_or_remark(real: str) -> ctypes.CDLL | None:
    wanted = mode()
    try:
        if real in _failed:
            raise Unavailable(*_failed[real])
        if wanted == "off":
            raise Unavailable("TURBOGR_KERNELS=off", "unset it to use them")
        return load(Recipe(SOURCES, real, chosen_isa(), sanitizers()))
    except Unavailable as reason:
        if wanted == "required":
            _failed[real] = reason.what, reason.remedy
            raise
        _remark(f"the slower reference serves instead of C++ kernels. {reason}")
        return None


def mode() -> str:
    """'auto', 'off' or 'required', from TURBOGR_KERNELS."""
    asked = os.environ.get("TURBOGR_KERNELS", "").strip().lower() or "auto"
    if asked not in MODES:
        raise ValueError(f"TURBOGR_KERNELS={asked!r} is none of {', '.join(MODES)}")
    return asked


_remarks: list[str] = []


def _remark(text: str) -> None:
    """The first is a warning: what hinders one library hinders the next one as well."""
    (log.debug if _remarks else log.warning)(text)
    _remarks.append(text)


# --- one library -------------------------------------------------------------------------------------


class Kernels(ctypes.CDLL):
    """A loaded library, whose functions return NULL or the address of an error text."""

    def __getattr__(self, name: str) -> Any:
        function = super().__getattr__(name)
        function.restype = ctypes.c_void_p
        return function


@dataclass(frozen=True)
class Recipe:
    """What a library is made of, except for the compiler."""

    sources: Path
    real: str
    isa: str
    sanitize: str = ""

    @cached_property
    def files(self) -> dict[str, bytes]:
        """Sources and headers, read once: a file that changes meanwhile does not end up under the wrong name."""
        paths = sorted([*self.sources.glob("*.cpp"), *self.sources.glob("*.h")])
        return {path.name: path.read_bytes() for path in paths}

    @cached_property
    def flags(self) -> list[str]:
        return flags(self.real, self.isa, self.sanitize)

    @cached_property
    def stem(self) -> str:
        """First part of the library's name; changes with each source, header and flag."""
        parts = (platform.system(), platform.machine(), self.flags, link_flags(), EXPORTS, sorted(self.files.items()))
        digest = hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
        return "-".join([self.real, self.isa, *(["sanitized"] if self.sanitize else []), digest])

    def stem_by(self, compiler: Compiler) -> str:
        return f"{self.stem}-{hashlib.sha256(compiler.version.encode()).hexdigest()[:8]}"


def load(recipe: Recipe) -> Kernels:
    """The library from the user's cache, or built into it; where that is impossible, from a folder of this process."""
    if not any(name.endswith(".cpp") for name in recipe.files):
        raise Unavailable(f"{recipe.sources} holds no C++ sources", "reinstall turbogr")
    if recipe.sanitize:
        _require_sanitizer(recipe.sanitize)
    refused: list[str] = []
    for folder in (user_folder, temporary_folder):
        try:
            found = _load_from(Cache(folder()), recipe)
        except Refused as reason:
            refused.append(str(reason))
            continue
        if refused:
            _remark(
                f"C++ kernels are compiled anew by each process, since {refused[0]}: "
                "name a folder of your own in TURBOGR_CACHE_DIR"
            )
        return found
    raise Unavailable("; ".join(refused), "name a folder of your own in TURBOGR_CACHE_DIR")


def _load_from(cache: Cache, recipe: Recipe) -> Kernels:
    stem, build = _maker(cache, recipe)
    for attempt in (1, 2):
        path = cache.find(stem)
        if path is None:
            with cache.lock():
                path = cache.find(stem) or build()
        try:
            found = Kernels(str(path))
        except OSError as error:
            cache.discard(path)
            if attempt == 2:
                raise Refused(f"a library in {cache.folder} does not load ({error})") from error
            continue
        with suppress(OSError):
            os.utime(path)  # used now: older ones make room first
        if SERIAL in path.name:
            _remark(f"C++ kernels run in one thread, since the compiler has no OpenMP: install libomp, remove {path}")
        return found
    raise AssertionError


def _maker(cache: Cache, recipe: Recipe) -> tuple[str, Callable[[], Path]]:
    """What to look for and how to make it. Without a compiler, the library of any compiler will do."""
    try:
        compiler = find_compiler()
    except Unavailable as error:
        reason = error

        def refuse() -> Path:
            raise reason

        return recipe.stem, refuse
    return recipe.stem_by(compiler), lambda: build(recipe, compiler, cache)


def build(recipe: Recipe, compiler: Compiler, cache: Cache) -> Path:
    """Compiles and links, in a few processes at once."""
    with cache.workplace() as place:
        try:
            for name, content in recipe.files.items():
                (place / name).write_bytes(content)
            (place / "exports").write_text(EXPORTS)
            threads = compiler.has_openmp(place)
            options = [*recipe.flags, *(["-fopenmp"] if threads else [])]
            if recipe.sanitize:  # reports name the sources, not their copies
                options.append(f"-ffile-prefix-map={place}={recipe.sources}")
            run = partial(compiler.run, *options, folder=place)
            units = _units({name: len(text) for name, text in recipe.files.items() if name.endswith(".cpp")})
            for unit, sources in units.items():
                (place / unit).write_text("".join(f'#include "{name}"\n' for name in sources))
            with ThreadPoolExecutor(_processors()) as pool:
                jobs = [pool.submit(run, "-c", unit, "-o", f"{unit}.o") for unit in units]
            for job in jobs:
                job.result()
            run(*(f"{unit}.o" for unit in units), *link_flags(), "-o", LIBRARY)
            if not (place / LIBRARY).exists():
                raise CompileError(compiler.command[0], "the compiler is content, and has made no file")
            return cache.keep(place / LIBRARY, recipe.stem_by(compiler) + ("" if threads else SERIAL))
        except CompileError as error:
            if error.no_space:
                raise Refused(f"{cache.folder} has no space left") from error
            remedy = _write_log(cache.log(recipe.stem_by(compiler)), error)
            raise Unavailable(f"they do not compile ({error.first})", remedy) from error
        except OSError as error:
            raise Refused(f"{cache.folder} cannot be written ({error.strerror})") from error


def _units(sizes: dict[str, int]) -> dict[str, list[str]]:
    """Sources that are compiled together, by the name of the file that includes them.

    Half of the time of a small source goes into headers. Two units read them twice only, and keep two processors busy.
    """
    units: list[list[str]] = [[] for _ in range(min(2, len(sizes)))]
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        min(units, key=lambda unit: sum(sizes[n] for n in unit)).append(name)
    return {f"unit{number}.cc": sorted(unit) for number, unit in enumerate(units)}


def _write_log(path: Path, error: CompileError) -> str:
    try:
        _files().replace_file(path, f"{error.first}\n{error.command}\n\n{error.output}")
    except OSError:
        return "try another compiler in CXX"
    return f"try another compiler in CXX; all messages are in {path}"


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _require_sanitizer(sanitize: str) -> None:
    """The runtime of the address sanitizer ends a process that it was not loaded into first."""
    if "address" in sanitize and not hasattr(ctypes.CDLL(None), "__asan_init"):
        raise Unavailable("TURBOGR_SANITIZE needs libasan in LD_PRELOAD", "run `make sanitize`")
