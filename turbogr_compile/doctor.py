"""What is installed, which targets can run here, and what is missing for the others."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from . import _torch
from .graph.text import table
from .kernels.cpu.state import state
from .pipeline.target import find_target, target_names

PACKAGES = ("torch", "turbogr", "networkx", "sympy", "jinja2", "rich", "torch_npu", "fbgemm-gpu-cpu")


def diagnose() -> dict[str, Any]:
    targets = []
    for name in target_names():
        target = find_target(name)
        default = target.default_codegen()
        for codegen in target.codegens:
            lacking = [asdict(m) for m in target.missing(codegen)]
            targets.append({"target": name, "codegen": codegen, "ready": not lacking, "missing": lacking,
                            "default": codegen == default, "summary": target.summary})  # fmt: skip
    return {
        "machine": {
            "python": platform.python_version(),
            "system": f"{platform.system()} {platform.machine()}",
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "vectors": torch.backends.cpu.get_cpu_capability(),
            "c++ compiler": _torch.cpp_compiler() or "none",
        },
        "packages": {name: _version(name) for name in PACKAGES},
        "entry point": _entry_point(),
        "kernels": state(),
        "targets": targets,
    }


def doctor_text(found: dict[str, Any]) -> str:
    rows = [[k, str(v)] for k, v in found["machine"].items()]
    rows += [[k, v or "not installed"] for k, v in found["packages"].items()]
    rows.append(["backend 'turbogr'", found["entry point"]])
    lines = [table(rows), "", *_kernels_text(found["kernels"]), ""]
    for t in found["targets"]:
        mark = "ready" if t["ready"] else "missing"
        default = " (default)" if t["default"] else ""
        lines.append(f"{mark:8} target {t['target']}, codegen {t['codegen']}{default}")
        lines += [f"           {m['what']}: {m['remedy']}" for m in t["missing"]]
    return "\n".join(lines)


def _kernels_text(found: dict[str, Any]) -> list[str]:
    """C++ kernels: where they come from, and which are built. Without them a model is slower, and no less right."""
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


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _entry_point() -> str:
    from torch._dynamo.backends.registry import list_backends

    known = "turbogr" in list_backends(exclude_tags=())
    return "known to torch.compile" if known else "not known to torch.compile: reinstall turbogr"
