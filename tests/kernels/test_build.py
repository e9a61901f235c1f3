"""How the C++ kernels get built, kept, found again, and done without."""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import shutil
import signal
import stat
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from turbogr_compile.commands import doctor
from turbogr_compile.kernels import declare
from turbogr_compile.kernels.cpu import build, cache, state, toolchain
from turbogr_compile.kernels.cpu.build import Recipe, load
from turbogr_compile.kernels.cpu.cache import Cache
from turbogr_compile.kernels.cpu.toolchain import Compiler, Unavailable

from .test_jagged_attention import FULL, ragged

COMPILER = next((path for name in toolchain.COMPILERS if (path := shutil.which(name))), "")
needs_compiler = pytest.mark.skipif(not COMPILER, reason="no C++ compiler here")
SETTINGS = ("CXX", "TURBOGR_KERNELS", "TURBOGR_ISA", "TURBOGR_SANITIZE", "XDG_CACHE_HOME")
SOURCE = """
#include "text.h"
extern "C" const char* turbogr_text(const void* given) { return given ? TEXT : nullptr; }
"""
HELPERS = """
int helper() { return 1; }
inline int& counter() { static int count; return count; }
int count() { return ++counter(); }
"""
TOGETHER = """
extern "C" const char* turbogr_together(long long* threads) {
  long long together = 0;
#pragma omp parallel num_threads(int(*threads)) reduction(+ : together)
  together += 1;
  *threads = together;
  return nullptr;
}
"""


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path) -> None:
    """A process that has not loaded anything, with a cache of its own and no settings."""
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TURBOGR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "_loaded", {})
    monkeypatch.setattr(build, "_failed", {})
    monkeypatch.setattr(build, "_remarks", [])


@pytest.fixture
def sources(tmp_path, monkeypatch) -> Path:
    """A small folder in place of the real one: it compiles in no time."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "text.cpp").write_text(SOURCE)
    (folder / "more.cpp").write_text('extern "C" const char* turbogr_more(const void*) { return nullptr; }\n')
    (folder / "text.h").write_text('#define TEXT "first"\n')
    monkeypatch.setattr(build, "SOURCES", folder)
    monkeypatch.setattr(state, "SOURCES", folder)
    return folder


@pytest.fixture
def recipe(sources) -> Recipe:
    return Recipe(sources, "float", "baseline")


def compiler_that(tmp_path: Path, does: str) -> str:
    """A compiler in front of the real one; `does` may look at its arguments."""
    script = tmp_path / "compiler"
    script.write_text(f'#!/bin/sh\n{does}\nexec {COMPILER} "$@"\n')
    script.chmod(0o700)
    return str(script)


@pytest.fixture
def compiled(tmp_path, monkeypatch):
    """Counts the sources that were compiled, by whatever process."""
    log = tmp_path / "compiled"
    log.touch()
    monkeypatch.setenv("CXX", compiler_that(tmp_path, f'case " $* " in *" -c "*) echo "$*" >> {log};; esac'))
    return lambda: len(log.read_text().splitlines())


def text_of(kernels: ctypes.CDLL) -> str:
    assert kernels.turbogr_text(None) is None
    return ctypes.string_at(kernels.turbogr_text(ctypes.byref(ctypes.c_int(1)))).decode()


def libraries(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache").glob("*.so"))


# --- names -------------------------------------------------------------------------------------------


def test_name_changes_with_everything_that_goes_into_a_library(recipe, sources):
    def again(**changes: str) -> str:
        return replace(recipe, **changes).stem

    names = [recipe.stem, again(real="double"), again(sanitize="address"), again(sanitize="undefined")]
    names += [again(isa=isa) for isa in ("avx2", "avx512")]
    (sources / "text.h").write_text('#define TEXT "second"\n')
    names.append(again())
    (sources / "text.cpp").write_text(SOURCE + "\n")
    names.append(again())
    (sources / "text.cpp").rename(sources / "other.cpp")
    names.append(again())
    assert len(set(names)) == len(names)
    (sources / "notes.py").write_text("nothing that is compiled")
    assert again() == names[-1]
    one, two = (recipe.stem_by(Compiler(("c++",), version)) for version in ("12.2", "12.3"))
    assert one != two and one.startswith(recipe.stem) and two.startswith(recipe.stem)


def test_flags_name_the_vectors_and_never_change_the_meaning_of_numbers(monkeypatch):
    monkeypatch.setattr(toolchain.platform, "machine", lambda: "x86_64")
    wide, narrow, plain = (toolchain.flags("float", isa) for isa in ("avx512", "avx2", "baseline"))
    assert {"-mavx512f", "-mavx512vl", "-mavx512bw", "-mavx512dq", "-mfma"} <= set(wide)
    assert {"-mavx2", "-mfma", "-mf16c"} <= set(narrow) and "-mavx512f" not in narrow
    assert not any(flag.startswith("-m") for flag in plain)
    assert not any("fast-math" in flag for flag in (*wide, *narrow, *plain))
    monkeypatch.setattr(toolchain.platform, "machine", lambda: "aarch64")
    assert "-march=armv8-a" in toolchain.flags("float", "baseline")
    assert toolchain.machine_isa() == "baseline"


@pytest.mark.parametrize(
    ("capability", "words", "isa"),
    [
        ("AVX512", toolchain.ISAS["avx512"], "avx512"),
        ("AVX512", ("avx512f", "avx2", "fma", "f16c"), "avx2"),  # early ones lack the rest
        ("AVX2", toolchain.ISAS["avx512"], "avx2"),  # torch was told to use less
        ("AVX2", ("avx2", "fma"), "baseline"),
        ("AVX2", None, "avx2"),  # no list of instructions
        ("DEFAULT", toolchain.ISAS["avx2"], "baseline"),
    ],
)
def test_vectors_are_those_that_torch_and_the_processor_have(monkeypatch, capability, words, isa):
    monkeypatch.setattr(toolchain.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(toolchain, "_processor", lambda: None if words is None else set(words))
    assert toolchain.chosen_isa() == isa
    monkeypatch.setenv("TURBOGR_ISA", "baseline")
    assert toolchain.chosen_isa() == "baseline"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("TURBOGR_ISA", "avx512", "more than this machine has: avx2"),
        ("TURBOGR_ISA", "sse", "none of avx512, avx2, baseline"),
        ("TURBOGR_KERNELS", "maybe", "none of auto, off, required"),
        ("TURBOGR_SANITIZE", "address,threads", "none of address, undefined"),
    ],
)
def test_a_wrong_setting_is_an_error_that_doctor_shows(monkeypatch, sources, name, value, message):
    monkeypatch.setattr(toolchain, "machine_isa", lambda: "avx2")
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        build.library(torch.float32)
    text = doctor.doctor_text(doctor.diagnose())
    assert message in text and "wrong    kernels for float64: their use raises an error" in text


# --- building, keeping, finding ----------------------------------------------------------------------


@needs_compiler
def test_built_once_and_found_by_the_next_process(sources, compiled, tmp_path):
    found = build.library(torch.float32)
    assert text_of(found) == "first" and compiled() == 2
    halves = build.library(torch.float16)
    assert halves is not found and build.library(torch.bfloat16) is halves and compiled() == 4
    wide = build.library(torch.float64)
    assert wide not in (found, halves) and compiled() == 6 and len(libraries(tmp_path)) == 3
    assert build.library(torch.int64) is None and build.library(None) is None
    build._loaded.clear()
    assert text_of(build.library(torch.float32)) == "first" and compiled() == 6
    build._loaded.clear()
    (sources / "text.h").write_text('#define TEXT "second"\n')
    assert text_of(build.library(torch.float32)) == "second" and compiled() == 8


@needs_compiler
def test_a_library_shows_its_kernels_and_nothing_else(recipe, sources):
    (sources / "helpers.cpp").write_text(HELPERS)
    found = load(recipe)
    assert found.turbogr_more(None) is None
    for hidden in ("_Z6helperv", "_Z7counterv", "_Z5countv", "turbogr_unknown"):
        assert not hasattr(found, hidden)


@needs_compiler
def test_many_processes_compile_once(recipe, compiled):
    fork = multiprocessing.get_context("fork")
    start, texts = fork.Barrier(4), fork.Queue()

    def work() -> None:
        start.wait()
        texts.put(text_of(load(recipe)))

    workers = [fork.Process(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    assert [texts.get(timeout=60) for _ in workers] == ["first"] * 4
    for worker in workers:
        worker.join(60)
    assert compiled() == 2


@needs_compiler
def test_the_lock_of_a_killed_process_holds_nobody_up(recipe, tmp_path):
    fork = multiprocessing.get_context("fork")
    held = fork.Event()

    def work() -> None:
        with Cache(tmp_path / "cache").lock(), Cache(tmp_path / "cache").workplace():
            held.set()
            time.sleep(600)

    worker = fork.Process(target=work)
    worker.start()
    assert held.wait(60)
    os.kill(worker.pid, signal.SIGKILL)
    worker.join(60)
    began = time.monotonic()
    assert text_of(load(recipe)) == "first" and time.monotonic() - began < 60


@needs_compiler
def test_a_process_that_hangs_is_not_waited_for_forever(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "PATIENCE_SECONDS", 0.2)
    with Cache(tmp_path / "cache").lock():
        assert text_of(load(recipe)) == "first"


@needs_compiler
@pytest.mark.parametrize("damage", ["truncated", "overwritten", "empty", "not a library"])
def test_a_damaged_library_is_built_again(recipe, compiled, tmp_path, damage):
    if damage == "not a library":  # whole, as its name tells, and yet the loader refuses it
        store = Cache(tmp_path / "cache")
        with store.workplace() as place:
            (place / "kernels.so").write_bytes(b"no library")
            path = store.keep(place / "kernels.so", recipe.stem_by(toolchain.find_compiler()))
        once = 0
    else:
        load(recipe)
        (path,) = libraries(tmp_path)
        content, once = path.read_bytes(), compiled()
        path.unlink()  # a new file: this process has the old one loaded
        changed = {"truncated": content[: len(content) // 2], "overwritten": b"\0" * len(content), "empty": b""}
        path.write_bytes(changed[damage])
    assert text_of(load(recipe)) == "first" and compiled() == once + 2
    (path,) = libraries(tmp_path)
    assert path.read_bytes().startswith(b"\x7fELF") or sys.platform == "darwin"


@needs_compiler
def test_libraries_unused_for_longest_make_room(recipe, sources, tmp_path):
    first = load(recipe)._name
    folder = tmp_path / "cache"
    for number in range(cache.KEPT + 3):
        path = folder / f"float-avx2-old-{number}.so"
        path.touch()
        os.utime(path, (1000 + number, 1000 + number))
    left = folder / "build-of-a-dead-process"
    left.mkdir()
    os.utime(left, (1000, 1000))
    load(replace(recipe, real="double"))
    names = [path.name for path in libraries(tmp_path)]
    assert len(names) == cache.KEPT and Path(first).name in names and not left.exists()
    assert f"float-avx2-old-{cache.KEPT + 2}.so" in names and "float-avx2-old-0.so" not in names


@needs_compiler
def test_a_compiler_without_openmp_gives_kernels_for_one_thread(recipe, tmp_path, monkeypatch, caplog):
    without = 'case " $* " in *" -fopenmp "*) echo "cannot find -lomp" >&2; exit 1;; esac'
    monkeypatch.setenv("CXX", compiler_that(tmp_path, without))
    assert text_of(load(recipe)) == "first" and "-serial-" in libraries(tmp_path)[0].name
    assert text_of(load(recipe)) == "first"
    assert [r.levelno for r in caplog.records if "one thread" in r.message] == [logging.WARNING]


# --- folders -----------------------------------------------------------------------------------------


def test_the_folder_is_the_user_s(monkeypatch, tmp_path):
    assert cache.user_folder() == tmp_path / "cache"
    monkeypatch.delenv("TURBOGR_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.user_folder() == tmp_path / "xdg" / "turbogr"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.user_folder() == tmp_path / ".cache" / "turbogr"


@needs_compiler
def test_nobody_else_can_write_into_the_folder(recipe, tmp_path):
    mask = os.umask(0)
    try:
        load(recipe)
    finally:
        os.umask(mask)
    assert stat.S_IMODE((tmp_path / "cache").stat().st_mode) == 0o700
    assert not any(path.stat().st_mode & 0o022 for path in libraries(tmp_path))


def writable(folder: Path) -> str:
    folder.mkdir()
    folder.chmod(0o777)
    return "is writable by other users"


def foreign(folder: Path) -> str:
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder away")
    folder.mkdir()
    os.chown(folder, 12345, -1)
    return "belongs to another user"


def a_file(folder: Path) -> str:
    folder.touch()
    return "is not a folder"


def below_a_file(folder: Path) -> str:
    folder.touch()
    os.environ["TURBOGR_CACHE_DIR"] = str(folder / "cache")
    return "Not a directory"


@needs_compiler
@pytest.mark.parametrize("prepare", [writable, foreign, a_file, below_a_file])
def test_a_folder_that_is_not_safe_is_left_alone(recipe, tmp_path, caplog, prepare):
    message = prepare(tmp_path / "cache")
    text = doctor.doctor_text(doctor.diagnose())
    assert message in text and "TURBOGR_CACHE_DIR" in text
    found = load(recipe)
    assert text_of(found) == "first" and not libraries(tmp_path)
    private = Path(found._name).parent
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
    (remark,) = caplog.messages
    assert message in remark and "compiled anew by each process" in remark


@needs_compiler
def test_without_any_folder_the_reference_serves(sources, tmp_path, monkeypatch, caplog):
    (tmp_path / "cache").touch()

    def nowhere() -> Path:
        raise cache.Refused("there is no temporary folder")

    monkeypatch.setattr(build, "temporary_folder", nowhere)
    assert build.library(torch.float32) is None
    (remark,) = caplog.messages
    assert "is not a folder; there is no temporary folder" in remark and "TURBOGR_CACHE_DIR" in remark


@needs_compiler
def test_a_library_that_is_there_serves_without_a_compiler(recipe, compiled, monkeypatch):
    load(recipe)
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert text_of(load(recipe)) == "first" and compiled() == 2


# --- going without -----------------------------------------------------------------------------------


def no_compiler(monkeypatch, tmp_path) -> str:
    monkeypatch.setenv("PATH", str(tmp_path))
    return "no C++ compiler is found: install g++ or clang++"


def not_found(monkeypatch, tmp_path) -> str:
    monkeypatch.setenv("CXX", "no-such-compiler")
    return "CXX='no-such-compiler' is not found"


def not_working(monkeypatch, tmp_path) -> str:
    monkeypatch.setenv("CXX", shutil.which("false"))
    return "--version fails"


def not_a_command(monkeypatch, tmp_path) -> str:
    monkeypatch.setenv("CXX", "g++ '")
    return "is no command"


def makes_nothing(monkeypatch, tmp_path) -> str:
    monkeypatch.setenv("CXX", shutil.which("true"))
    return "has made no file"


def switched_off(monkeypatch, tmp_path) -> str:
    monkeypatch.setenv("TURBOGR_KERNELS", "off")
    return "TURBOGR_KERNELS=off"


@pytest.mark.parametrize(
    "prepare",
    [no_compiler, not_found, not_working, not_a_command, makes_nothing, switched_off],
    ids=lambda f: f.__name__,
)
def test_the_reference_serves_with_one_remark(sources, tmp_path, monkeypatch, caplog, prepare):
    message = prepare(monkeypatch, tmp_path)
    queries = ragged([3, 0, 2], 4)
    case = replace(FULL, queries=queries, keys=queries)
    results = [torch.ops.turbogr.jagged_attention(*replace(case, dtype=d).inputs())[0] for d in build.REALS]
    assert all(result.isfinite().all() for result in results)
    torch.testing.assert_close(results[0].double(), results[-1], rtol=1e-4, atol=1e-5)
    assert set(build._loaded.values()) == {None}
    (remark,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert remark.name == "turbogr_compile.kernels" and message in remark.message


@needs_compiler
def test_a_compile_error_is_quoted_and_kept(sources, tmp_path, caplog):
    (sources / "broken.cpp").write_text("int broken() { return nothing; }\n")
    assert build.library(torch.float32) is None
    (remark,) = caplog.messages
    (log,) = (tmp_path / "cache").glob("*.log")
    assert "broken.cpp:1:" in remark and str(log) in remark and "-std=c++17" in log.read_text()
    text = doctor.doctor_text(doctor.diagnose())
    assert "failed   kernels for float32" in text and "broken.cpp:1:" in text and str(log) in text
    build._loaded.clear()
    (sources / "broken.cpp").write_text("int broken() { return 0; }\n")
    assert build.library(torch.float32) is not None


def test_required_kernels_are_an_error_when_missing(sources, monkeypatch):
    monkeypatch.setenv("TURBOGR_KERNELS", "required")
    monkeypatch.setenv("CXX", "no-such-compiler")
    for _ in range(2):
        with pytest.raises(Unavailable, match="is not found: correct it"):
            build.library(torch.float32)
    assert "missing  kernels for float64: an error" in doctor.doctor_text(doctor.diagnose())


@needs_compiler
def test_required_kernels_that_do_not_compile_are_tried_once(sources, monkeypatch, compiled):
    monkeypatch.setenv("TURBOGR_KERNELS", "required")
    (sources / "text.h").write_text("#error broken\n")
    for _ in range(2):
        with pytest.raises(Unavailable, match="broken"):
            build.library(torch.float32)
    assert compiled() == 2


def test_a_folder_without_sources_is_said_to_be_incomplete(tmp_path):
    with pytest.raises(Unavailable, match="holds no C\\+\\+ sources: reinstall"):
        load(Recipe(tmp_path, "float", "baseline"))


def test_sanitized_kernels_ask_for_the_sanitizer_first(recipe):
    if hasattr(ctypes.CDLL(None), "__asan_init"):
        pytest.skip("the sanitizer is in this process")
    with pytest.raises(Unavailable, match="make sanitize"):
        load(replace(recipe, sanitize="address"))


# --- doctor ------------------------------------------------------------------------------------------


@needs_compiler
def test_doctor_looks_and_leaves_everything_as_it_is(sources, compiled, tmp_path):
    text = doctor.doctor_text(doctor.diagnose())
    assert not (tmp_path / "cache").exists() and compiled() == 0
    assert "not yet  kernels for float16, bfloat16: compiled at first use" in text
    build.library(torch.float64)
    found = doctor.diagnose()["kernels"]
    assert [library["built"] for library in found["libraries"]] == [False, False, True] and not found["missing"]
    assert found["libraries"][2]["file"] == str(libraries(tmp_path)[0]) and found["cache"] == str(tmp_path / "cache")
    assert "built    kernels for float64\n" in doctor.doctor_text(doctor.diagnose())


# --- choosing ----------------------------------------------------------------------------------------


def test_an_op_takes_the_kernels_of_its_leading_argument(monkeypatch):
    kernels = {name: SimpleNamespace(name=name, turbogr_check=None) for name in ("narrow", "wide")}
    loaded = {torch.float32: kernels["narrow"], torch.float64: kernels["wide"], torch.float16: None}
    monkeypatch.setattr(build, "_loaded", loaded)
    unchecked = SimpleNamespace(before_kernel=lambda *arguments: None, leading=1)
    op = declare._compiled(unchecked, lambda library, *arguments: (library.name, *arguments), None, lambda *a: a)
    rows, narrow, wide = torch.tensor([1]), torch.ones(2), torch.ones(2, dtype=torch.float64)
    assert op(narrow, wide)[0] == "wide" and op(wide, narrow)[0] == "narrow"
    for arguments in ((narrow, rows), (narrow, narrow.half()), (wide, narrow.to(torch.complex64)), (wide, None)):
        assert op(*arguments) == arguments


@needs_compiler
def test_the_plainest_vectors_give_the_same_results(monkeypatch):
    monkeypatch.delenv("TURBOGR_CACHE_DIR")  # compiled in seconds, not at every run
    queries = ragged([70, 0, 1, 33], 70)
    inputs = replace(FULL, queries=queries, keys=queries, dtype=torch.float32).inputs()
    results = []
    for isa in ("", "baseline"):
        monkeypatch.setenv("TURBOGR_ISA", isa)
        build._loaded.clear()
        assert f"-{isa or toolchain.machine_isa()}-" in build.library(torch.float32)._name
        results.append(torch.ops.turbogr.jagged_attention(*inputs)[0])
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


@needs_compiler
def test_workers_of_a_data_loader_do_not_hang(recipe, sources):
    """Their parent's threads are not forked along, and OpenMP would wait for them; torch gives a worker one thread."""
    (sources / "together.cpp").write_text(TOGETHER)
    kernels = load(recipe)

    def work(_: object) -> int:
        count = ctypes.c_int64(torch.get_num_threads())
        assert kernels.turbogr_together(ctypes.byref(count)) is None
        return count.value

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert work(None) == 2
        loader = torch.utils.data.DataLoader(
            range(2), num_workers=1, collate_fn=work, timeout=60, multiprocessing_context="fork"
        )
        assert list(loader) == [1, 1]
    finally:
        torch.set_num_threads(before)
