"""An AscendC kernel as a shared library, compiled against the twin's headers for one choice of dtypes."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

from ..cpu.cache import Cache, Refused, temporary_folder, user_folder
from ..cpu.toolchain import CompileError, Compiler, find_compiler

TWIN = Path(__file__).parent
KERNELS = TWIN.parent / "ascendc"
KEPT = 256  # libraries: one for each kernel and choice of dtypes
FLAGS = ("-std=c++17", "-O2", "-fPIC", "-shared", "-Wall", "-Wno-unknown-pragmas", "-fno-math-errno")
TYPES = {
    torch.float16: "half",
    torch.bfloat16: "bfloat16_t",
    torch.float32: "float",
    torch.int32: "int32_t",
    torch.int64: "int64_t",
    torch.bool: "bool",
    torch.uint8: "uint8_t",
    torch.int16: "int16_t",
}


_folders: list[Path] = [KERNELS]


@contextmanager
def kernels_from(folder: Path) -> Iterator[None]:
    """Kernels of another folder, laid out as kernels/ascendc is: variants, or copies that are broken on purpose."""
    _folders.append(folder)
    try:
        yield
    finally:
        _folders.pop()


class TwinBuildError(RuntimeError):
    """The kernel does not compile: it uses what the twin does not have, or what AscendC does not."""


def library(op: str, dtypes: Iterable[tuple[str, torch.dtype]]) -> ctypes.CDLL:
    """`dtypes` are pairs of an input's name in capitals and its dtype, as the op build defines DTYPE_<name>."""
    dtypes = list(dtypes)
    for name, dtype in dtypes:
        if dtype not in TYPES:
            raise ValueError(f"{op}: AscendC has no {dtype}, which {name.lower()} is of")
    return _library(op, tuple(sorted(dtypes)), _folders[-1])


@cache
def _library(op: str, dtypes: tuple[tuple[str, torch.dtype], ...], folder: Path) -> ctypes.CDLL:
    unit = _unit(op, folder)
    defines = [f"-DDTYPE_{name}={TYPES[dtype]}" for name, dtype in dtypes]
    flags = [*FLAGS, f"-I{TWIN / 'include'}", f"-I{folder / 'common'}", *defines]
    compiler = find_compiler()
    stem = f"{op}-{_digest(folder, op, defines, compiler)}"
    try:
        return _made(Cache(user_folder() / "twin", KEPT), stem, compiler, flags, unit)
    except Refused:
        return _made(Cache(temporary_folder(), KEPT), stem, compiler, flags, unit)


def _made(cache: Cache, stem: str, compiler: Compiler, flags: list[str], unit: str) -> ctypes.CDLL:
    found = cache.find(stem)
    if found is None:
        with cache.workplace() as place:
            (place / "unit.cpp").write_text(unit)
            try:
                compiler.run(*flags, "unit.cpp", "-o", "twin.so", folder=place)
            except CompileError as error:
                raise TwinBuildError(error.output) from None
            found = cache.keep(place / "twin.so", stem)
    return ctypes.CDLL(str(found))


def _unit(op: str, folder: Path) -> str:
    """The launcher, the kernel and the twin's runtime in one translation unit."""
    parts = [folder / op / "test" / f"{op}_main.cpp", folder / op / "op_kernel" / f"{op}.cpp", TWIN / "runtime.cpp"]
    missing = [part for part in parts if not part.exists()]
    if missing:
        raise TwinBuildError(f"there is no {missing[0]}")
    return "".join(f'#include "{part}"\n' for part in parts)


def _digest(folder: Path, op: str, defines: list[str], compiler: Compiler) -> str:
    """Changes with each source and header that the library may be made of."""
    sources = [*TWIN.rglob("*.h"), TWIN / "runtime.cpp", *(folder / "common").rglob("*.h")]
    # A backward may include what its forward has: all kernels' headers count.
    sources += [*folder.glob("*/op_kernel/*.h"), *folder.glob("*/op_host/*.h"), *(folder / op).rglob("*.cpp")]
    state = hashlib.sha256(repr((FLAGS, defines, compiler.version)).encode())
    for source in sorted(set(sources)):
        state.update(source.name.encode() + source.read_bytes())
    return state.hexdigest()[:16]
