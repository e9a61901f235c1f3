"""What the torch ops can do and their AscendC kernels cannot yet, by the arguments that ask for it.

Such calls run the op's reference instead: between GE graphs (`lowering/torchair/coverage.py`, with a remark), on an NPU
without a graph (`torch/adapter.cpp`, with a warning), and in the twin (`twin/dispatch.py`, with a warning).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_ATTENTION: dict[str, tuple[Any, ...]] = {"activation": ("softmax", "silu"), "sink": (None,), "score_cap": (0.0,)}
# Values that a kernel takes; arguments that are not listed have no such limit.
TAKEN: dict[str, dict[str, tuple[Any, ...]]] = {
    "jagged_attention": _ATTENTION,
    "jagged_attention_backward": _ATTENTION,
}


def lacking(op: str, arguments: Mapping[str, Any]) -> str:
    """The first thing that a call asks for and the kernel does not have; empty where it has all."""
    for name, taken in TAKEN.get(op, {}).items():
        value = arguments.get(name, taken[0])
        plain = isinstance(value, (str, int, float))  # tensors and nodes of graphs are none of the values listed
        if value is not None and not (plain and value in taken):
            return value if isinstance(value, str) else name
    return ""
