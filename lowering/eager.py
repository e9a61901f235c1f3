"""Target `eager`: the rewritten graph under ordinary autograd, for debugging."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from ..pipeline.target import BaseTarget, Hooks
from .common.pipelines import PACKING


@dataclass(frozen=True)
class Eager(BaseTarget):
    def lower(self, module: fx.GraphModule, inputs: Sequence[Any], codegen: str, hooks: Hooks) -> Callable[..., Any]:
        return module.forward


TARGET = Eager(
    name="eager",
    summary="the rewritten graph under ordinary autograd; no joint or post-grad passes",
    codegens=("python",),
    default_pipeline=f"{PACKING}, eliminate-dead-code",
)
