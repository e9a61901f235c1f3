"""AscendC kernels on a CPU: functionally emulated, not run on an NPU.

    with device(cores=40):
        torch.ops.turbogr.gather_rows(x, rows)      # runs kernels/ascendc/gather_rows in the twin, as does its backward

`include/` emulates the part of AscendC that the kernels use and checks its rules, `build.py` compiles a kernel against
it, `launch.py` runs one, `dispatch.py` sends torch ops there.
"""

from .dispatch import device
from .launch import TwinFault, launch

__all__ = ["TwinFault", "device", "launch"]
