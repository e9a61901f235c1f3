"""AscendC kernels for tensors on an NPU: finds what was built on this machine, and registers it.

    from turbogr_compile.kernels.ascendc.load import load

    load()          # from here on torch.ops.turbogr.* runs AscendC kernels for tensors on "npu"

Three things must be there: torch_npu, the installed package of ops (build.sh --install) and the adapter between the two
(torch/setup.py). Where one is missing, the error says which, and what to do next. An op without a kernel keeps its
reference, which runs on the NPU as well, op by op of torch. Functionally emulated, not run on an NPU: docs/ascend.md.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path

import torch

from .. import declare

HERE = Path(__file__).parent
VENDOR = "turbogr"
LIBRARY = "turbogr_npu.so"
KEY = "PrivateUse1"  # the NPU's, in torch's dispatcher

_loaded: list[Path] = []


class NotReady(RuntimeError):
    """What is missing, and the next step."""

    def __init__(self, what: str, *steps: str) -> None:
        super().__init__("\n".join([f"AscendC kernels cannot be loaded: {what}", *(f"  {step}" for step in steps)]))


def load(library: str | Path | None = None) -> list[str]:
    """Registers the kernels, once; returns the names of all ops that have one.

    `library` is the adapter. Else TURBOGR_NPU_LIBRARY names it, or it is where torch/setup.py puts it.
    """
    if not _loaded:
        _require_torch_npu()
        find_package()
        path = find_adapter(library)
        try:
            torch.ops.load_library(path)
        except OSError as error:
            raise NotReady(
                f"{path} does not load ({error})",
                "it belongs to the torch and torch_npu it was built with; build it anew:",
                _build_command(),
            ) from error
        _loaded.append(path)
    return registered()


def registered() -> list[str]:
    """Names of turbogr's ops that have a kernel for the NPU."""
    names = (name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names())
    own = sorted({name for name in names if name.startswith(f"{declare.NAMESPACE}::")})
    return [name.partition("::")[2] for name in own if torch._C._dispatch_has_kernel_for_dispatch_key(name, KEY)]


# --- the three parts ---------------------------------------------------------------------------------


def _require_torch_npu() -> None:
    try:
        importlib.import_module("torch_npu")
    except ImportError as error:
        raise NotReady(
            f"torch_npu cannot be imported ({error})",
            "source CANN's set_env.sh, for instance: source /usr/local/Ascend/cann/set_env.sh",
            'then, where it is not installed: pip install "torch_npu==2.13.*"',
        ) from error


def find_package() -> Path:
    """The folder of the installed package of ops, where CANN looks for it."""
    places = [Path(part) for part in os.environ.get("ASCEND_CUSTOM_OPP_PATH", "").split(os.pathsep) if part]
    opp = os.environ.get("ASCEND_OPP_PATH", "")
    if opp:
        places.append(Path(opp) / "vendors" / VENDOR)
    for place in places:
        if place.name == VENDOR and (place / "op_api" / "lib" / "libcust_opapi.so").exists():
            return place
    looked = ", ".join(map(str, places)) or "nowhere: neither ASCEND_OPP_PATH nor ASCEND_CUSTOM_OPP_PATH is set"
    raise NotReady(
        f"the package of ops is not installed (looked in {looked})",
        "source CANN's set_env.sh, then build and install it:",
        f"bash {HERE / 'build.sh'} --install",
        "with --install-path, source the set_env.bash that build.sh names",
    )


def find_adapter(library: str | Path | None = None) -> Path:
    """The adapter for torch, a shared library."""
    named = library or os.environ.get("TURBOGR_NPU_LIBRARY")
    path = Path(named) if named else HERE / "build" / "torch" / LIBRARY
    if path.is_file():
        return path
    steps = ["or name the right one in TURBOGR_NPU_LIBRARY"] if named else []
    raise NotReady(f"there is no adapter at {path}", f"build it: {_build_command()}", *steps)


def _build_command() -> str:
    return f"python {HERE / 'torch' / 'setup.py'} build_ext"
