"""AdamW on bf16 storage. Optimizers of rows are turbogr's own."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

CHUNK = 1 << 20  # numbers that are widened at a time


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
        step, (first, second) = state["step"], group["betas"]
        rate = group["lr"] / (1 - first**step)
        generator = torch.Generator().manual_seed(_seed(group["seed"], step, number))
        assert p.grad is not None
        flat = [x.view(-1) for x in (p, p.grad, state["mean"], state["square"])]
        for at in range(0, p.numel(), CHUNK):
            stored, gradient, stored_mean, stored_square = (x[at : at + CHUNK] for x in flat)
            gradient = gradient.float()
            mean = stored_mean.float().lerp_(gradient, 1 - first)
            square = stored_square.float().mul_(second).addcmul_(gradient, gradient, value=1 - second)
            root = (square / (1 - second**step)).sqrt_().add_(group["eps"])
            value = stored.float().mul_(1 - group["lr"] * group["weight_decay"]).addcdiv_(mean, root, value=-rate)
            chance = torch.empty(value.numel(), dtype=torch.int64).random_(generator=generator)
            for target, x in ((stored, value), (stored_mean, mean), (stored_square, square)):
                target.copy_(round_by_chance(x, chance))
                chance >>= 16


def round_by_chance(x: Tensor, chance: Tensor) -> Tensor:
    """fp32 to bf16, by adding the low 16 bits of `chance` to those that bf16 lacks; not finite values stay."""
    bits = x.view(torch.int32) + (chance & 0xFFFF).int()
    return torch.where(x.isfinite(), (bits & -0x10000).view(torch.float32), x).bfloat16()


def _seed(*parts: int) -> int:
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
