"""AdamW on bf16 storage. Optimizers of rows are turbogr's own."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from ..kernels.adamw import adamw_by_chance


class StochasticAdamW(torch.optim.Optimizer):
    """AdamW for parameters in bf16, with both moments in bf16: 8 bytes a parameter with its gradient instead of 16.

    Arithmetic is in fp32, and results are rounded up or down by chance, in proportion to how near they are: small
    updates, which rounding to nearest would lose, arrive on average. Chance depends on seed, step and parameter only.
    """

    def __init__(
        self, params: Iterable[nn.Parameter], lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8, weight_decay: float = 1e-2, seed: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "seed": seed})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        number = 0
        for group in self.param_groups:
            for p in group["params"]:
                number += 1
                if p.grad is not None:
                    self._update(p, self._state(p), group, number)
        return loss

    def _state(self, p: nn.Parameter) -> dict[str, Any]:
        state = self.state[p]
        if not state:
            state.update(step=0, mean=torch.zeros_like(p), square=torch.zeros_like(p))
        return state

    def _update(self, p: nn.Parameter, state: dict[str, Any], group: dict[str, Any], number: int) -> None:
        state["step"] += 1
        seed = _seed(group["seed"], state["step"], number)
        given = (state["step"], group["lr"], *group["betas"], group["eps"], group["weight_decay"], seed)
        assert p.grad is not None
        adamw_by_chance(p, p.grad, state["mean"], state["square"], *given)


def _seed(*parts: int) -> int:
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
