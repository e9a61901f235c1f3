"""bf16 storage: dense parameters rest in bf16, and the model computes in fp32 all the same.

A method of the model runs with fp32 copies in the place of its bf16 parameters. In a compiled graph each copy lives
from where it is needed to where it is used, and is made again in the backward; gradients come back in bf16. Tables stay
fp32: a copy of a whole table in every step would cost more than storing it in bf16 saves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def store(model: nn.Module, storage: str, tables: set[nn.Parameter]) -> None:
    """Hold what is no table in bf16, if that is asked for."""
    if storage == "bf16":
        for p in model.parameters():
            if p not in tables:
                p.data = p.data.bfloat16()


def method(model: nn.Module, name: str) -> Callable[..., Any]:
    """A method of the model that computes in fp32, whatever its parameters are stored in."""
    if not any(p.dtype == torch.bfloat16 for p in model.parameters()):
        return getattr(model, name)
    called = _Method(model, name)

    def in_fp32(*args: Any) -> Any:
        wide = {n: p.float() for n, p in called.named_parameters() if p.dtype == torch.bfloat16}
        return torch.func.functional_call(called, wide, args)

    return in_fp32


class _Method(nn.Module):
    """`functional_call` calls modules, not methods."""

    def __init__(self, model: nn.Module, name: str) -> None:
        super().__init__()
        self.model, self.name = model, name

    def forward(self, *args: Any) -> Any:
        return getattr(self.model, self.name)(*args)
