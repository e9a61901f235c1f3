"""The system's C++ compiler, and what it is told about this machine."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

COMPILERS = ("c++", "g++", "clang++")
LIMIT_SECONDS = 600  # of one run of the compiler
# Best first. The words are those of /proc/cpuinfo and, behind -m, those of the compilers.
ISAS = {
    "avx512": ("avx512f", "avx512vl", "avx512bw", "avx512dq", "avx2", "fma", "f16c"),
    "avx2": ("avx2", "fma", "f16c"),
    "baseline": (),
}
# What a build for tests watches for: compilers' own sanitizers, and allocations that a test lets fail (faults.cpp).
FAULTS = "faults"
SANITIZERS = ("address", "undefined", "thread", FAULTS)
# Only these are visible: the libraries of two compute types must not find each other's functions.
EXPORTS = "{ global: turbogr_*; local: *; };\n"
OPENMP = "#include <omp.h>\nint main() { return omp_get_max_threads() < 1; }\n"


class Unavailable(RuntimeError):
    """Why there are no kernels, and what to do about it."""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(f"{what}: {remedy}")
        self.what, self.remedy = what, remedy


# --- compiler ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Compiler:
    command: tuple[str, ...]
    version: str

    def run(self, *arguments: str, folder: Path) -> None:
        """Raises CompileError unless the compiler is content."""
        done = _run([*self.command, *arguments], folder)
        if done.returncode:
            raise CompileError(shlex.join(done.args), done.stderr or f"exit status {done.returncode}")

    def has_openmp(self, folder: Path) -> bool:
        """Whether a program with OpenMP links; clang without its libomp cannot."""
        (folder / "openmp-program.cc").write_text(OPENMP)
        try:
            self.run("-fopenmp", "openmp-program.cc", "-o", "openmp-program", folder=folder)
        except CompileError as error:
            if error.no_space:
                raise
            return False
        return True


class CompileError(RuntimeError):
    def __init__(self, command: str, output: str) -> None:
        super().__init__(output)
        self.command, self.output = command, output

    @property
    def first(self) -> str:
        """The line that says most."""
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        return next((line for line in lines if "error" in line), lines[0] if lines else "no message")

    @property
    def no_space(self) -> bool:
        return "No space left" in self.output or "quota exceeded" in self.output


def find_compiler() -> Compiler:
    """$CXX and nothing else where it is set, else the first of c++, g++, clang++."""
    named = os.environ.get("CXX", "").strip()
    try:
        candidates = [shlex.split(named)] if named else [[name] for name in COMPILERS]
    except ValueError as error:
        raise Unavailable(f"CXX={named!r} is no command ({error})", "correct it, or unset it") from None
    command = next((c for c in candidates if shutil.which(c[0])), None)
    if command is None and named:
        raise Unavailable(f"CXX={named!r} is not found", "correct it, or unset it to use c++, g++ or clang++")
    if command is None:
        raise Unavailable("no C++ compiler is found", "install g++ or clang++, or name one in CXX")
    done = _run([*command, "--version"])
    version = done.stdout.strip()
    if done.returncode or not version:
        reason = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[0]
        raise Unavailable(f"{shlex.join(command)} --version fails ({reason})", "name a C++ compiler that works in CXX")
    return Compiler((shutil.which(command[0]) or command[0], *command[1:]), version)


def _run(command: list[str], folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    # Messages in English; and what is preloaded for this process, a sanitizer above all, is not for the compiler.
    environment = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"} | {"LC_ALL": "C"}
    try:
        return subprocess.run(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=LIMIT_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, 1, "", str(error))


# --- machine -----------------------------------------------------------------------------------------


def machine_isa() -> str:
    """The widest vectors that torch uses here and the processor, where the system tells, has all instructions for."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return "baseline"
    capability = torch.backends.cpu.get_cpu_capability()
    names = list(ISAS)
    widest = {"AVX512": "avx512", "AVX2": "avx2"}.get(capability, "baseline")
    has = _processor()
    return next(name for name in names[names.index(widest) :] if has is None or has.issuperset(ISAS[name]))


def chosen_isa() -> str:
    """The machine's, or a lower one that TURBOGR_ISA asks for."""
    found, asked = machine_isa(), os.environ.get("TURBOGR_ISA", "").strip().lower()
    if not asked:
        return found
    names = list(ISAS)
    if asked not in names:
        raise ValueError(f"TURBOGR_ISA={asked!r} is none of {', '.join(names)}")
    if names.index(asked) < names.index(found):
        raise ValueError(f"TURBOGR_ISA={asked} is more than this machine has: {found}")
    return asked


def _processor() -> set[str] | None:
    """Words for the instructions of the first processor; None where there is no such list."""
    try:
        with open("/proc/cpuinfo") as lines:
            return next((set(line.split()[2:]) for line in lines if line.startswith("flags")), None)
    except OSError:
        return None


# --- flags -------------------------------------------------------------------------------------------


def flags(real: str, isa: str, sanitize: str = "") -> list[str]:
    """For compiling; never -ffast-math, under which NaN and infinity would not flow as in eager."""
    optimise = ["-O3"]
    compilers = ",".join(word for word in sanitize.split(",") if word not in ("", FAULTS))
    if compilers:
        optimise = [f"-fsanitize={compilers}", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g", "-O1"]
    machine = [f"-m{word}" for word in ISAS[isa]]
    if platform.machine() in ("aarch64", "arm64"):
        machine = ["-march=armv8-a"]
    return [
        *("-std=c++17", *optimise, "-fPIC", "-fno-semantic-interposition"),
        *("-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"),
        *machine,
        f"-DTURBOGR_REAL={'double' if real == 'double' else 'float'}",
        *(["-DTURBOGR_HALVES"] if real == "half" else []),
        *(["-DTURBOGR_FAULTS"] if FAULTS in sanitize else []),
    ]


def link_flags() -> list[str]:
    return ["-shared", "-Wl,--version-script=exports"] if sys.platform.startswith("linux") else ["-shared"]


def sanitizers() -> str:
    """Words of SANITIZERS, as TURBOGR_SANITIZE asks; '' for none."""
    words = [w for w in os.environ.get("TURBOGR_SANITIZE", "").replace(" ", "").split(",") if w]
    unknown = [w for w in words if w not in SANITIZERS]
    if unknown:
        raise ValueError(f"TURBOGR_SANITIZE={unknown[0]!r} is none of {', '.join(SANITIZERS)}")
    return ",".join(w for w in SANITIZERS if w in words)
