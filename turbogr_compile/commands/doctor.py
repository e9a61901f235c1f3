"""`turbogr doctor`: what is installed, which targets can run here, and what is missing for the others."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from dataclasses import asdict
from typing import Any

from ..registry import version_of
from .common.output import show

SUMMARY = "what is installed, which targets can run here, what is missing"
PACKAGES = ("torch", "turbogr", "networkx", "sympy", "jinja2", "rich", "torch_npu", "fbgemm-gpu-cpu")


def arguments(command: argparse.ArgumentParser) -> None:
    text = "unpack the torchair that fits this torch into turbogr's cache, for target ascend-sim"
    command.add_argument("--fetch-torchair", action="store_true", help=text)


def run(options: argparse.Namespace) -> int:
    if options.fetch_torchair:
        from ..lowering.torchair.fetch import fetch_torchair

        sys.stderr.write(f"torchair is in {fetch_torchair()}\n")
    found = diagnose()
    show(options, found, doctor_text(found))
    return 0


def diagnose() -> dict[str, Any]:
    import torch

    from .. import _torch, kernels

    return {
        "machine": {
            "python": platform.python_version(),
            "system": f"{platform.system()} {platform.machine()}",
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "vectors": torch.backends.cpu.get_cpu_capability(),
            "c++ compiler": _torch.cpp_compiler() or "none",
        },
        "packages": {name: version_of(name) for name in PACKAGES},
        "entry point": _entry_point(),
        "kernels": kernels.state(),
        "targets": _targets(),
        "troubles": _troubles(),
    }


def _targets() -> list[dict[str, Any]]:
    from ..pipeline.target import TARGETS

    targets = []
    for target in TARGETS.all():
        default = target.default_codegen()
        for codegen in target.codegens:
            lacking = [asdict(m) for m in target.missing(codegen)]
            targets.append({"target": target.name, "codegen": codegen, "ready": not lacking, "missing": lacking,
                            "default": codegen == default, "summary": target.summary})  # fmt: skip
    return targets


def _troubles() -> list[str]:
    """Installed packages whose passes, targets, commands, row ops or instruments cannot be used."""
    from ..passes.rows.installed import ROW_OPS
    from ..pipeline.catalogue import PASSES
    from ..pipeline.instrument import INSTRUMENTS
    from ..pipeline.target import TARGETS
    from . import COMMANDS

    return [trouble for known in (PASSES, TARGETS, ROW_OPS, INSTRUMENTS, COMMANDS) for trouble in known.troubles()]


def doctor_text(found: dict[str, Any]) -> str:
    from ..show.table import table

    rows = [[k, str(v)] for k, v in found["machine"].items()]
    rows += [[k, v or "not installed"] for k, v in found["packages"].items()]
    rows.append(["backend 'turbogr'", found["entry point"]])
    lines = [table(rows), "", *_kernels_text(found["kernels"]), ""]
    for t in found["targets"]:
        mark = "ready" if t["ready"] else "missing"
        default = " (default)" if t["default"] else ""
        lines.append(f"{mark:8} target {t['target']}, codegen {t['codegen']}{default}")
        lines += [f"           {m['what']}: {m['remedy']}" for m in t["missing"]]
    lines += [f"warning  {trouble}" for trouble in found["troubles"]]
    return "\n".join(lines)


def _kernels_text(found: dict[str, Any]) -> list[str]:
    """C++ kernels: where they come from, and which are built. Without them a model is slower, and no less right."""
    from ..show.table import table

    lowered = f", the machine has {found['machine isa']}" if found["isa"] != found["machine isa"] else ""
    rows = [
        ["compiler of kernels", found["compiler"] or "none"],
        ["vectors of kernels", (found["isa"] or "none") + lowered],
        ["cache of kernels", found["cache"] or "none"],
    ]
    lines = []
    for library in found["libraries"]:
        mark, comment = _library_text(found, library)
        lines.append(f"{mark:8} kernels for {', '.join(library['dtypes'])}{comment}")
    return [table(rows), "", *lines, *(f"           {m['what']}: {m['remedy']}" for m in found["missing"])]


def _library_text(found: dict[str, Any], library: dict[str, Any]) -> tuple[str, str]:
    if found["settings"] == "wrong":
        return "wrong", ": their use raises an error"
    if found["mode"] == "off":
        return "off", ": TURBOGR_KERNELS=off, the slower reference serves"
    if library["built"]:
        return "built", "" if library["threads"] else ": for one thread, since the compiler has no OpenMP"
    if library["failure"]:
        return "failed", f": {library['failure']}"
    if found["compiler"]:
        return "not yet", ": compiled at first use, which takes seconds"
    required = found["mode"] == "required"
    return "missing", f": {'an error, since TURBOGR_KERNELS=required' if required else 'the slower reference serves'}"


def _entry_point() -> str:
    from torch._dynamo.backends.registry import list_backends

    known = "turbogr" in list_backends(exclude_tags=())
    return "known to torch.compile" if known else "not known to torch.compile: reinstall turbogr"
