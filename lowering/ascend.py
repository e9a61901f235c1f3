"""Target `ascend`: graphs for an Ascend NPU, by way of torchair's GE graph mode.

Nothing here has run on an NPU. `ascend-sim` takes the same road up to the GE graph and executes that on a CPU.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from ._ascend.pipeline import DEFAULT_PIPELINE
from .target import BaseTarget, Hooks, Missing


@dataclass(frozen=True)
class Ascend(BaseTarget):
    def missing(self, codegen: str) -> list[Missing]:
        if importlib.util.find_spec("torch_npu") is None:
            return [Missing("torch_npu", "install it and CANN (docs/ascend.md), or use target 'ascend-sim' or 'cpu'")]
        return []

    def lower(self, module: fx.GraphModule, inputs: Sequence[Any], codegen: str, hooks: Hooks) -> Callable[..., Any]:
        from ..kernels.ascendc.load import load
        from ._ascend.compile import lower
        from ._ge.torchair import installed

        torchair = installed()
        load()
        return lower(torchair, torchair.CompilerConfig(), module, inputs, hooks)


TARGET = Ascend(
    name="ascend",
    summary="an Ascend NPU, by way of torchair's GE graph mode; not yet run on hardware",
    codegens=("ge",),
    default_pipeline=DEFAULT_PIPELINE,
)
