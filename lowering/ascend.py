"""Target `ascend`: graphs for an Ascend NPU, by way of torchair's GE graph mode.

Nothing here has run on an NPU. `ascend-sim` takes the same road up to the GE graph and executes that on a CPU.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from ..errors import TargetError
from ..pipeline.target import BaseTarget, Hooks, Missing
from .torchair.pipeline import DEFAULT_PIPELINE
from .torchair.settings import Settings

CANN = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME", "ASCEND_OPP_PATH", "ASCEND_CUSTOM_OPP_PATH")  # by its set_env.sh


@dataclass(frozen=True)
class Ascend(BaseTarget):
    static_shapes: ClassVar[bool] = True

    def missing(self, codegen: str) -> list[Missing]:
        if "torch_npu" not in sys.modules and importlib.util.find_spec("torch_npu") is None:
            return [Missing("torch_npu", "install it and CANN (docs/ascend.md); target='ascend-sim' simulates an NPU")]
        if "torch_npu" not in sys.modules and not any(os.environ.get(name) for name in CANN):
            remedy = "source set_env.sh of its toolkit, such as /usr/local/Ascend/cann/set_env.sh (docs/ascend.md)"
            return [Missing("CANN", remedy)]
        return []

    def check_options(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        return Settings.read(given, self.name).given()

    def lower(self, module: fx.GraphModule, inputs: Sequence[Any], codegen: str, hooks: Hooks) -> Callable[..., Any]:
        from ..kernels.ascendc.load import NotReady, load
        from .torchair.compile import lower
        from .torchair.load import INSTEAD, installed

        torchair = installed()
        try:
            load()
        except NotReady as reason:
            raise TargetError(f"{reason}\n  {INSTEAD}") from reason
        return lower(torchair, Settings.read(hooks.target_options), module, inputs, hooks)


TARGET = Ascend(
    name="ascend",
    summary="an Ascend NPU, by way of torchair's GE graph mode; not yet run on hardware",
    codegens=("ge",),
    default_pipeline=DEFAULT_PIPELINE,
)
