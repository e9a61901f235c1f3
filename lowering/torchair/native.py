"""Stand-in for torchair's native module: keeps the graphs that torchair loads, and runs them on the CPU."""

from __future__ import annotations

import enum
import itertools
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ..ge import prototypes
from ..ge.graph import Graph, GraphError, from_bytes
from ..ge.interpreter import Interpreter

NAME = "torchair.core._torchair"
MARK = "simulated_by_turbogr"
SOC = "Ascend910B"

_alive: weakref.WeakSet[LoadedGraph] = weakref.WeakSet()
_watchers: list[list[LoadedGraph]] = []
_numbers = itertools.count()


TorchDataType = enum.IntEnum(
    "TorchDataType",
    "BOOL UINT8 INT8 INT16 UINT16 INT32 UINT32 INT64 UINT64 BF16 FLOAT16 FLOAT32 FLOAT64 COMPLEX64 COMPLEX128",
    start=0,
)


class LoadedGraph:
    """One graph as GE would hold it; torchair derives its executor from this class."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.number = next(_numbers)
        self.graph: Graph | None = None
        self.interpreter: Interpreter | None = None
        self.options: dict[str, str] = {}
        self.hints: tuple[Any, Any] = ((), ())
        self.runs = 0

    def load(
        self,
        serialized: bytes,
        options: dict[str, str],
        input_placements: Sequence[int],
        output_dtypes: Sequence[int],
        executor_type: int,
    ) -> None:
        self.graph = from_bytes(serialized)
        self.options = dict(options)
        _alive.add(self)
        for watcher in _watchers:
            watcher.append(self)

    def set_hint_shape(self, inputs: Any, outputs: Any) -> None:
        self.hints = (inputs, outputs)

    def compile(self) -> None:
        if self.graph is None:
            raise GraphError(f"graph {self.name} was compiled before it was loaded")
        self.interpreter = Interpreter(self.graph)

    def auto_tune(self, arguments: Any) -> None:
        """There is nothing to tune."""

    def run(self, arguments: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor | None], Any]) -> list[torch.Tensor]:
        inputs, assigned, _stream = arguments
        if self.interpreter is None:
            raise GraphError(f"graph {self.name} was run before it was compiled")
        self.runs += 1
        return self.interpreter.run(inputs, assigned)


def loaded() -> list[LoadedGraph]:
    """Graphs somebody still holds, oldest first."""
    return sorted(_alive, key=lambda graph: graph.number)


@contextmanager
def watching() -> Iterator[list[LoadedGraph]]:
    """Graphs loaded inside of the block, which happens when each is first called."""
    seen: list[LoadedGraph] = []
    _watchers.append(seen)
    try:
        yield seen
    finally:
        _watchers[:] = [watcher for watcher in _watchers if watcher is not seen]


class Generator:
    """What torchair asks of an NPU's generator. torch's CPU generator decides, so that a seed repeats a run."""

    def initial_seed(self) -> int:
        return torch.initial_seed() & (2**63 - 1)  # becomes an int64 constant of the graph

    def get_offset(self) -> int:
        return int(torch.randint(2**62, (), dtype=torch.int64))

    def set_offset(self, offset: int) -> None:
        """The next offset is drawn anew."""


def adopt(torchair: ModuleType) -> None:
    """Random ops of converted graphs draw from our generator; torchair's own would seed torch with 10."""
    from torchair.ge import _ge_graph

    state = _ge_graph._GraphRngState
    _ge_graph.map_graph_rng_state = lambda gen=None: state(Generator())


def module() -> ModuleType:
    stand_in = ModuleType(NAME)
    members: dict[str, Any] = {
        MARK: True,
        "TorchNpuGraphBase": LoadedGraph,
        "TorchDataType": TorchDataType,
        "get_registered_ir_def": registered_definition,
        "check_cann_compat": lambda op, inputs, attributes: "",  # nothing to complain about
        "GetSocName": lambda: SOC,
        "StupidRepeat": lambda word, times: word * times,
        "export": _export,
        "as_torch_tensors": lambda *arguments: (1, []),  # not available
    }
    ignored = ("InitializeGraphEngine", "FinalizeGraphEngine", "InitDeviceStdoutChannel", "SetDebugLogPath",
               "AclmdlSetDump", "AclopStartDumpArgs", "AclopStopDumpArgs")  # fmt: skip
    for name in ignored:
        members[name] = lambda *arguments: None
    vars(stand_in).update(members)
    return stand_in


def registered_definition(op: str) -> tuple[str, list[Any], list[Any], list[Any]]:
    """What GE's registry says of an operator type: inputs, outputs and attributes in order."""
    prototype = prototypes.find(op)
    if prototype is None:
        return "ERROR", [], [], []
    inputs = [(port.name, port.kind) for port in prototype.inputs]
    outputs = [(port.name, port.kind) for port in prototype.outputs]
    return "SUCCESS", inputs, outputs, [(a.name, prototypes.TAGS.get(a.type, a.type)) for a in prototype.attributes]


def _export(serialized: bytes, options: dict[str, str]) -> None:
    Path(options["export_path_dir"], options["export_name"]).write_bytes(serialized)
