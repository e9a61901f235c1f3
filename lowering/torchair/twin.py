"""turbogr's operators in the simulator: the AscendC sources, run by their twin."""

from __future__ import annotations

from typing import Any

from ...kernels.twin.dispatch import CORES, adapter
from ..ge.graph import GraphError, Node
from ..ge.interpreter import register_kernel
from ..ge.prototypes import Prototype
from .operators import arguments_of, operators


def register_kernels() -> None:
    for op, prototype in operators().items():
        register_kernel(prototype.type, _kernel(op, prototype))


def _kernel(op: str, prototype: Prototype) -> Any:
    run = adapter(op)

    def kernel(node: Node, *inputs: Any) -> Any:
        if run is None:
            raise GraphError(f"{node}: the twin has no kernel for turbogr::{op}")
        given = dict(zip(node.ports, inputs, strict=True))
        named = {port.name: given.get(port.name) for port in prototype.inputs}
        return run(*arguments_of(op, prototype, named, node.attributes), cores=CORES)

    return kernel
