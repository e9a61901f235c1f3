"""Target `ascend-sim`: what an Ascend NPU would be given, converted by the real torchair and executed on this CPU.

The GE graph is interpreted, and turbogr's operators run their AscendC sources in the twin: functionally emulated, not
run on an NPU. It is a way to test, and slow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import Any, ClassVar

from torch import fx

from ..pipeline.target import BaseTarget, Hooks, Missing
from .torchair.pipeline import DEFAULT_PIPELINE
from .torchair.settings import Settings


@dataclass(frozen=True)
class AscendSim(BaseTarget):
    static_shapes: ClassVar[bool] = True

    def missing(self, codegen: str) -> list[Missing]:
        from .torchair.load import find

        if find() is None:
            return [Missing("torchair", "turbogr doctor --fetch-torchair")]
        return []

    def check_options(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        return Settings.read(given, self.name).given()

    def locate(self, run: Callable[[], Any]) -> str:
        """The first GE node that computes something else than the FX node it was made from."""
        from .ge.bisect import comparing

        with comparing() as differences:
            run()
        if differences:
            return f"first difference between a GE graph and its FX graph:\n{differences[0]}"
        return "every GE graph computes what its FX graph does: the difference is older than these graphs"

    def lower(self, module: fx.GraphModule, inputs: Sequence[Any], codegen: str, hooks: Hooks) -> Callable[..., Any]:
        from .torchair.compile import lower

        return lower(_simulator(), Settings.read(hooks.target_options), module, inputs, hooks, simulated=True)


@lru_cache(maxsize=1)
def _simulator() -> ModuleType:
    from .torchair import operators, twin
    from .torchair.load import simulated

    torchair = simulated()
    operators.register_prototypes()
    twin.register_kernels()
    return torchair


TARGET = AscendSim(
    name="ascend-sim",
    summary="the road to an Ascend NPU on this CPU: torchair converts, GE's graph is interpreted, AscendC emulated",
    codegens=("ge",),
    default_pipeline=DEFAULT_PIPELINE,
)
