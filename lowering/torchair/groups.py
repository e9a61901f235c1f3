"""Collectives need a process group when the graph is compiled: torchair looks up its communicator then."""

from __future__ import annotations

from torch import distributed, fx

from ...errors import TargetError
from ...graph.provenance import line_of

_NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "c10d", "npu_define")


def require_process_group(graph: fx.Graph) -> None:
    """One clear error, with the user's line, where the graph talks to other processes and there is no group yet."""
    if distributed.is_available() and distributed.is_initialized():
        return
    for node in graph.nodes:
        name = str(node.target)
        if node.op == "call_function" and name.split(".")[0] in _NAMESPACES:
            line = line_of(node)
            raise TargetError(
                f"{name} talks to other processes, and no process group is initialised"
                + (f"\n  {line}" if line else "")
                + "\n  try: torch.distributed.init_process_group() before the first call of the compiled model, 'hccl' "
                "on NPUs, 'gloo' for target='ascend-sim' and target='cpu'"
            )
