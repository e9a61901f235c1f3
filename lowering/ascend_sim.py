"""Target `ascend-sim`: what an Ascend NPU would be given, converted by the real torchair and executed on this CPU.

The GE graph is interpreted, and turbogr's operators run their AscendC sources in the twin: functionally emulated, not
run on an NPU. It is a way to test, and slow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import Any

from torch import fx

from ._ascend.pipeline import DEFAULT_PIPELINE
from .target import BaseTarget, Hooks, Missing


@dataclass(frozen=True)
class AscendSim(BaseTarget):
    def missing(self, codegen: str) -> list[Missing]:
        from ._ge.torchair import find

        if find() is None:
            return [Missing("torchair", "turbogr doctor --fetch-torchair")]
        return []

    def lower(self, module: fx.GraphModule, inputs: Sequence[Any], codegen: str, hooks: Hooks) -> Callable[..., Any]:
        from ._ascend.compile import lower

        torchair = _simulator()
        return lower(torchair, torchair.CompilerConfig(), module, inputs, hooks)


@lru_cache(maxsize=1)
def _simulator() -> ModuleType:
    from ._ascend import operators, twin
    from ._ge.torchair import simulated

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
