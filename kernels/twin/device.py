"""The twin as a device: inside of `with device():`, torch ops that have an AscendC kernel run that kernel.

It sits below autograd, so gradients go through the AscendC kernels of the backward, and it sees ops that a compiled
graph calls as well as those that are called by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from ..declare import NAMESPACE

CORES = 40  # vector cores of Ascend 910B3 and B4


class Twin(TorchDispatchMode):
    """Ops of the turbogr namespace go to the twin; `ran` lists which did."""

    def __init__(self, cores: int, options: dict[str, Any]) -> None:
        super().__init__()
        self.cores, self.options = cores, options
        self.ran: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().partition("::")[2].partition(".")[0]
        kernel = adapters().get(name) if func.namespace == NAMESPACE else None
        if kernel is None:
            return func(*args, **(kwargs or {}))
        self.ran.append(name)
        return kernel(*args, **(kwargs or {}), cores=self.cores)


@contextmanager
def device(cores: int = CORES, **options: Any) -> Iterator[Twin]:
    """Torch ops that have an AscendC kernel run it, on so many vector cores."""
    with Twin(cores, options) as twin:
        yield twin


def adapters() -> dict[str, Callable[..., Any]]:
    """By the name of the torch op."""
    from . import attention, norm_gate, rows, sampled_softmax

    return {
        name: getattr(module, name)
        for module in (attention, norm_gate, rows, sampled_softmax)
        for name in module.OPS
    }
