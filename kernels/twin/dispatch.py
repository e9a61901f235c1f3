"""The twin as a device: inside of `with device():`, torch ops that have an AscendC kernel run that kernel.

Where a call asks for what the kernel does not have yet, the op's reference runs, with a warning, as on an NPU.
It sits below autograd, so gradients go through the AscendC kernels of the backward, and it sees ops that a compiled
graph calls as well as those that are called by hand.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from ..ascendc.limits import lacking
from ..declare import CONTRACTS, NAMESPACE

CORES = 40  # vector cores of Ascend 910B3 and B4
# Modules of this package, by the torch ops they run.
ADAPTERS = {
    "jagged_attention": "attention",
    "jagged_attention_backward": "attention",
    "norm_gate": "norm_gate",
    "norm_gate_backward": "norm_gate",
    "gather_rows": "rows",
    "scatter_rows": "rows",
    "embedding": "rows",
    "embedding_backward": "rows",
    "sampled_softmax": "sampled_softmax",
    "sampled_softmax_backward": "sampled_softmax",
}


class Twin(TorchDispatchMode):
    """Ops of the turbogr namespace go to the twin; `ran` lists which did, `left` which ran their reference."""

    def __init__(self, cores: int) -> None:
        super().__init__()
        self.cores = cores
        self.ran: list[str] = []
        self.left: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().partition("::")[2].partition(".")[0]
        kernel = adapter(name) if func.namespace == NAMESPACE else None
        if kernel is None:
            return func(*args, **(kwargs or {}))
        given = {**dict(zip((a.name for a in func._schema.arguments), args, strict=False)), **(kwargs or {})}
        if absent := lacking(name, given):
            self.left.append(name)
            text = f"turbogr::{name}: the reference runs instead of the AscendC kernel, which has no {absent}"
            warnings.warn(text, stacklevel=2)
            return func(*args, **(kwargs or {}))
        CONTRACTS[name].check(**given)
        self.ran.append(name)
        return kernel(*args, **(kwargs or {}), cores=self.cores)


@contextmanager
def device(cores: int = CORES) -> Iterator[Twin]:
    """Torch ops that have an AscendC kernel run it, on so many vector cores."""
    if cores < 1:
        raise ValueError(f"a device has at least 1 vector core, not {cores}")
    with Twin(cores) as twin:
        yield twin


def adapter(op: str) -> Callable[..., Any] | None:
    """The function that runs a torch op in the twin; None where it has no AscendC kernel."""
    module = ADAPTERS.get(op)
    return getattr(import_module(f".{module}", __package__), op) if module else None
