"""Find torchair and load it: whole where there is an NPU, its Python half over a stand-in where there is none.

Loading changes the process, and is put right again: signal handlers, the class of loggers, the exit hook, the table of
traceable collectives. What torchair patches in torch holds only inside of `patched()`. What stays, and harms nobody:
op libraries `air` and `npu_define`, an attribute `_ge_converter` on ops, the name of log level 35, and the refusal to
import torch_npu into a process that simulates it.
"""

from __future__ import annotations

import atexit
import importlib.machinery
import importlib.util
import logging
import os
import re
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ...errors import TargetError
from ...files import obstacle
from ...kernels.cpu.cache import Refused, user_folder
from ..ge import prototypes
from . import native
from .patches import kept, patched

__all__ = ["decompositions", "find", "installed", "patched", "release", "simulated", "version_of"]

VARIABLE = "TURBOGR_TORCHAIR"
NEEDED = {"google.protobuf": "protobuf", "yaml": "pyyaml", "packaging": "packaging", "numpy": "numpy"}
INSTEAD = "or compile for target='cpu'"
_loading = threading.Lock()
_refusing = threading.Event()


def release() -> str:
    """The release of torch_npu whose torchair belongs to this torch, as '2.13'."""
    return ".".join(torch.__version__.split(".")[:2])


def find() -> Path | None:
    """The folder of torchair's Python package, or None. Nothing is imported.

    $TURBOGR_TORCHAIR, where it is set, is the only place looked at; else turbogr's cache, else an installed torch_npu.
    Any folder will do that a torch_npu wheel was unpacked into, or the package inside of it.
    """
    if named := os.environ.get(VARIABLE):
        return _inside(Path(named).expanduser().absolute())
    return _cached() or _inside(_folder_of_torch_npu())


def in_use() -> Path | None:
    """The folder of the torchair that this process uses, or would use."""
    loaded = sys.modules.get("torchair")
    return Path(loaded.__path__[0]) if loaded else find()


def version_of(folder: Path) -> str:
    """The version of the torch_npu that a torchair folder is part of, or ''."""
    package = folder.parent.parent  # torch_npu/dynamo/torchair
    with_version = package / "version.py"
    if package.name == "torch_npu" and with_version.is_file():
        found = re.search(r"^__version__\s*=\s*['\"]([^'\"]+)", with_version.read_text(encoding="utf-8"), re.MULTILINE)
        if found:
            return found[1]
    described = sorted(package.parent.glob("torch_npu-*.dist-info"))
    return described[-1].name.removeprefix("torch_npu-").removesuffix(".dist-info") if described else ""


def simulated() -> ModuleType:
    """torchair without torch_npu: converts as for an NPU, and its graphs run in the interpreter of this package."""
    with _loading:
        if loaded := _simulating():
            return loaded
        if "torch_npu" in sys.modules:
            raise TargetError(
                "torch_npu is already imported, and torchair would address the NPU instead of the simulator\n"
                "  try: TORCH_DEVICE_BACKEND_AUTOLOAD=0 in the environment, in a process that does not import torch_npu"
            )
        if "torchair" in sys.modules:
            raise TargetError("another torchair is already imported; simulate in a process of its own")
        folder = _usable()
        try:
            return _load(folder)
        except Exception as error:
            for name in [n for n in sys.modules if n.partition(".")[0] == "torchair"]:
                del sys.modules[name]
            raise TargetError(
                f"torchair in {folder} cannot be loaded: {type(error).__name__}: {error}\n"
                f"  try: turbogr doctor --fetch-torchair, in a new process; {INSTEAD}"
            ) from error


def installed() -> ModuleType:
    """torchair as torch_npu brings it, on a machine with an NPU."""
    if _simulating():
        raise TargetError("this process simulates the NPU (target 'ascend-sim'); use target 'ascend' in another one")
    if "torch_npu" not in sys.modules and importlib.util.find_spec("torch_npu") is None:
        raise TargetError(
            f"torch_npu is not installed\n  try: pip install 'torch_npu=={release()}.*' on a machine with an NPU and "
            f"CANN; target='ascend-sim' simulates one; {INSTEAD}"
        )
    try:
        import torch_npu
    except Exception as error:
        # What is left of a package that failed half-way must not pass for one that works.
        for name in [n for n in sys.modules if n.partition(".")[0] == "torch_npu"]:
            del sys.modules[name]
        raise TargetError(
            f"torch_npu cannot be imported, most often because CANN is missing: {type(error).__name__}: {error}\n"
            f"  try: source set_env.sh of the CANN toolkit, then python -c 'import torch_npu'; "
            f"target='ascend-sim' needs no CANN; {INSTEAD}"
        ) from error
    _check_release(torch_npu.__version__, "the installed torch_npu")
    npu = vars(torch)["npu"]  # torch_npu has put it there
    if not npu.is_available() or npu.device_count() == 0:
        raise TargetError(f"torch_npu finds no NPU\n  try: npu-smi info, and ASCEND_RT_VISIBLE_DEVICES; {INSTEAD}")
    try:
        import torchair
    except ImportError as error:
        raise TargetError(
            f"torch_npu {torch_npu.__version__} comes without a working torchair: {error}\n"
            f"  try: pip install protobuf pyyaml packaging; {INSTEAD}"
        ) from error
    return torchair


def decompositions() -> dict[Any, Any]:
    """What torchair takes apart before it converts; AOTAutograd around `get_compiler` needs it for all-to-all."""
    from torchair._utils import get_npu_default_decompositions

    return dict(get_npu_default_decompositions())


def _inside(folder: Path | None) -> Path | None:
    if folder is None:
        return None
    places = (".", "torchair", "dynamo/torchair", "torch_npu/dynamo/torchair")
    return next((folder / p for p in places if (folder / p / "npu_fx_compiler.py").is_file()), None)


def _cached() -> Path | None:
    """Only where nobody else could have written it, because it is run."""
    try:
        folder = user_folder() / "torchair"
    except Refused:
        return None
    return _inside(folder) if folder.is_dir() and not obstacle(folder) else None


def _folder_of_torch_npu() -> Path | None:
    try:
        spec = importlib.util.find_spec("torch_npu")  # looks for a top-level package and does not import it
    except ValueError:
        return None
    places = list(spec.submodule_search_locations or []) if spec else []
    return Path(places[0]) if places else None


def _usable() -> Path:
    folder = find()
    if folder is None:
        named = os.environ.get(VARIABLE)
        why = f"{VARIABLE}={named} holds no torchair" if named else "torchair was not found"
        raise TargetError(
            f"{why}\n  try: turbogr doctor --fetch-torchair; or unpack a wheel of torch_npu {release()} "
            f"(pip install --no-deps --target DIR 'torch_npu=={release()}.*') and set {VARIABLE}=DIR; {INSTEAD}"
        )
    _check_release(version_of(folder), f"torchair in {folder}")
    absent = [package for module, package in NEEDED.items() if not _importable(module)]
    if absent:
        raise TargetError(f"torchair needs {', '.join(absent)}\n  try: pip install {' '.join(absent)}; {INSTEAD}")
    return folder


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False  # its parent is missing


def _check_release(version: str, whose: str) -> None:
    if not version.startswith(f"{release()}."):
        is_of = f"is of torch_npu {version}" if version else "does not say of which torch_npu it is"
        raise TargetError(
            f"{whose} {is_of}, and torch {torch.__version__} needs {release()}\n"
            f"  try: turbogr doctor --fetch-torchair; or pip install --no-deps --target DIR 'torch_npu=={release()}.*' "
            f"and {VARIABLE}=DIR; {INSTEAD}"
        )


def _simulating() -> ModuleType | None:
    stand_in = sys.modules.get(native.NAME)
    return sys.modules["torchair"] if getattr(stand_in, native.MARK, False) else None


def _load(folder: Path) -> ModuleType:
    if not _refusing.is_set():
        sys.meta_path.insert(0, _NoTorchNpu())
        _refusing.set()
    spec = importlib.util.spec_from_file_location(
        "torchair", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["torchair"] = module
    with _process_as_before(), kept():
        sys.modules[native.NAME] = native.module()
        spec.loader.exec_module(module)
    native.adopt(module)
    return module


@contextmanager
def _process_as_before() -> Iterator[None]:
    """Whatever torchair's import does to the process beyond its own modules is undone."""
    in_main = threading.current_thread() is threading.main_thread()
    handlers = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
    loggers = logging.getLoggerClass()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # one for each converter of torch.ops.npu, which is not there
            yield
    finally:
        logging.setLoggerClass(loggers)
        for number, handler in handlers.items():
            if in_main and handler is not None:
                signal.signal(number, handler)
        if backend := sys.modules.get("torchair.core._backend"):
            # It would reset Dynamo at exit, for the sake of device memory that there is none of.
            atexit.unregister(backend.finalize_graph_engine)
        # Its handler holds on to whatever sys.stdout was at the time of the import; records go the usual way instead.
        logging.getLogger("torchair").handlers.clear()


class _NoTorchNpu(MetaPathFinder):
    """Keeps torch_npu out: without CANN its import fails half-way and leaves torch changed.

    Others may still ask whether it is installed. An entry None in sys.modules would not do, because torchair asks
    whether there is one.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] != "torch_npu":
            return None
        found = importlib.machinery.PathFinder.find_spec(fullname, path)
        if found is not None:
            found.loader = _Refuse()
        return found


class _Refuse(Loader):
    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        raise ModuleNotFoundError(f"{spec.name} stays out of a process that simulates the NPU", name=spec.name)

    def exec_module(self, module: ModuleType) -> None:
        raise AssertionError("never created")


prototypes.read_from(in_use)
